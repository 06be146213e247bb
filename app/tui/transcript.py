"""The exchanges of one conversation, one of them selected.

An exchange is the prompt, the reply, its feedback and its actions. An editor takes the reply's
place while it is edited.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static, TextArea

from personalpeft_app.output import printable
from personalpeft_app.tui import views
from personalpeft_app.tui.conversation import Conversation, Exchange
from personalpeft_app.tui.keys import bindings
from personalpeft_app.tui.markdown import ReplyMarkdown, links

_BETWEEN = "  "


def _actions(*actions: tuple[str, str, str]) -> str:
    return _BETWEEN.join(
        f"[@click=app.{action}][b $primary]{key}[/] {label}[/]" for key, label, action in actions
    )


_REPLY_ACTIONS = _actions(
    ("+", "good", "good"),
    ("-", "bad", "bad"),
    ("e", "edit", "edit_reply"),
    ("c", "comment", "comment"),
    ("r", "retry", "retry"),
    ("y", "copy", "copy_reply"),
    ("w", "why", "why"),
)
_LINK_ACTION = _BETWEEN + _actions(("o", "link", "links"))
_FAILED_ACTIONS = _actions(("r", "retry", "retry"), ("e", "edit the question", "edit_reply"))
_STREAM_ACTIONS = _actions(("esc", "stop", "stop"))
_EDITOR_ACTIONS = (
    _actions(("^S", "save", "save_edit"), ("esc", "close", "close_editor"))
    + f"{_BETWEEN}[$secondary]the reply as it should have been[/]"
)


class ReplyEditor(TextArea):
    """The editor of a reply, in its place."""

    BINDINGS: ClassVar[list[BindingType]] = bindings("While editing a reply")

    def __init__(self, text: str) -> None:
        super().__init__(text, compact=True, highlight_cursor_line=False)
        self.cursor_blink = False

    def on_mount(self) -> None:
        self.move_cursor(self.document.end)


class ActionLine(Static):
    """Actions in a line. A narrow one breaks between two of them, and not in one."""

    _actions = Content("")

    def show(self, actions: Content) -> None:
        self._actions = actions
        self._wrap()

    def on_resize(self) -> None:
        self._wrap()

    def _wrap(self) -> None:
        width, lines = self.content_size.width, list[Content]()
        for action in self._actions.split(_BETWEEN):
            longer = lines[-1] + _BETWEEN + action if lines else action
            if lines and longer.cell_length <= (width or longer.cell_length):
                lines[-1] = longer
            else:
                lines.append(action)
        self.update(Content("\n").join(lines))


class ExchangeView(Vertical):
    """One exchange, as ``show`` sets it."""

    @dataclass
    class Selected(Message):
        """The user clicked on the exchange."""

        number: int

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self._shown: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        with Horizontal(classes="prompt"):
            yield Static("›", classes="mark")
            yield Static(classes="text", markup=False)
        yield ReplyMarkdown()
        yield Static(classes="placeholder", markup=False)
        yield Static(classes="feedback", markup=False)
        yield ActionLine(classes="actions")

    async def show(
        self, exchange: Exchange, *, selected: bool, loaded: bool, draft: str | None
    ) -> None:
        """Show the exchange. ``draft`` is the text of the open editor, None if it is closed."""
        exchange = replace(exchange)  # It may change while this waits for the screen.
        shown = (exchange, selected, loaded, draft is not None)
        if shown == self._shown:
            return
        self._shown = shown
        self.set_class(selected, "-selected")
        self._set("text", Content(printable(exchange.prompt)))
        placeholder = views.placeholder(exchange, loaded=loaded)
        self._set("placeholder", placeholder if draft is None else Content(""))
        self._set("feedback", views.feedback(exchange))
        reply = self.query_one(ReplyMarkdown)
        reply.display = draft is None and not placeholder.plain
        if not placeholder.plain:
            await reply.show(exchange.text, streaming=exchange.status == "writing")
        self._show_editor(draft, after=reply)
        text = _EDITOR_ACTIONS if draft is not None else _actions_of(exchange)
        visible = (selected or draft is not None) and text
        actions = self.query_one(ActionLine)
        actions.show(Content.from_markup(text if visible else ""))
        actions.display = bool(visible)

    def _set(self, name: str, content: Content) -> None:
        static = self.query_one(f".{name}", Static)
        static.update(content)
        static.display = bool(content.plain)

    def _show_editor(self, draft: str | None, after: ReplyMarkdown) -> None:
        editors = self.query(ReplyEditor)
        if draft is None:
            editors.remove()
        elif not editors:
            editor = ReplyEditor(draft)
            self.mount(editor, after=after)
            editor.focus()

    def on_click(self, event: events.Click) -> None:
        self.post_message(self.Selected(self.number))


def _actions_of(exchange: Exchange) -> str:
    if exchange.turn is not None:
        return _REPLY_ACTIONS + (_LINK_ACTION if links(exchange.text) else "")
    return _FAILED_ACTIONS if exchange.status == "failed" else _STREAM_ACTIONS


class Transcript(VerticalScroll):
    """A scrolling list of exchanges. With the focus, single letters act on the selected one."""

    BINDINGS: ClassVar[list[BindingType]] = bindings("On a reply")

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
        exchanges = tuple(conversation.exchanges)
        welcome.display = conversation.id is None and not exchanges
        welcome.update(Content.from_markup(_WELCOME if loaded else _WELCOME + _LOADING))
        views = {view.number: view for view in self.query(ExchangeView)}
        for number in views.keys() - {each.number for each in exchanges}:
            await views.pop(number).remove()
        new = [e for e in exchanges if e.number not in views]
        views.update({each.number: ExchangeView(each.number) for each in new})
        if new:
            await self.mount_all(views[each.number] for each in new)
            order: dict[Widget, int] = {
                views[each.number]: at for at, each in enumerate(exchanges, 1)
            }
            self.sort_children(key=lambda child: order.get(child, 0))
            self.anchor()
        for each in exchanges:
            await views[each.number].show(
                each,
                selected=each.number == selected,
                loaded=loaded,
                draft=draft if each.number == editing else None,
            )

    def scroll_to_exchange(self, number: int) -> None:
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

[$secondary][b]F1[/] all keys   [b]^P[/] all commands
[b]F2[/] conversations   [b]F3[/] your model[/]
"""
_LOADING = "\n[$secondary i]The model is loading; questions wait for it.[/]"
