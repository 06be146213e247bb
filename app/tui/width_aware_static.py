"""A widget whose lines depend on the width that it has."""

from __future__ import annotations

from collections.abc import Callable

from textual.content import Content
from textual.widgets import Static

# Before it has a place on the screen: how high it will be is asked for first.
_UNTIL_KNOWN = 72


class WidthAwareStatic(Static):
    """Shows what ``lines`` makes of a width in cells, anew whenever that changes."""

    def __init__(
        self, lines: Callable[[int], Content] = lambda width: Content(""), *, classes: str = ""
    ) -> None:
        super().__init__(markup=False, classes=f"flowing {classes}")
        self._lines = lines
        self._width = 0

    def show(self, lines: Callable[[int], Content]) -> None:
        """Shows something else from now on."""
        self._lines = lines
        self._flow()

    def on_mount(self) -> None:
        self._flow()

    def on_resize(self) -> None:
        if self.content_size.width != self._width:
            self._flow()

    def _flow(self) -> None:
        self._width = self.content_size.width
        self.update(self._lines(self._width or _UNTIL_KNOWN))
