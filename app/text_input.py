"""Texts that a person gives: on the command line, over a pipe, or in an editor."""

from __future__ import annotations

import sys

import click

from personalpeft.errors import InvalidInput

STDIN = "-"


def read_argument(text: str | None, *, what: str) -> str:
    """The text itself; what comes over stdin for ``-``, or for no text at all where something is piped in."""
    if text is not None and text != STDIN:
        return text
    if text is None and sys.stdin.isatty():
        raise click.UsageError(f"There is no {what}. Give one, or '-' to read it from stdin.")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"The {what} on stdin is not UTF-8.", hint="Convert it first, as with iconv."
        ) from error


def open_editor(text: str) -> str:
    """The text as it comes back from the editor. Raises ``InvalidInput`` where it was not saved."""
    after = click.edit(text, require_save=True, extension=".txt")
    if after is None:
        raise InvalidInput(
            "The editor was left without saving.", hint="Save the reply as it should have been."
        )
    return after.rstrip("\n")
