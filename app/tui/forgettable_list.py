"""A list of what was said: replies, feedback, rules and facts, any of which can be forgotten from here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option


@dataclass(frozen=True, slots=True)
class ListRow:
    """One row; ``id`` is what can be forgotten there, None for a row that only says something."""

    text: Content
    id: str | None = None


class ForgettableList(OptionList):
    """Rows of which those with an id can be chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("d,delete", "forget", "Forget")]

    class Forget(Message):
        """Somebody wants something forgotten."""

        def __init__(self, item: str, text: Content) -> None:
            super().__init__()
            self.item = item
            self.text = text

    def __init__(self, place: str) -> None:
        super().__init__(id=place, classes="said", compact=True)
        self._rows: tuple[ListRow, ...] = ()

    def show(self, rows: Sequence[ListRow]) -> None:
        """What is so now; what was chosen stays chosen where it still is there."""
        if tuple(rows) == self._rows:
            return
        before = self._chosen
        chosen = before.id if before is not None else None
        self._rows = tuple(rows)
        self.set_options([Option(row.text, disabled=row.id is None) for row in rows])
        ids = [row.id for row in rows]
        if chosen is not None and chosen in ids:
            self.highlighted = ids.index(chosen)
        else:
            self.highlighted = next((at for at, name in enumerate(ids) if name is not None), None)

    @property
    def _chosen(self) -> ListRow | None:
        at = self.highlighted
        return self._rows[at] if at is not None and at < len(self._rows) else None

    def action_forget(self) -> None:
        row = self._chosen
        if row is not None and row.id is not None:
            self.post_message(self.Forget(row.id, row.text))
