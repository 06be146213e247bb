"""Short messages over the screen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from textual.dom import DOMNode

from personalpeft.errors import Cancelled, PersonalPeftError
from personalpeft_app.output import printable

# How long a message stays, in seconds. An error has a hint, so it takes longer to read.
_NOTE_SECONDS, _ERROR_SECONDS = 4, 10


def show_note(node: DOMNode, text: str) -> None:
    node.app.notify(printable(text), markup=False, timeout=_NOTE_SECONDS)


def show_error(node: DOMNode, error: PersonalPeftError) -> None:
    """Show an error with its hint, unless the user cancelled."""
    if not isinstance(error, Cancelled):
        node.app.notify(
            printable(error.hint),
            title=printable(error.message),
            severity="error",
            markup=False,
            timeout=_ERROR_SECONDS,
        )


@contextmanager
def errors_shown(node: DOMNode) -> Iterator[None]:
    """Show an error of the block in place of raising it."""
    try:
        yield
    except PersonalPeftError as error:
        show_error(node, error)
