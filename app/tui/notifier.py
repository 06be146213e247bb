"""What is said to the person in a line that goes by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from personalpeft.errors import Cancelled, PersonalPeftError
from personalpeft_app.output import printable

if TYPE_CHECKING:
    from textual.app import App

# How long a line stands, in seconds. What went wrong comes with a way out, which takes longer to read.
_NOTE, _WRONG = 4, 10


class Notifier:
    """Lines over the screen of an app."""

    def __init__(self, app: App[None]) -> None:
        self._app = app

    def note(self, text: str) -> None:
        """Something worth a line."""
        self._app.notify(printable(text), markup=False, timeout=_NOTE)

    def wrong(self, error: PersonalPeftError) -> None:
        """Something went wrong, and changed nothing. What a person stopped is not wrong."""
        if not isinstance(error, Cancelled):
            self._app.notify(
                printable(error.hint),
                title=printable(error.message),
                severity="error",
                markup=False,
                timeout=_WRONG,
            )
