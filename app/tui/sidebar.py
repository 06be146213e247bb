"""The list of conversations, the newest first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from personalpeft.learning.report import excerpt
from personalpeft_app.output import format_time, printable
from personalpeft_app.tui.conversation import Conversation
from personalpeft_app.tui.theme import DIM

_WIDTH = 22


class Conversations(OptionList):
    """Enter goes to one; n begins a new one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "app.new", "New"),
        Binding("escape", "app.write", "Back"),
    ]

    class Picked(Message):
        """Somebody wants to go to a conversation."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def __init__(self) -> None:
        super().__init__(id="conversations", compact=True)
        self._shown: list[tuple[str, Content]] = []

    def show(self, talks: Iterable[Conversation], at: str) -> None:
        """All of them; ``at`` is the key of the one that is shown."""
        shown = [(talk.key, _row(talk, here=talk.key == at)) for talk in talks]
        if shown == self._shown:
            return
        self._shown = shown
        keys = [key for key, _ in shown]
        self.set_options([Option(row) for _, row in shown])
        self.highlighted = keys.index(at) if at in keys else 0

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(self.Picked(self._shown[event.option_index][0]))


def _row(talk: Conversation, *, here: bool) -> Content:
    last = talk.last
    going = last is not None and not last.is_finished
    when = format_time(talk.at)[5:] if talk.at else ""
    below = "writing …" if going else f"{when} · {len(talk.exchanges)}" if when else ""
    title = excerpt(printable(talk.title), _WIDTH)
    return Content.assemble(
        ("▸ " if here else "  ", "$primary"), (title, "bold" if here else ""), "\n  ", (below, DIM)
    )
