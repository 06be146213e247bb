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


class ConversationList(RowList):
    """The conversations, newest first."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "app.new", "New"),
        Binding("escape", "app.write", "Back"),
    ]

    @dataclass
    class Selected(Message):
        """The user chose a conversation."""

        key: str

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(self.Selected(self.chosen[1]))


class RevisionList(RowList):
    """Every revision, each layer's newest first, and below them the bare base."""

    BINDINGS: ClassVar[list[BindingType]] = bindings("In the revisions")

    @dataclass
    class RevisionAction(Message):
        """Make a revision live, or compare it. None is the bare base."""

        layer: str
        revision: str | None
        compare: bool

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._act(compare=False)

    def action_compare(self) -> None:
        self._act(compare=True)

    def _act(self, *, compare: bool) -> None:
        if self.chosen[1] is not None:
            layer, revision = self.chosen[1]
            self.post_message(self.RevisionAction(layer, revision, compare))


class ForgettableList(RowList):
    """A list of replies, signals, rules and facts. Rows with an id can be forgotten."""

    BINDINGS: ClassVar[list[BindingType]] = bindings("In why and memory")

    @dataclass
    class ForgetRequested(Message):
        """The user wants an item forgotten."""

        item: str
        text: Content

    def action_forget(self) -> None:
        text, item = self.chosen
        if item is not None:
            self.post_message(self.ForgetRequested(item, text))


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
