"""The terminal chat. It owns what is on the screen: which conversation is shown, and what each key and click has done by those
who know: ``Speaking`` of conversations, ``Replying`` of what is said about a reply, ``Studying`` of the model. Everything
else is a value, a thread or a widget.

Invariants: a text that a person typed stands where they can see it until the ledger has it; nothing that takes time runs
in the screen's own thread; what goes wrong becomes a message.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from personalpeft.errors import Cancelled, PersonalPeftError
from personalpeft_app.output import printable
from personalpeft_app.tui import theme, views
from personalpeft_app.tui.composer import Composer, Mode
from personalpeft_app.tui.keys import COMMANDS
from personalpeft_app.tui.markdown import links
from personalpeft_app.tui.panel import Panel, Revisions, Weight
from personalpeft_app.tui.replying import Replying
from personalpeft_app.tui.said import Said
from personalpeft_app.tui.screens import Comparing, Links, Reading, Sure, keys_help
from personalpeft_app.tui.sidebar import Conversations
from personalpeft_app.tui.speaking import Speaking
from personalpeft_app.tui.studying import Studying
from personalpeft_app.tui.talk import Exchange, Talk
from personalpeft_app.tui.threads import Bug, Threads
from personalpeft_app.tui.transcript import ExchangeView, ReplyEditor, Transcript
from personalpeft_app.tui.work import Desk, Job, Standing, Written

if TYPE_CHECKING:
    from personalpeft import LearnReport, User
    from personalpeft.comparing import Comparison
    from personalpeft.forgetting import ForgetReport

# How often the screen looks at what is going on, in seconds: often enough to read along, seldom enough for a slow line.
_LOOK = 1 / 12
# How often, in seconds, it is seen what other programs did.
_WATCH = 2.0
_HINTS = "[@click=app.keys]F1 help[/]  [@click=app.command_palette]^P commands[/]"


class Tui(App[None]):
    """One user's model in a terminal. ``loading`` hears how far the loading of the model is; ``bug`` makes an error that can
    be shown of one that should not be.
    """

    CSS_PATH = "look.tcss"
    TITLE = "personalpeft"
    ENABLE_COMMAND_PALETTE = True
    COMMAND_PALETTE_DISPLAY = "^P"
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]]] = [(0, "-narrow"), (100, "-wide"), (132, "-widest")]
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

    def __init__(self, desk: Desk, loading: Job, bug: Bug) -> None:
        no_colour = bool(os.environ.get("NO_COLOR"))
        # Without this Textual would still send greys, which are colours to a terminal.
        super().__init__(ansi_color=True if no_colour else None)
        self.register_theme(theme.DARK)
        self.register_theme(theme.LIGHT)
        self.theme = theme.DARK.name
        self.animation_level = "none"
        self.unsent: list[str] = []
        self.broken: Exception | None = None
        self._desk = desk
        self._user: User = desk.user
        self._threads = Threads(self, bug)
        self._speaking = Speaking(desk, self._threads, self)
        self._studying = Studying(desk, self._threads, self, loading)
        self._replying = Replying(desk.user, self._threads, self._speaking, self._studying, self)
        self._at = self._speaking.begin()
        self._due = False
        self._watching = False

    # What is there

    def compose(self) -> ComposeResult:
        with Horizontal(id="main"):
            yield Conversations()
            with Vertical(id="middle"):
                yield Transcript()
                yield Composer()
            yield Panel()
        with Horizontal(id="footer"):
            yield Static(id="status", markup=False)
            yield Static(_HINTS, id="hints")

    def on_mount(self) -> None:
        wide = self.size.width
        self.query_one(Conversations).display = wide >= 132
        self.query_one(Panel).display = wide >= 100
        composer = self.query_one(Composer)
        composer.turn(self._at, "ask")
        composer.focus()
        self.set_interval(_LOOK, self._tick)
        self._show()
        # Not before the prompt is on the screen: what is loaded takes the processor, and the lock of the interpreter with it.
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        # The history first: it is there in a moment, and loading the model may take long.
        self._threads.do(self._desk.talks, self._remembered, self._wrong)
        self._studying.look()
        self._studying.load()
        self.set_interval(_WATCH, self._watch)

    def _watch(self) -> None:
        """Has a look at what other programs did with the same user."""
        if not self._speaking.busy and not self._watching:
            self._watching = True
            self._threads.do(self._desk.talks, self._remembered, self._not_remembered)

    def _remembered(self, talks: tuple[Talk, ...] | None) -> None:
        self._watching = False
        if talks is None:
            return
        if self._speaking.busy:
            # What is being written here may be among them, and nobody could tell yet that it is the same.
            self._desk.forget_talks()
            return
        self._speaking.remember(talks)
        self._studying.look()
        self._show()

    def _not_remembered(self, error: PersonalPeftError) -> None:
        # Whatever one does next says so; a message every other second helps nobody.
        self._watching = False

    @property
    def _talk(self) -> Talk:
        return self._speaking.talks[self._at]

    @property
    def _exchange(self) -> Exchange | None:
        """The selected one."""
        return self._replying.selected(self._at)

    # Showing it

    def _tick(self) -> None:
        self._speaking.look()
        if self._studying.jobs:
            self._foot()

    def _show(self) -> None:
        """Has the conversation drawn, once for all that changes until then."""
        if not self._due:
            self._due = True
            self.call_next(self._draw)

    async def _draw(self) -> None:
        self._due = False
        if not self.is_running:
            return
        selected = self._exchange
        await self.query_one(Transcript).show(
            self._talk,
            selected=selected.number if selected else None,
            loaded=self._studying.loading is None,
            drafts=self._replying.drafts(self._at),
        )
        self._list()
        self._foot()

    def _list(self) -> None:
        self.query_one(Conversations).show(self._speaking.talks.values(), self._at)

    def _foot(self) -> None:
        going = [(job.stage or "Loading the model", job.done) for job in self._studying.jobs]
        self.query_one("#status", Static).update(views.status(self._user.id, self._studying.standing, going))

    def _note(self, text: str) -> None:
        self.notify(printable(text), markup=False, timeout=4)

    def _wrong(self, error: PersonalPeftError) -> None:
        if not isinstance(error, Cancelled):
            self.notify(
                printable(error.hint), title=printable(error.message), severity="error", markup=False, timeout=10
            )

    def _handle_exception(self, error: Exception) -> None:
        # A mistake in the screen's own thread: whoever called says so in a line, and a test sees it as it is.
        if self.is_headless:
            super()._handle_exception(error)
        else:
            self.broken = self.broken or error
            with suppress(Exception):  # The mistake may be in just what is asked here.
                self._gather_unsent()
            self.exit()

    # What Speaking says

    def talk_changed(self, key: str) -> None:
        if key == self._at:
            self._show()
        else:
            self._list()

    def talk_written(self, key: str, written: Written) -> None:
        if written.left_out:
            self._note("The conversation is too long for the base; its beginning is left out from here on.")
        if key != self._at:
            self._note(f"There is a reply in: {self._speaking.talks[key].title[:40]}")
        if self._studying.standing.stack is None:
            self._studying.look()

    def talk_failed(self, error: PersonalPeftError) -> None:
        self._wrong(error)

    def talk_given_back(self, key: str, text: str) -> bool:
        return self.query_one(Composer).give_back(key, text)

    # What Replying says

    def reply_changed(self) -> None:
        self._show()

    def reply_kept(self) -> None:
        self.action_read()

    def reply_said(self, text: str) -> None:
        self._note(text)

    def reply_wrong(self, error: PersonalPeftError) -> None:
        self._wrong(error)

    # What Studying says

    def model_stands(self, standing: Standing) -> None:
        self.call_next(self.query_one(Panel).show, standing)
        self._foot()

    def model_loaded(self) -> None:
        self._show()

    def model_learned(self, report: LearnReport) -> None:
        self._note(f"{report.layer}: {report.verdict}. {report.reason}")
        # Turned to, but not opened over what somebody is typing on a small screen.
        self.query_one(Panel).turn_to("report")

    def model_compared(self, comparison: Comparison) -> None:
        def choose(number: int) -> None:
            self._studying.choose(comparison, number, screen.tell, screen.try_again)

        screen = Comparing(comparison, choose)
        self.push_screen(screen)

    def model_would_forget(self, item: str, what: Content, report: ForgetReport) -> None:
        def sure(forget: bool | None) -> None:
            if forget:
                self._studying.forget(item)

        self.push_screen(Sure("Forget this for good?", views.would_forget(what, report), "forget it", "keep it"), sure)

    def model_forgot(self, report: ForgetReport) -> None:
        self._speaking.forget(report.turns, report.emptied)
        self._explain()
        self.push_screen(Reading("Forgotten", Content(printable(str(report)))))

    def on_said_forget(self, event: Said.Forget) -> None:
        self._studying.would_forget(event.item, event.text)

    def model_said(self, text: str) -> None:
        self._note(text)

    def model_wrong(self, error: PersonalPeftError) -> None:
        self._wrong(error)

    # Writing

    def on_composer_sent(self, event: Composer.Sent) -> None:
        composer, key = self.query_one(Composer), self._at
        if event.mode == "ask":
            composer.taken(key, "ask")
            self._replying.follow(key)
            self._speaking.ask(key, event.text)
            return
        # The text stands until the ledger has it.
        if event.mode == "remember":
            work = partial(self._user.remember, event.text)
            then = partial(self._kept, key, "remember", "Remembered; it is looked up from the next question on.")
            self._threads.do(work, lambda _: then(), self._wrong)
        else:
            kept = partial(self._kept, key, "comment", "Kept; it is a rule from the next question on.")
            self._replying.comment(key, event.text, kept)

    def _kept(self, key: str, mode: Mode, note: str) -> None:
        composer = self.query_one(Composer)
        composer.taken(key, mode)
        if composer.mode == mode:
            composer.turn(self._at, "ask")
        self._note(note)
        self._studying.look()

    def action_write(self) -> None:
        self.query_one(Composer).focus()

    def action_remember(self) -> None:
        self._type("remember")

    def action_comment(self) -> None:
        if self._replying.answered(self._at) is not None:
            self._type("comment")

    def _type(self, mode: Mode) -> None:
        composer = self.query_one(Composer)
        composer.turn(self._at, mode)
        composer.focus()

    def action_stop(self) -> None:
        """Stops what is being written here; where nothing is, it leads back to where one types."""
        composer = self.query_one(Composer)
        if composer.has_focus and composer.mode != "ask":
            composer.turn(self._at, "ask")
        elif self._speaking.stop(self._at):
            pass
        elif self._studying.comparing is not None:
            self._studying.comparing.stop()
        else:
            composer.focus()

    def action_interrupt(self) -> None:
        if self.screen.get_selected_text():
            self.screen.action_copy_text()
        elif not self._speaking.stop(self._at):
            self._note("Ctrl+Q leaves.")

    async def action_quit(self) -> None:
        self._gather_unsent()
        self._speaking.stop_all()
        for job in self._studying.jobs:
            job.stop()
        self.exit()

    def _gather_unsent(self) -> None:
        """Everything that was typed and that the ledger does not have."""
        self._replying.leave(self._typed)
        self.unsent = [*self._speaking.unsent(), *self.query_one(Composer).unsent(), *self._replying.unsent()]

    # Conversations

    def action_new(self) -> None:
        self._go_to(self._speaking.begin())

    def action_conversations(self) -> None:
        found = self.query_one(Conversations)
        found.display = not (found.display and found.has_focus)
        if found.display:
            if self.screen.has_class("-narrow"):
                self.query_one(Panel).display = False
            found.focus()
        else:
            self.action_write()

    def on_conversations_picked(self, event: Conversations.Picked) -> None:
        self._go_to(event.key)

    def _go_to(self, key: str) -> None:
        self._at = key
        self.query_one(Conversations).display = self.screen.has_class("-widest")
        self.query_one(Composer).turn(key, "ask")
        self._show()
        self.action_write()

    # Replies

    def action_read(self) -> None:
        if self._talk.exchanges:
            self.query_one(Transcript).focus()

    def action_select(self, steps: int) -> None:
        talk, now = self._talk, self._exchange
        if now is None:
            return
        at = talk.exchanges.index(now) + steps
        if at >= len(talk.exchanges):
            self.action_write()
        elif at >= 0:
            self._select(talk.exchanges[at].number)

    def on_exchange_view_picked(self, event: ExchangeView.Picked) -> None:
        self._select(event.number)

    def _select(self, number: int) -> None:
        self._replying.select(self._at, number)
        transcript = self.query_one(Transcript)
        view = transcript.view(number)
        if view is not None:
            transcript.scroll_to_widget(view, animate=False)
        self._explain()

    def action_good(self) -> None:
        self._replying.rate(self._at, 1)

    def action_bad(self) -> None:
        self._replying.rate(self._at, -1)

    def action_retry(self) -> None:
        self._replying.again(self._at)

    def action_take_back(self) -> None:
        exchange = self._exchange
        if exchange is not None and exchange.status == "failed":
            if self.query_one(Composer).give_back(self._at, exchange.asked):
                self._speaking.take_back(self._at, exchange.number)
                self.action_write()
            else:
                self._note("Send or clear what you have typed first.")

    def action_copy_reply(self) -> None:
        exchange = self._exchange
        if exchange is not None and exchange.text:
            self.copy_to_clipboard(exchange.text)
            self._note("Copied.")

    def action_edit_reply(self) -> None:
        exchange = self._exchange
        if exchange is not None and exchange.status == "failed":
            self.action_take_back()
            return
        self._replying.edit(self._at, self._typed)

    def action_leave_edit(self) -> None:
        self._replying.leave(self._typed)
        self._show()
        self.action_read()

    def action_keep_edit(self) -> None:
        typed = self._typed
        if typed is not None:
            self._replying.keep(self._at, typed)

    @property
    def _typed(self) -> str | None:
        """What stands in the editor of a reply, where one is open."""
        editor = next(iter(self.query(ReplyEditor)), None)
        return None if editor is None else editor.text

    def action_links(self) -> None:
        """Asks which of the selected reply's links to open."""
        exchange = self._exchange
        addresses = links(exchange.text) if exchange is not None else ()
        if addresses:
            self.push_screen(Links(addresses), self._open_link)
        else:
            self._note("There is no link in that reply.")

    def action_follow(self, address: str) -> None:
        """Asks whether to open a link that was clicked."""
        self.push_screen(Links([address]), self._open_link)

    def _open_link(self, address: str | None) -> None:
        if address is not None:
            self.open_url(address)

    def action_why(self) -> None:
        if self._replying.answered(self._at) is not None:
            self.action_open("why")
            self._explain()

    def _explain(self) -> None:
        panel, exchange = self.query_one(Panel), self._exchange
        if not panel.display or panel.tab != "why":
            return
        if exchange is None or exchange.turn is None:
            panel.explain(None)
        else:
            self._studying.explain(exchange.turn, panel.explain)

    # The model

    def action_model(self) -> None:
        panel = self.query_one(Panel)
        if panel.display and panel.has_pseudo_class("focus-within"):
            panel.display = False
            self.action_write()
        else:
            self.action_open(panel.tab)
            self._explain()
            panel.query_one("Tabs").focus()

    def action_open(self, tab: str) -> None:
        """Shows a tab of the side panel."""
        panel = self.query_one(Panel)
        panel.display = True
        panel.turn_to(tab)
        if self.screen.has_class("-narrow"):
            self.query_one(Conversations).display = False

    def on_tabbed_content_tab_activated(self) -> None:
        self._explain()

    def on_weight_turned(self, event: Weight.Turned) -> None:
        self._studying.weigh(event.layer, event.weight)

    def on_revisions_wanted(self, event: Revisions.Wanted) -> None:
        if event.compare:
            self._compare(event.layer, event.revision or "base")
        else:
            self._studying.roll_back(event.layer, event.revision)

    def action_roll_back(self) -> None:
        """Undoes the last change of the highest layer that has changed."""
        layers = [layer.name for layer in self._studying.standing.layers]
        if layers:
            self._studying.roll_back(layers[-1], "previous")
        else:
            self._note("Nothing was learned yet; there is nothing to take back.")

    def action_compare(self) -> None:
        self._compare(None, None)

    def _compare(self, layer: str | None, revision: str | None) -> None:
        exchange = self._exchange
        if exchange is None:
            self._note("Ask something first: two revisions are compared on the selected question.")
        else:
            self._studying.compare(self._talk.messages(exchange.number), layer, revision)

    def action_learn(self) -> None:
        self._studying.learn()

    def action_report(self) -> None:
        report = self._studying.standing.report
        if report is None:
            self._note("There is no report yet.")
        else:
            self.push_screen(Reading("The last report", Content(printable(str(report)))))

    # Everything else

    def action_keys(self) -> None:
        self.push_screen(keys_help())

    def action_colours(self) -> None:
        self.theme = theme.LIGHT.name if self.theme == theme.DARK.name else theme.DARK.name

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """What the palette lists."""
        for title, about, action in COMMANDS:
            yield SystemCommand(title, about, partial(self.run_action, action))
