"""The list of what was built: every revision, the bare base below each layer's."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from personalpeft_app.tui import views
from personalpeft_app.tui.theme import DIM
from personalpeft_app.tui.user_session import ModelState

if TYPE_CHECKING:
    from personalpeft.types import Revision

# In cells, of the narrowest panel beside a bar that scrolls.
_WIDTH = 34


class Revisions(OptionList):
    """Every revision, each layer's newest first, and what each gained on the answers that were held back."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("b", "compare", "Compare blind")]

    class Wanted(Message):
        """A revision is to be made live, or to be compared; None is the bare base."""

        def __init__(self, layer: str, revision: str | None, *, compare: bool) -> None:
            super().__init__()
            self.layer = layer
            self.revision = revision
            self.compare = compare

    def __init__(self) -> None:
        super().__init__(id="revisions", compact=True)
        self._rows: list[tuple[str, Revision | None]] = []

    def show(self, standing: ModelState) -> None:
        """What is so now; the highlighted row stays where it was."""
        heads = {layer.name: layer.head for layer in standing.layers}
        largest = max((abs(views.gain(each) or 0.0) for each in standing.revisions), default=0.0)
        at = self.highlighted
        self._rows = views.revisions_in_order(standing.revisions, standing.layers)
        self.clear_options()
        for layer, each in self._rows:
            live = heads[layer] == (each.id if each else None)
            if each is None:
                text = Content.assemble(
                    ("◦ ", DIM), f"{layer} ", ("the bare base", ""), "  live" if live else ""
                )
            else:
                text = views.revision(each, live=live, largest=largest, width=_WIDTH)
            self.add_option(Option(text))
        if self._rows:
            self.highlighted = min(at or 0, len(self._rows) - 1)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        layer, each = self._rows[event.option_index]
        self.post_message(self.Wanted(layer, each.id if each else None, compare=False))

    def action_compare(self) -> None:
        if self.highlighted is not None:
            layer, each = self._rows[self.highlighted]
            self.post_message(self.Wanted(layer, each.id if each else None, compare=True))
