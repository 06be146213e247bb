"""Turn an error into a line, a hint and an exit code, and never into a traceback."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import click

from personalpeft.errors import (
    HomeError,
    PersonalPeftError,
    format_origin,
    get_error_codes,
    get_error_type,
)
from personalpeft_app.output import apply_style, format_json, printable

USAGE = 2
BUG = 70
STOPPED = 130
BROKEN_PIPE = 141
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
# The innermost lines of code, which show where a bug is.
_ORIGIN_LINES = 8


def report_exception(error: Exception, *, as_data: bool) -> int:
    """Report an error of the library, a full disk or a bug. Return the exit code."""
    if isinstance(error, PersonalPeftError):
        return report_error(error, as_data=as_data)
    if isinstance(error, OSError) and error.errno in _FULL:
        # Perhaps stdout can take nothing more either.
        discard_stdout()
        hint = "Free some space, and run it again."
        full = HomeError(f"Nothing more could be written: {error}.", hint=hint)
        return report_error(full, as_data=as_data)
    bug = wrap_bug(error)
    return print_error(bug.message, bug.hint, kind="Bug", code=BUG, as_data=as_data)


def discard_stdout() -> None:
    """Discard what stdout still holds: when it ends, the interpreter would fail again."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def report_error(error: PersonalPeftError, *, as_data: bool) -> int:
    """Print an error and its hint on stderr. Return the exit code."""
    code = get_error_codes(error).exit_code
    return print_error(
        error.message, error.hint, kind=get_error_type(error).__name__, code=code, as_data=as_data
    )


def print_error(message: str, hint: str, *, kind: str, code: int, as_data: bool) -> int:
    """Print an error on stderr, as two lines or as JSON. Return the code."""
    if as_data:
        data = {"error": {"kind": kind, "message": message, "hint": hint, "exit_code": code}}
        click.echo(format_json(data, indent=None), err=True)
        return code
    click.echo(f"{apply_style('error:', fg='red', bold=True)} {printable(message)}", err=True)
    if hint:
        click.echo(f"{apply_style('hint:', fg='cyan')} {printable(hint)}", err=True)
    return code


def wrap_bug(bug: Exception) -> PersonalPeftError:
    """Return an unexpected error as one to show. The hint has the lines of code to report."""
    text = " ".join(str(bug).split())[:300]
    message = f"This is a bug in personalpeft: {type(bug).__name__}{': ' + text if text else ''}"
    lines = "\n".join(format_origin(bug).splitlines()[-_ORIGIN_LINES:])
    return PersonalPeftError(message, hint=f"Please report it with these lines:\n{lines}")
