"""The terminal chat: the parts of the screen, the keys, and what leads from one part to another. What each key, click and
command has done is done by the part that it is about: ``Middle``, the conversation, or ``Panel``, the model.

Invariants: nothing that takes time runs in the screen's own thread; what goes wrong becomes a message.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import ClassVar

from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Static

from personalpeft_app.tui import theme, views
from personalpeft_app.tui.background_tasks import BackgroundTasks, Bug
from personalpeft_app.tui.conversation_pane import ConversationPane
from personalpeft_app.tui.dialogs import keys_help
from personalpeft_app.tui.key_input import OrderedKeyInput
from personalpeft_app.tui.keys import COMMANDS
from personalpeft_app.tui.model_pane import ModelPane
from personalpeft_app.tui.notifier import Notifier
from personalpeft_app.tui.sidebar import Conversations
from personalpeft_app.tui.user_session import TaskHandle, UserSession

# How often the screen looks at what is going on, in seconds: often enough to read along, seldom enough for a slow line.
_LOOK = 1 / 12
# How often, in seconds, it is seen what other programs did.
_WATCH = 2.0
_HINTS = "[@click=app.keys]F1 help[/]  [@click=app.command_palette]^P commands[/]"


class Tui(OrderedKeyInput):
    """One user's model in a terminal. ``loading`` hears how far the loading of the model is; ``bug`` makes an error that can
    be shown of one that should not be. Afterwards ``unsent`` is all that was typed and that the ledger does not have, and
    ``broken`` the mistake of our own that ended it, if one did.
    """

    CSS_PATH = "look.tcss"
    TITLE = "personalpeft"
    ENABLE_COMMAND_PALETTE = True
    COMMAND_PALETTE_DISPLAY = "^P"
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]]] = [
        (0, "-narrow"),
        (100, "-wide"),
        (132, "-widest"),
    ]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f1", "keys", "All keys"),
        Binding("f2", "conversations", "Conversations"),
        Binding("f3", "model", "Your model"),
        Binding("f4", "remember", "Tell a fact"),
        Binding("ctrl+n", "new", "A new conversation"),
        Binding("ctrl+r", "retry", "Ask again"),
        Binding("ctrl+l", "learn", "Learn"),
        Binding("escape", "stop", "Stop"),
        Binding("ctrl+c", "interrupt", "Stop", show=False),
    ]

    def __init__(self, desk: UserSession, loading: TaskHandle, bug: Bug) -> None:
        no_colour = bool(os.environ.get("NO_COLOR"))
        # Without this Textual would still send greys, which are colours to a terminal.
        super().__init__(ansi_color=True if no_colour else None)
        self.register_theme(theme.DARK)
        self.register_theme(theme.LIGHT)
        self.theme = theme.DARK.name
        self.animation_level = "none"
        self.unsent: list[str] = []
        self.broken: Exception | None = None
        self._user = desk.user.id
        self._telling = Notifier(self)
        threads = BackgroundTasks(self, bug)
        self._conversations = Conversations()
        self._middle = ConversationPane(desk, threads, self._telling)
        self._panel = ModelPane(desk, threads, self._telling, loading)

    # The parts, and what leads from one to another

    def compose(self) -> ComposeResult:
        with Horizontal(id="main"):
            yield self._conversations
            yield self._middle
            yield self._panel
        with Horizontal(id="footer"):
            yield Static(id="status", markup=False)
            yield Static(_HINTS, id="hints")

    def on_mount(self) -> None:
        self._conversations.display = self.size.width >= 132
        self._panel.display = self.size.width >= 100
        self._middle.write("ask")
        self._middle.draw()
        self._foot()
        self.set_interval(_LOOK, self._tick)
        # Not before the prompt is on the screen: what is loaded takes the processor, and the lock of the interpreter with it.
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        # The history first: it is there in a moment, and loading the model may take long.
        self._middle.speaking.recall()
        self._panel.studying.refresh()
        self._panel.studying.load()
        self.set_interval(_WATCH, self._watch)

    def _watch(self) -> None:
        self._middle.speaking.watch()
        self._panel.studying.watch()

    def _tick(self) -> None:
        self._middle.speaking.poll()
        if self._panel.studying.jobs:
            self._foot()

    def _foot(self) -> None:
        studying = self._panel.studying
        self.query_one("#status", Static).update(
            views.status(self._user, studying.standing, studying.going)
        )

    def on_conversation_pane_changed(self) -> None:
        middle = self._middle
        self._conversations.show(middle.speaking.talks.values(), middle.at)
        self._panel.about(middle.talk, middle.selected)

    def on_conversation_pane_grew(self) -> None:
        self._panel.studying.refresh()

    def on_model_pane_changed(self) -> None:
        self._foot()
        self._middle.draw()

    def on_model_pane_forgot(self, event: ModelPane.Forgot) -> None:
        middle = self._middle
        middle.speaking.forget(event.report.turns, event.report.emptied)
        self._panel.about(middle.talk, middle.selected, anew=True)

    def on_conversations_picked(self, event: Conversations.Picked) -> None:
        self._go_to(event.key)

    # Where one goes

    def action_write(self) -> None:
        self._middle.write()

    def action_read(self) -> None:
        self._middle.read()

    def action_new(self) -> None:
        self._go_to(self._middle.speaking.begin())

    def _go_to(self, key: str) -> None:
        self._conversations.display = self.screen.has_class("-widest")
        self._middle.go_to(key)

    def action_conversations(self) -> None:
        """Shows the list and goes there; from there, back."""
        self._conversations.display = not self._conversations.has_focus
        if self._conversations.display:
            self._make_room(self._panel)
            self._conversations.focus()
        else:
            self._middle.write()

    def action_model(self) -> None:
        """Shows the panel and goes there; from there, back."""
        if self._panel.display and self._panel.has_pseudo_class("focus-within"):
            self._panel.display = False
            self._middle.write()
        else:
            self.action_open(self._panel.tab)
            self._panel.focus_tabs()

    def action_open(self, tab: str) -> None:
        """Shows a tab of the panel."""
        self._make_room(self._conversations)
        self._panel.open(tab)

    def _make_room(self, other: Conversations | ModelPane) -> None:
        if self.screen.has_class("-narrow"):
            other.display = False

    def action_keys(self) -> None:
        self.push_screen(keys_help())

    # What one types

    def action_remember(self) -> None:
        self._middle.write("remember")

    def action_comment(self) -> None:
        self._middle.comment()

    def action_take_back(self) -> None:
        self._middle.take_back()

    def action_stop(self) -> None:
        """Stops what is being written here; where nothing is, it leads back to where one types."""
        if not (self._middle.step_back() or self._panel.studying.stop_comparing()):
            self._middle.write()

    def action_interrupt(self) -> None:
        if self.screen.get_selected_text():
            self.screen.action_copy_text()
        elif not self._middle.speaking.stop(self._middle.at):
            self._telling.note("Ctrl+Q leaves.")

    # The selected reply

    def action_select(self, steps: int) -> None:
        self._middle.step(steps)

    def action_good(self) -> None:
        self._middle.replying.rate(self._middle.at, 1)

    def action_bad(self) -> None:
        self._middle.replying.rate(self._middle.at, -1)

    def action_retry(self) -> None:
        self._middle.replying.again(self._middle.at)

    def action_edit_reply(self) -> None:
        self._middle.edit()

    def action_save_edit(self) -> None:
        self._middle.replying.keep(self._middle.at)

    def action_close_editor(self) -> None:
        self._middle.leave_edit()

    def action_copy_reply(self) -> None:
        self._middle.copy_reply()

    def action_links(self) -> None:
        self._middle.show_links()

    def action_why(self) -> None:
        if self._middle.replying.answered(self._middle.at) is not None:
            self.action_open("why")

    # The model

    def action_learn(self) -> None:
        self._panel.studying.learn()

    def action_roll_back(self) -> None:
        self._panel.roll_back()

    def action_compare(self) -> None:
        self._panel.compare()

    def action_report(self) -> None:
        self._panel.read_report()

    # The program

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """What the palette lists."""
        for title, about, action in COMMANDS:
            yield SystemCommand(title, about, partial(self.run_action, action))

    def action_colours(self) -> None:
        self.theme = theme.LIGHT.name if self.theme == theme.DARK.name else theme.DARK.name

    async def action_quit(self) -> None:
        self.unsent = self._middle.unsent()
        self._middle.speaking.stop_all()
        for job in self._panel.studying.jobs:
            job.stop()
        self.exit()

    def _handle_exception(self, error: Exception) -> None:
        # A mistake in the screen's own thread: whoever called says so in a line, and a test sees it as it is.
        if self.is_headless:
            super()._handle_exception(error)
        else:
            self.broken = self.broken or error
            with suppress(Exception):  # The mistake may be in just what is asked here.
                self.unsent = self._middle.unsent()
            self.exit()
