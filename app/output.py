"""Print data to stdout, as text or JSON, and notes to stderr.

Invariants: only data reaches stdout. Control characters are shown and not sent, so text from a
model or a file cannot control the terminal. Piped output has no colours and is not cut to a width.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from personalpeft.formatting import to_json
from personalpeft_app.options import GlobalOptions

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CONTROL_IN_JSON = re.compile(r"[\x7f-\x9f]")


def printable(text: str) -> str:
    """Return the text with control characters, except tabs and line ends, escaped."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text.replace("\r\n", "\n"))


def format_json(value: Any, *, indent: int | None = 2) -> str:
    """Return JSON without control characters."""
    text = json.dumps(to_json(value), ensure_ascii=False, indent=indent, allow_nan=False)
    return _CONTROL_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def emit(
    common: GlobalOptions,
    data: Any,
    text: str,
    *,
    empty: str = "",
    renamed: Mapping[str, str] | None = None,
) -> None:
    """Print data as JSON with --json, else as text. For an empty text print a note, if any.

    ``renamed`` has the current name of each old key, which is printed too for one release.
    """
    if common.json:
        if renamed:
            data = data | {old: data[new] for old, new in renamed.items()}
        click.echo(format_json(data))
    elif text:
        click.echo(printable(text))
    elif empty:
        info(common, empty)


def write(text: str) -> None:
    """Print a part of a reply without a line end."""
    click.echo(printable(text), nl=False)


def info(common: GlobalOptions, text: str) -> None:
    """Print a note on stderr, unless --json or --quiet."""
    if not common.quiet and not common.json:
        click.echo(apply_style(printable(text), dim=True), err=True)


def apply_style(text: str, **style: Any) -> str:
    """Return the text in a style if stderr supports colours."""
    return click.style(text, **style) if supports_color() else text


def supports_color() -> bool:
    """Return whether stderr is a terminal with colours and NO_COLOR is not set."""
    return (
        sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def to_one_line(text: str) -> str:
    return " ".join(text.split())


def format_time(at: datetime) -> str:
    """Return a time in the local zone, to the minute."""
    return at.astimezone().strftime("%Y-%m-%d %H:%M")


def format_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, flexible: Sequence[int] = ()
) -> str:
    """Return columns under headings; empty without rows.

    On a terminal that is too narrow the ``flexible`` columns are cut.
    """
    if not rows:
        return ""
    from rich.cells import cell_len, set_cell_size

    grid = [[to_one_line(printable(cell)) for cell in row] for row in (headings, *rows)]
    widths = [max(cell_len(row[column]) for row in grid) for column in range(len(headings))]
    if sys.stdout.isatty():
        over = sum(widths) + 2 * (len(widths) - 1) - shutil.get_terminal_size().columns
        while over > 0 and any(widths[column] > 12 for column in flexible):
            widths[max(flexible, key=lambda column: widths[column])] -= 1
            over -= 1

    def fit(cell: str, width: int) -> str:
        return cell if cell_len(cell) <= width else set_cell_size(cell, width - 1).rstrip() + "…"

    lines = []
    for row in grid:
        cells = (
            set_cell_size(fit(cell, width), width) for cell, width in zip(row, widths, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
