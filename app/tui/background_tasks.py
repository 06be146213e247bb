"""From the screen's thread to another and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from personalpeft.errors import PersonalPeftError

if TYPE_CHECKING:
    from textual.app import App

T = TypeVar("T")
Failed = Callable[[PersonalPeftError], None]
Bug = Callable[[Exception], PersonalPeftError]


class BackgroundTasks:
    """Runs work beside an app. Invariant: whatever becomes of it arrives in the screen's thread, once, as a value or as an
    error with a message; ``bug`` makes one of a mistake of our own.
    """

    def __init__(self, app: App[None], bug: Bug) -> None:
        self._app = app
        self._bug = bug

    def run(self, work: Callable[[], T], then: Callable[[T], None], failed: Failed) -> None:
        """Has a thread do the work, and calls one of the other two when it is done."""
        self._app.run_worker(partial(self._run, work, then, failed), thread=True)

    def _run(self, work: Callable[[], T], then: Callable[[T], None], failed: Failed) -> None:
        try:
            found = work()
        except PersonalPeftError as error:
            self._deliver(partial(failed, error))
        except Exception as bug:  # noqa: BLE001 - a person sees a message and never a traceback.
            self._deliver(partial(failed, self._bug(bug)))
        else:
            self._deliver(partial(then, found))

    def _deliver(self, callback: Callable[[], None]) -> None:
        # After the app has ended there is no screen. Results are stored before this.
        if self._app.is_running:
            self._app.call_later(callback)
