"""Read texts from an argument, a pipe or an editor."""

from __future__ import annotations

import sys

import click

from personalpeft.errors import InvalidInput

STDIN = "-"


def read_argument(text: str | None, *, what: str) -> str:
    """Return the text; stdin for ``-``, or without a text if something is piped in."""
    if text is not None and text != STDIN:
        return text
    if text is None and sys.stdin.isatty():
        raise click.UsageError(f"The {what} is missing. Give one, or '-' to read it from stdin.")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"The {what} on stdin is not UTF-8.", hint="Convert it first, as with iconv."
        ) from error


def has_unread_stdin() -> bool:
    """Return whether a pipe or a file on stdin holds text that nothing has read. Reads nothing."""
    try:
        import fcntl
        import termios

        waiting = fcntl.ioctl(sys.stdin.fileno(), termios.FIONREAD, bytes(4))
    except (ImportError, OSError, ValueError):
        return False
    return not sys.stdin.isatty() and any(waiting)


def open_editor(text: str) -> str:
    """Return the text after editing. Raises ``InvalidInput`` if it was not saved."""
    try:
        after = click.edit(text, require_save=True, extension=".txt")
    except click.ClickException as error:
        raise InvalidInput(
            f"The editor failed: {error.format_message()}",
            hint="Set EDITOR to the command of your editor.",
        ) from error
    if after is None:
        raise InvalidInput(
            "The editor was closed without saving.", hint="Save the reply as you want it."
        )
    return after.rstrip("\n")
