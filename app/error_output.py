"""Turn an error into a line, a hint and an exit code, and never into a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from personalpeft.errors import (
    HomeError,
    PersonalPeftError,
    format_origin,
    get_error_codes,
    get_error_type,
)
from personalpeft.extras import extra_required
from personalpeft_app.options import GlobalOptions
from personalpeft_app.output import apply_style, format_json, printable

USAGE = 2
BUG = 70
STOPPED = 130
BROKEN_PIPE = 141
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
# The innermost lines of code, which show where a bug is.
_ORIGIN_LINES = 8


@contextmanager
def error_boundary(common: Callable[[], GlobalOptions]) -> Iterator[None]:
    """Report any error and exit with its code. Exceptions of click pass."""
    try:
        with extra_required():
            yield
        sys.stdout.flush()
    except PersonalPeftError as error:
        raise click.exceptions.Exit(report_error(error, as_data=common().json)) from error
    except BrokenPipeError as error:
        _discard_stdout()
        raise click.exceptions.Exit(BROKEN_PIPE) from error
    except KeyboardInterrupt as error:
        print_error("Stopped.", "", kind="Cancelled", code=STOPPED, as_data=common().json)
        raise click.exceptions.Exit(STOPPED) from error
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as bug:  # The one place that must let nothing pass.
        if is_full(bug):
            raise click.exceptions.Exit(report_full(bug, as_data=common().json)) from bug
        shown = wrap_bug(bug)
        code = print_error(shown.message, shown.hint, kind="Bug", code=BUG, as_data=common().json)
        raise click.exceptions.Exit(code) from bug


def is_full(error: Exception) -> bool:
    """Return whether a disk was full, or a file grew too large for it."""
    return isinstance(error, OSError) and error.errno in _FULL


def report_full(error: Exception, *, as_data: bool) -> int:
    """Report that nothing more can be written, perhaps not to stdout. Return the exit code."""
    _discard_stdout()
    return report_error(
        HomeError(
            f"Nothing more could be written: {error}.", hint="Free some space, and run it again."
        ),
        as_data=as_data,
    )


def _discard_stdout() -> None:
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
