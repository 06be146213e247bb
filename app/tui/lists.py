"""The lists: conversations, revisions, and the replies, signals, rules and facts that can be forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from personalpeft_app.tui import views

if TYPE_CHECKING:
    from personalpeft_app.tui.conversation import ConversationRow
    from personalpeft_app.tui.user_session import ModelState


@dataclass(frozen=True, slots=True)
class Row:
    """One row. ``value`` is what it stands for, None for a row that cannot be chosen."""

    text: Content
    value: Any = None


class RowList(OptionList):
    """A list of rows. The chosen value stays chosen while it is in the list."""

    def __init__(self, *, id: str, classes: str = "") -> None:
        super().__init__(id=id, classes=classes, compact=True)
        self._rows: tuple[Row, ...] = ()

    @property
    def chosen(self) -> Row | None:
        """The highlighted row."""
        at = self.highlighted
        return self._rows[at] if at is not None and at < len(self._rows) else None

    def show_rows(self, rows: Iterable[Row], choose: Any = None) -> None:
        """Show the rows, with the one of the value ``choose`` highlighted if it is given."""
        rows = tuple(rows)
        if rows == self._rows:
            return
        at = self.highlighted or 0
        value = choose or (self.chosen.value if self.chosen is not None else None)
        self._rows = rows
        self.set_options([Option(row.text, disabled=row.value is None) for row in rows])
        values = [row.value for row in rows]
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

    class Selected(Message):
        """The user chose a conversation."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def __init__(self) -> None:
        super().__init__(id="conversations")

    def show(self, rows: Sequence[ConversationRow], shown: str) -> None:
        """Show the list. ``shown`` is the key of the open conversation."""
        self.show_rows(
            [Row(views.conversation(r, shown=r.key == shown), r.key) for r in rows], shown
        )

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if self.chosen is not None:
            self.post_message(self.Selected(self.chosen.value))


class RevisionList(RowList):
    """Every revision, each layer's newest first, and below them the bare base."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("b", "compare", "Compare blind")]

    class RevisionAction(Message):
        """Make a revision live, or compare it. None is the bare base."""

        def __init__(self, layer: str, revision: str | None, *, compare: bool) -> None:
            super().__init__()
            self.layer = layer
            self.revision = revision
            self.compare = compare

    def __init__(self) -> None:
        super().__init__(id="revisions")

    def show(self, state: ModelState) -> None:
        """Show the revisions of a state."""
        self.show_rows(
            Row(text, (layer, revision)) for layer, revision, text in views.revisions(state)
        )

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._act(compare=False)

    def action_compare(self) -> None:
        self._act(compare=True)

    def _act(self, *, compare: bool) -> None:
        if self.chosen is not None:
            layer, revision = self.chosen.value
            self.post_message(self.RevisionAction(layer, revision, compare=compare))


class ForgettableList(RowList):
    """Replies, signals, rules and facts. Those with an id can be forgotten."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("d,delete", "forget", "Forget")]

    class ForgetRequested(Message):
        """The user wants an item forgotten."""

        def __init__(self, item: str, text: Content) -> None:
            super().__init__()
            self.item = item
            self.text = text

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, classes="forgettable")

    def show(self, rows: Sequence[tuple[Content, str | None]]) -> None:
        """Show the items, each with its id; None for a row that cannot be forgotten."""
        self.show_rows(Row(text, item) for text, item in rows)

    def action_forget(self) -> None:
        if self.chosen is not None and self.chosen.value is not None:
            self.post_message(self.ForgetRequested(self.chosen.value, self.chosen.text))
