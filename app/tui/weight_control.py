"""One layer of the stack with its weight, to be turned."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widget import Widget

from personalpeft_app.tui import views
from personalpeft_app.tui.theme import DIM

if TYPE_CHECKING:
    from personalpeft.types import Layer

_MOST = 2.0
_STEP = 0.1


class Weight(Widget, can_focus=True):
    """A layer and its weight, from 0 to 2, to turn with the arrow keys or the mouse."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,minus", "turn(-1)", "Less"),
        Binding("right,plus", "turn(1)", "More"),
        Binding("0", "set(0.0)", "Without it"),
        Binding("1", "set(1.0)", "As it was learned"),
    ]

    class Turned(Message):
        """Somebody wants another weight."""

        def __init__(self, layer: str, weight: float) -> None:
            super().__init__()
            self.layer = layer
            self.weight = weight

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._of = layer
        self.weight = layer.weight

    @property
    def of(self) -> str:
        """Whose weight it is."""
        return self._of.name

    def show(self, layer: Layer) -> None:
        """What is so now."""
        self._of, self.weight = layer, layer.weight
        self.refresh()

    def render(self) -> Content:
        width = self.size.width
        rail = width - 6
        at = round(max(0.0, min(1.0, self.weight / _MOST)) * (rail - 1))
        knob = "◆" if self.has_focus else "●"
        return Content.assemble(
            views.layer(self._of, width),
            "\n",
            ("━" * at, "$primary"),
            (knob, "bold $accent" if self.has_focus else "bold $primary"),
            ("─" * (rail - 1 - at), DIM),
            (f" {self.weight:5.2f}", "bold" if self.has_focus else ""),
        )

    def watch_has_focus(self, focus: bool) -> None:
        self.refresh()

    def action_turn(self, steps: int) -> None:
        self.action_set(round(self.weight + steps * _STEP, 2))

    def action_set(self, weight: float) -> None:
        weight = max(0.0, min(_MOST, weight))
        if weight != self.weight:
            self.weight = weight
            self.refresh()
            self.post_message(self.Turned(self.of, weight))

    def on_click(self, event: events.Click) -> None:
        rail = self.size.width - 6
        if event.y == 1 and event.x < rail:
            self.action_set(round(event.x / (rail - 1) * _MOST / _STEP) * _STEP)
