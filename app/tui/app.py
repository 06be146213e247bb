"""The terminal chat: the panes of the screen and the keys.

Invariants: blocking work never runs in the screen's thread, and each failure becomes a message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import ClassVar

from textual import on
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from personalpeft.erasure import ForgetUserReport
from personalpeft_app.tui import theme, views
from personalpeft_app.tui.controls import ConversationList
from personalpeft_app.tui.conversation_pane import ConversationPane
from personalpeft_app.tui.dialogs import keys_help
from personalpeft_app.tui.key_input import OrderedKeyInput
from personalpeft_app.tui.keys import COMMANDS, bindings
from personalpeft_app.tui.model_pane import ModelPane
from personalpeft_app.tui.notifier import show_note
from personalpeft_app.tui.user_session import TaskHandle, UserSession

# How often the screen shows what streams in: often enough to read along, seldom enough for SSH.
_POLL_SECONDS = 1 / 12
# How often the screen looks for changes by other programs.
WATCH_SECONDS = 2.0
_WIDE, _WIDEST = 100, 132
_HINTS = "[@click=app.keys]F1 help[/]  [@click=app.command_palette]^P commands[/]"


def _forward(pane: str, method: Callable[..., object], *first: object) -> Callable[..., None]:
    """Return an action that is a method of a pane, with its first arguments."""

    def action(self: Tui, *rest: object) -> None:
        method(getattr(self, pane), *first, *rest)

    return action


class Tui(OrderedKeyInput):
    """One user's model in a terminal.

    Attributes:
        unsent: After it ended, the texts that were typed and that the ledger lacks.
        failure: The bug that ended it, if one did.
        erased: The report, if the chat ended because the user was forgotten.
        base: The base to open next, if the layers have moved to it.
    """

    CSS_PATH = "look.tcss"
    TITLE = "personalpeft"
    COMMAND_PALETTE_DISPLAY = "^P"
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]]] = [  # type: ignore[misc]  # as it says
        (0, "-narrow"),
        (_WIDE, "-wide"),
        (_WIDEST, "-widest"),
    ]
    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "Everywhere", Binding("ctrl+c", "interrupt", "Stop", show=False)
    )

    def __init__(self, session: UserSession, loading: TaskHandle) -> None:
        # Without ansi_color Textual would still send greys.
        super().__init__(ansi_color=True if os.environ.get("NO_COLOR") else None)
        self.register_theme(theme.DARK)
        self.register_theme(theme.LIGHT)
        self.theme = theme.DARK.name
        self.animation_level = "none"
        self.unsent: list[str] = []
        self.failure: Exception | None = None
        self.erased: ForgetUserReport | None = None
        self.base: str | None = None
        self._user_id = session.user.id
        self._list = ConversationList(id="conversations")
        self._chat = ConversationPane(session)
        self._model = ModelPane(session, loading)

    def compose(self) -> ComposeResult:
        with Horizontal(id="main"):
            yield self._list
            yield self._chat
            yield self._model
        with Horizontal(id="footer"):
            yield Static(id="status", markup=False)
            yield Static(_HINTS, id="hints")

    def on_mount(self) -> None:
        self._list.display = self.size.width >= _WIDEST
        self._model.display = self.size.width >= _WIDE
        self._chat.write("ask")
        self._chat.draw()
        self._update_status()
        self.set_interval(_POLL_SECONDS, self._poll)
        # The prompt is drawn first: loading takes the processor and the interpreter's lock.
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        self._chat.refresh_conversations()
        self._model.load()
        self.set_interval(WATCH_SECONDS, self._watch)

    def _watch(self) -> None:
        self._chat.check_for_changes()
        self._model.check_for_changes()

    def _poll(self) -> None:
        self._chat.poll()
        if self._model.tasks:
            self._update_status()

    def _update_status(self) -> None:
        status = views.status(self._user_id, self._model.state, self._model.progress)
        self.query_one("#status", Static).update(status)

    def on_conversation_pane_changed(self) -> None:
        self._list.show(self._chat.rows, self._chat.key)
        self._model.select(self._chat.conversation.selected)

    def on_conversation_pane_recorded(self) -> None:
        self._model.refresh_state()

    def on_model_pane_changed(self) -> None:
        self._update_status()
        self._chat.draw()

    def on_model_pane_forgot(self) -> None:
        self._chat.refresh_conversations()

    def on_model_pane_user_forgotten(self, event: ModelPane.UserForgotten) -> None:
        self.erased = event.report
        self._chat.stop_all()
        self.exit()

    async def on_model_pane_rebased(self, event: ModelPane.Rebased) -> None:
        self.base = event.base
        await self.action_quit()

    @on(ConversationList.RowAction, "#conversations")
    def _open_conversation(self, event: ConversationList.RowAction) -> None:
        self._go_to(event.value)

    action_write = _forward("_chat", ConversationPane.write)
    action_read = _forward("_chat", ConversationPane.focus_replies)

    def action_new(self) -> None:
        self._go_to(self._chat.new_key())

    def _go_to(self, key: str) -> None:
        self._list.display = self.screen.has_class("-widest")
        self._chat.show(key)

    def action_conversations(self) -> None:
        """Show and focus the list, or go back from it."""
        self._list.display = not self._list.has_focus
        if self._list.display:
            self._make_room(self._model)
            self._list.focus()
        else:
            self._chat.write()

    def action_model(self) -> None:
        """Show and focus the model, or go back from it."""
        if self._model.display and self._model.has_pseudo_class("focus-within"):
            self._model.display = False
            self._chat.write()
        else:
            self.action_open(self._model.tab)
            self._model.focus_tabs()

    def action_open(self, tab: str) -> None:
        self._make_room(self._list)
        self._model.open(tab)

    def _make_room(self, other: Widget) -> None:
        if self.screen.has_class("-narrow"):
            other.display = False

    def action_keys(self) -> None:
        self.push_screen(keys_help())

    # Asking

    action_remember = _forward("_chat", ConversationPane.write, "remember")
    action_comment = _forward("_chat", ConversationPane.comment)

    def action_stop(self) -> None:
        """Leave a mode, or stop what runs; else focus the composer."""
        if not (self._chat.leave_mode() or self._chat.stop() or self._model.stop_comparing()):
            self._chat.write()

    def action_interrupt(self) -> None:
        if self.screen.get_selected_text():
            self.screen.action_copy_text()
        elif not self._chat.stop():
            show_note(self, "Ctrl+Q leaves.")

    # The selected reply

    action_select = _forward("_chat", ConversationPane.step)
    action_good = _forward("_chat", ConversationPane.rate, 1)
    action_bad = _forward("_chat", ConversationPane.rate, -1)
    action_retry = _forward("_chat", ConversationPane.retry)
    action_edit_reply = _forward("_chat", ConversationPane.edit)
    action_save_edit = _forward("_chat", ConversationPane.save_edit)
    action_close_editor = _forward("_chat", ConversationPane.leave_editor)
    action_copy_reply = _forward("_chat", ConversationPane.copy_reply)
    action_links = _forward("_chat", ConversationPane.show_links)

    def action_why(self) -> None:
        if self._chat.answered_turn() is not None:
            self.action_open("why")

    # The model

    action_learn = _forward("_model", ModelPane.learn)
    action_roll_back = _forward("_model", ModelPane.undo)
    action_compare = _forward("_model", ModelPane.compare)
    action_report = _forward("_model", ModelPane.read_report)
    action_training = _forward("_model", ModelPane.switch_training)
    action_rebase = _forward("_model", ModelPane.rebase)
    action_forget_user = _forward("_model", ModelPane.forget_user)

    # The program

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for title, about, action in COMMANDS:
            yield SystemCommand(title, about, partial(self.run_action, action))

    def action_colours(self) -> None:
        self.theme = theme.LIGHT.name if self.theme == theme.DARK.name else theme.DARK.name

    async def action_quit(self) -> None:
        self.unsent = self._chat.unsent()
        self._chat.stop_all()
        for task in self._model.tasks.values():
            task.stop()
        self.exit()

    def _handle_exception(self, error: Exception) -> None:
        # The command reports the bug; a test sees it raised.
        if self.is_headless:
            super()._handle_exception(error)
        else:
            self.failure = self.failure or error
            with suppress(Exception):  # The bug may be in the pane itself.
                self.unsent = self._chat.unsent()
            self.exit()
