"""One exchange on the screen: the question, the reply, what was said about it and what can be, and an editor where it is edited."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static, TextArea

from personalpeft_app.tui import views
from personalpeft_app.tui.conversation import Exchange
from personalpeft_app.tui.markdown import links
from personalpeft_app.tui.width_aware_static import WidthAwareStatic

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
        yield WidthAwareStatic(classes="reply")
        yield Static(classes="marks", markup=False)
        yield Static(classes="actions")

    def show(self, exchange: Exchange, *, selected: bool, loaded: bool, draft: str | None) -> None:
        """``draft`` is the text in the editor where the reply is being edited, else None."""
        shown = (exchange, selected, loaded, draft is not None)
        if shown == self._shown:
            return
        self._shown = shown
        asked, marks, actions = (
            self.query_one(f".{name}", Static) for name in ("asked", "marks", "actions")
        )
        reply = self.query_one(WidthAwareStatic)
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
