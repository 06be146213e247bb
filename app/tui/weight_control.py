"""A layer of the stack with a slider for its weight."""

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

_MAX = 2.0
_STEP = 0.1


class WeightControl(Widget, can_focus=True):
    """A weight from 0 to 2, set with the arrow keys or the mouse."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,minus", "step(-1)", "Less"),
        Binding("right,plus", "step(1)", "More"),
        Binding("0", "set(0.0)", "Without the layer"),
        Binding("1", "set(1.0)", "As learned"),
    ]

    class WeightChanged(Message):
        """The user set another weight."""

        def __init__(self, layer: str, weight: float) -> None:
            super().__init__()
            self.layer = layer
            self.weight = weight

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer_name = layer.name
        self._layer = layer
        self.weight = layer.weight

    def show(self, layer: Layer) -> None:
        """Show the layer as it is now."""
        self._layer, self.weight = layer, layer.weight
        self.refresh()

    def render(self) -> Content:
        width = self.size.width
        rail = width - 6
        at = round(max(0.0, min(1.0, self.weight / _MAX)) * (rail - 1))
        knob = "◆" if self.has_focus else "●"
        return Content.assemble(
            views.layer(self._layer, width),
            "\n",
            ("━" * at, "$primary"),
            (knob, "bold $accent" if self.has_focus else "bold $primary"),
            ("─" * (rail - 1 - at), DIM),
            (f" {self.weight:5.2f}", "bold" if self.has_focus else ""),
        )

    def watch_has_focus(self, focus: bool) -> None:
        self.refresh()

    def action_step(self, steps: int) -> None:
        self.action_set(round(self.weight + steps * _STEP, 2))

    def action_set(self, weight: float) -> None:
        weight = max(0.0, min(_MAX, weight))
        if weight != self.weight:
            self.weight = weight
            self.refresh()
            self.post_message(self.WeightChanged(self.layer_name, weight))

    def on_click(self, event: events.Click) -> None:
        rail = self.size.width - 6
        if event.y == 1 and event.x < rail:
            self.action_set(round(event.x / (rail - 1) * _MAX / _STEP) * _STEP)
