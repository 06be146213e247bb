"""What the side panes are operated with: lists, and the slider of a weight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from personalpeft.types import Layer
from personalpeft_app.tui import views
from personalpeft_app.tui.keys import bindings
from personalpeft_app.tui.theme import DIM
from personalpeft_app.tui.views import Row

_MAX = 2.0
_STEP = 0.1


class RowList(OptionList):
    """A list of rows. The chosen value stays chosen while it is in the list."""

    @dataclass
    class RowAction(Message):
        """The user acted on a row: "open" by Enter or a click, else as the key's binding says."""

        rows: RowList
        act: str
        text: Content
        value: Any

        @property
        def control(self) -> RowList:
            return self.rows

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, compact=True)
        self._rows: tuple[Row, ...] = ()

    @property
    def chosen(self) -> Row:
        at = self.highlighted
        return self._rows[at] if at is not None and at < len(self._rows) else (Content(), None)

    def show(self, rows: Iterable[Row], choose: Any = None) -> None:
        """Show the rows, with the one of the value ``choose`` highlighted if it is given."""
        rows = tuple(rows)
        if rows == self._rows:
            return
        at, (_, value) = self.highlighted or 0, self.chosen
        value = choose or value
        self._rows = rows
        self.set_options([Option(text, disabled=value is None) for text, value in rows])
        values = [value for _, value in rows]
        if value is not None and value in values:
            at = values.index(value)
        choosable = [n for n, each in enumerate(values) if each is not None]
        self.highlighted = min(choosable, key=lambda n: abs(n - at), default=None)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.action_act("open")

    def action_act(self, act: str) -> None:
        text, value = self.chosen
        if value is not None:
            self.post_message(self.RowAction(self, act, text, value))


class ConversationList(RowList):
    """The conversations, newest first. The values are keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "app.new", "New"),
        Binding("escape", "app.write", "Back"),
    ]


class RevisionList(RowList):
    """Every revision, each layer's newest first, and below them the bare base.

    The values are pairs of a layer and a revision, None for the bare base.
    """

    BINDINGS: ClassVar[list[BindingType]] = bindings("In the revisions")


class ForgettableList(RowList):
    """A list of replies, signals, rules and facts. The values are ids of what can be forgotten."""

    BINDINGS: ClassVar[list[BindingType]] = bindings("In why and memory")


class WeightControl(Widget, can_focus=True):
    """A weight from 0 to 2, set with the arrow keys or the mouse."""

    BINDINGS: ClassVar[list[BindingType]] = bindings("In the stack")

    @dataclass
    class WeightChanged(Message):
        """The user set another weight."""

        layer: str
        weight: float

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer_name = layer.name
        self._layer = layer
        self.weight = layer.weight

    def show(self, layer: Layer) -> None:
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
