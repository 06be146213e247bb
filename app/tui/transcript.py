"""The conversation on the screen: one view for each exchange, one of them selected, and an editor where a reply is edited."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Static, TextArea

from personalpeft_app.tui import views
from personalpeft_app.tui.flowing import Flowing
from personalpeft_app.tui.markdown import links
from personalpeft_app.tui.talk import Exchange, Talk

_SAYING = (
    "[@click=app.good][b $primary]+[/] good[/]  [@click=app.bad][b $primary]-[/] bad[/]  "
    "[@click=app.edit_reply][b $primary]e[/] edit[/]  [@click=app.comment][b $primary]c[/] comment[/]  "
    "[@click=app.retry][b $primary]r[/] retry[/]  [@click=app.copy_reply][b $primary]y[/] copy[/]  "
    "[@click=app.why][b $primary]w[/] why[/]"
)
_OPENING = "  [@click=app.links][b $primary]o[/] link[/]"
_TRYING = "[@click=app.retry][b $primary]r[/] retry[/]  [@click=app.take_back][b $primary]e[/] edit the question[/]"
_STOPPING = "[@click=app.stop][b $primary]esc[/] stop[/]"
_EDITING = (
    "[@click=app.keep_edit][b $primary]^S[/] keep it so[/]  [@click=app.leave_edit][b $primary]esc[/] leave it[/]  "
    "[$secondary]the reply as it should have been[/]"
)


class ReplyEditor(TextArea):
    """A reply that is being edited in its place."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "app.keep_edit", "Keep the edit"),
        Binding("escape", "app.leave_edit", "Leave the edit"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__(text, compact=True, highlight_cursor_line=False)
        self.cursor_blink = False

    def on_mount(self) -> None:
        self.move_cursor(self.document.end)


class ExchangeView(Vertical):
    """One exchange. What it shows is set with ``show``; it asks nobody."""

    class Picked(Message):
        """Somebody clicked on it."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.number = exchange.number
        self._shown: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        with Horizontal(classes="question"):
            yield Static("›", classes="hook")
            yield Static(classes="asked", markup=False)
        yield Flowing(classes="reply")
        yield Static(classes="marks", markup=False)
        yield Static(classes="actions")

    def show(self, exchange: Exchange, *, selected: bool, loaded: bool, draft: str | None) -> None:
        """``draft`` is the text in the editor where the reply is being edited, else None."""
        shown = (exchange, selected, loaded, draft is not None)
        if shown == self._shown:
            return
        self._shown = shown
        asked, marks, actions = (self.query_one(f".{name}", Static) for name in ("asked", "marks", "actions"))
        reply = self.query_one(Flowing)
        asked.update(views.asked(exchange))
        reply.show(partial(views.reply, exchange, loaded=loaded))
        said = views.marks(exchange)
        marks.update(said)
        marks.display = bool(said.plain)
        self.set_class(selected, "-selected")
        editors = self.query(ReplyEditor)
        if draft is None:
            editors.remove()
        elif not editors:
            editor = ReplyEditor(draft)
            self.mount(editor, after=reply)
            editor.focus()
        reply.display = draft is None
        text = _EDITING if draft is not None else _actions(exchange)
        actions.update(Content.from_markup(text))
        actions.display = (selected or draft is not None) and bool(text)

    def on_click(self, event: events.Click) -> None:
        self.post_message(self.Picked(self.number))


def _actions(exchange: Exchange) -> str:
    if exchange.turn is not None:
        return _SAYING + (_OPENING if links(exchange.text) else "")
    return _TRYING if exchange.status == "failed" else _STOPPING


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

    async def show(self, talk: Talk, *, selected: int | None, loaded: bool, drafts: dict[int, str]) -> None:
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
                view.show(talk[view.number], selected=view.number == selected, loaded=loaded, draft=draft)

    def view(self, number: int) -> ExchangeView | None:
        """The view of an exchange, where it is shown."""
        return next((view for view in self.query(ExchangeView) if view.number == number), None)


_WELCOME = """\
[b]Your own model.[/]

Ask something. Then say what you think of the reply: [b $primary]↑[/] goes to it,
[b $primary]+[/] and [b $primary]-[/] rate it, [b $primary]e[/] edits it in its place. [b $primary]^L[/] learns from all that.

[$secondary][b]F1[/] all keys   [b]^P[/] all commands   [b]F2[/] conversations   [b]F3[/] your model[/]
"""
_LOADING = "\n[$secondary i]The model is being loaded; what you ask meanwhile waits for it.[/]"
