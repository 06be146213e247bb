"""The conversation on the screen: one view for each exchange, one of them selected."""

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
    """The exchanges of one conversation. With the focus here, single letters say something about the selected reply."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "app.select(-1)", "The reply before"),
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
        self, talk: Conversation, *, selected: int | None, loaded: bool, drafts: dict[int, str]
    ) -> None:
        """Shows a conversation. ``drafts`` are the edits that are open, by number."""
        views_now = {view.number: view for view in self.query(ExchangeView)}
        if talk.key != self._key:
            await self.remove_children(ExchangeView)
            views_now, self._key = {}, talk.key
            self.anchor()
        welcome = self.query_one("#welcome", Static)
        welcome.display = not talk.exchanges
        welcome.update(Content.from_markup(_WELCOME if loaded else _WELCOME + _LOADING))
        for number, view in views_now.items():
            if not talk.has(number):
                await view.remove()
        new = [ExchangeView(each) for each in talk.exchanges if each.number not in views_now]
        if new:
            await self.mount_all(new)
            self.anchor()
        for view in self.query(ExchangeView):
            if talk.has(view.number):
                draft = drafts.get(view.number)
                await view.show(
                    talk[view.number], selected=view.number == selected, loaded=loaded, draft=draft
                )

    def bring(self, number: int) -> None:
        """Brings an exchange into view."""
        view = next((view for view in self.query(ExchangeView) if view.number == number), None)
        if view is not None:
            self.scroll_to_widget(view, animate=False)

    @property
    def typed(self) -> str | None:
        """What stands in the editor of a reply, where one is open."""
        editor = next(iter(self.query(ReplyEditor)), None)
        return None if editor is None else editor.text


_WELCOME = """\
[b]Your own model.[/]

Ask something. Then say what you think of the reply: [b $primary]↑[/] goes to it,
[b $primary]+[/] and [b $primary]-[/] rate it, [b $primary]e[/] edits it in its place. [b $primary]^L[/] learns from all that.

[$secondary][b]F1[/] all keys   [b]^P[/] all commands   [b]F2[/] conversations   [b]F3[/] your model[/]
"""
_LOADING = "\n[$secondary i]The model is being loaded; what you ask meanwhile waits for it.[/]"
