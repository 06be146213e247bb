"""The exchanges of one conversation, one of them selected."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from personalpeft_app.tui.conversation import Conversation
from personalpeft_app.tui.exchange import ExchangeView, ReplyEditor


class Transcript(VerticalScroll):
    """A scrolling list of exchanges. While it has the focus, single letters act on the selected one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "app.select(-1)", "The previous reply"),
        Binding("down,j", "app.select(1)", "The next reply"),
        Binding("plus", "app.good", "Good"),
        Binding("minus", "app.bad", "Not good"),
        Binding("e", "app.edit_reply", "Edit"),
        Binding("c", "app.comment", "Comment"),
        Binding("r", "app.retry", "Retry"),
        Binding("y", "app.copy_reply", "Copy"),
        Binding("w", "app.why", "Why"),
        Binding("o", "app.links", "Open a link"),
        Binding("enter", "app.write", "Write"),
    ]

    def __init__(self) -> None:
        super().__init__(id="transcript")
        self._key = ""

    def compose(self) -> ComposeResult:
        yield Static(id="welcome")

    async def show(
        self,
        key: str,
        conversation: Conversation,
        *,
        selected: int | None,
        editing: int | None,
        draft: str,
        loaded: bool,
    ) -> None:
        """Show a conversation. ``editing`` is the exchange whose editor is open, with ``draft``."""
        if key != self._key:
            self._key = key
            await self.remove_children(ExchangeView)
            self.anchor()
        welcome = self.query_one("#welcome", Static)
        welcome.display = conversation.id is None and not conversation.exchanges
        welcome.update(Content.from_markup(_WELCOME if loaded else _WELCOME + _LOADING))
        views = {view.number: view for view in self.query(ExchangeView)}
        for number in views.keys() - {each.number for each in conversation.exchanges}:
            await views.pop(number).remove()
        new = [e for e in conversation.exchanges if e.number not in views]
        views.update({each.number: ExchangeView(each.number) for each in new})
        if new:
            await self.mount_all(views[each.number] for each in new)
            order = {views[each.number]: at for at, each in enumerate(conversation.exchanges, 1)}
            self.sort_children(key=lambda child: order.get(child, 0))
            self.anchor()
        for each in conversation.exchanges:
            await views[each.number].show(
                each,
                selected=each.number == selected,
                loaded=loaded,
                draft=draft if each.number == editing else None,
            )

    def scroll_to_exchange(self, number: int) -> None:
        """Scroll an exchange into view."""
        for view in self.query(ExchangeView):
            if view.number == number:
                self.scroll_to_widget(view, animate=False)

    @property
    def editor_text(self) -> str | None:
        """The text of the open editor, None if none is open."""
        editor = next(iter(self.query(ReplyEditor)), None)
        return None if editor is None else editor.text


_WELCOME = """\
[b]Your own model.[/]

Ask something. Then correct the reply: [b $primary]↑[/] goes to it, \
[b $primary]+[/] and [b $primary]-[/] rate it, \
[b $primary]e[/] edits it in its place. [b $primary]^L[/] learns from your feedback.

[$secondary][b]F1[/] all keys   [b]^P[/] all commands   [b]F2[/] conversations   [b]F3[/] your model[/]
"""
_LOADING = "\n[$secondary i]The model is loading; questions wait for it.[/]"
