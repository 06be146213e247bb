"""Write docs/reference/commands.md from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from personalpeft.errors import ERROR_CODES
from personalpeft_app.cli import PROGRAM, cli
from personalpeft_app.error_output import BROKEN_PIPE, BUG, STOPPED
from personalpeft_app.options import GLOBAL_OPTIONS_TITLE

_WIDTH = 96

_HEAD = """\
# Commands

This page is made by `make docs` from the commands themselves; change the texts there.

Data goes to stdout, progress, notes and errors to stderr. Piped output has no colours and is not
cut to a width. With `--json` every command prints one JSON value, `chat` one for each reply. The
options of every command stand once, under `personalpeft`; they may come before or after the
command's name. `PERSONALPEFT_CACHE` names the folder of what can be made
anew, `PERSONALPEFT_PLUGINS` the plugins that may load; `NO_COLOR` turns colours off.

## Exit codes

An error is two lines on stderr, `error: ...` and `hint: ...`, or with `--json`
`{"error": {"kind", "message", "hint", "exit_code"}}`. It has changed nothing.

| exit code | HTTP status | error | when |
| --- | --- | --- | --- |
"""


def render() -> str:
    """The whole page."""
    return _HEAD + "".join(f"{line}\n" for line in (*_codes(), *_commands()))


def _codes() -> Iterator[str]:
    yield "| 0 | | | It is done. A refused learn is a report, not an error. |"
    for error, outcome in ERROR_CODES.items():
        when = " ".join((error.__doc__ or "").partition("\n\n")[0].split())
        yield f"| {outcome.exit_code} | {outcome.http_status} | `{error.__name__}` | {when} |"
    yield "| 2 | | `Usage` | A command or option that is not there, or a value of the wrong kind. |"
    yield f"| {BUG} | | `Bug` | A mistake in personalpeft itself; the details are in a file that the hint names. |"
    yield f"| {STOPPED} | | `Cancelled` | Ctrl-C. |"
    yield f"| {BROKEN_PIPE} | | | The reader of stdout has gone; nothing is said. |"


def _commands() -> Iterator[str]:
    root = _context(cli, None, PROGRAM)
    yield from _one(root, 2)
    for name in cli.list_commands(root):
        yield from _tree(cli.commands[name], root, 2)


def _tree(command: click.Command, parent: click.Context, level: int) -> Iterator[str]:
    context = _context(command, parent, str(command.name))
    yield from _one(context, level)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from _tree(command.commands[name], context, level + 1)


def _one(context: click.Context, level: int) -> Iterator[str]:
    yield from ("", f"{'#' * level} {context.command_path}", "", "```text")
    # The options that every command takes stand once, in the help of the program itself.
    sections = re.split(r"\n\n(?=\S)", context.get_help())
    if context.parent is not None:
        sections = [each for each in sections if not each.startswith(GLOBAL_OPTIONS_TITLE)]
    yield from (line.rstrip() for line in "\n\n".join(sections).splitlines())
    yield "```"


def _context(command: click.Command, parent: click.Context | None, name: str) -> click.Context:
    return click.Context(
        command,
        parent=parent,
        info_name=name,
        terminal_width=_WIDTH,
        max_content_width=_WIDTH,
        help_option_names=["-h", "--help"],
    )


if __name__ == "__main__":
    click.echo(render(), nl=False)
