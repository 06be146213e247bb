"""Your model, at the side of the conversation: the stack with weights to turn, the revisions with what each gained, the last
report, why the selected reply was so, and the memory; and what comes over the screen when one of these is changed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Static, TabbedContent, TabPane

from personalpeft_app.output import printable
from personalpeft_app.tui import views
from personalpeft_app.tui.background_tasks import BackgroundTasks
from personalpeft_app.tui.conversation import Conversation, Exchange
from personalpeft_app.tui.dialogs import BlindCompareDialog, ConfirmDialog, TextDialog
from personalpeft_app.tui.forgettable_list import ForgettableList
from personalpeft_app.tui.model_controller import ModelController
from personalpeft_app.tui.notifier import Notifier
from personalpeft_app.tui.revisions import Revisions
from personalpeft_app.tui.user_session import ModelState, TaskHandle, UserSession
from personalpeft_app.tui.weight_control import Weight

if TYPE_CHECKING:
    from personalpeft import LearnReport, Provenance
    from personalpeft.chat.compare import Comparison
    from personalpeft.erasure import ForgetReport


class ModelPane(Vertical):
    """All of it, under tabs. ``loading`` hears how far the loading of the model is."""

    # Reached where what has the focus has no use for them: the tabs, and a weight.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "app.focus_next", "Into the tab"),
        Binding("up", "app.focus_previous", "Back to the tabs"),
    ]

    class Changed(Message):
        """How things stand is not as it was."""

    class Forgot(Message):
        """Something was destroyed."""

        def __init__(self, report: ForgetReport) -> None:
            super().__init__()
            self.report = report

    def __init__(
        self, desk: UserSession, threads: BackgroundTasks, telling: Notifier, loading: TaskHandle
    ) -> None:
        super().__init__()
        self.studying = ModelController(desk, threads, telling, self, loading)
        self._telling = telling
        self._talk = Conversation("")
        self._selected: Exchange | None = None
        # The turn that Why is about.
        self._explained: str | None = None

    def compose(self) -> ComposeResult:
        with TabbedContent(id="tabs"):
            with TabPane("Stack", id="stack-tab"), VerticalScroll(can_focus=False):
                yield Static(id="no-stack", markup=False)
                yield Vertical(id="weights")
                yield Static(_TURNING, id="turning")
            with TabPane("Built", id="revisions-tab"):
                yield Revisions()
                yield Static(_CHANGING, id="changing")
            with TabPane("Report", id="report-tab"), VerticalScroll():
                yield Static(id="report", markup=False)
            with TabPane("Why", id="why-tab"):
                yield ForgettableList("why")
                yield Static(_FORGETTING, classes="forgetting")
            with TabPane("Memory", id="memory-tab"):
                yield ForgettableList("memory")
                yield Static(_FORGETTING, classes="forgetting")

    async def show(self, standing: ModelState) -> None:
        """What is so now; nothing once the program closes, as it may where a learn ends at that moment."""
        if not self.is_attached:
            return
        known = {weight.of: weight for weight in self.query(Weight)}
        for name in known.keys() - {layer.name for layer in standing.layers}:
            await known[name].remove()
        for layer in standing.layers:
            if layer.name in known:
                known[layer.name].show(layer)
            else:
                await self.query_one("#weights").mount(Weight(layer))
        nothing = self.query_one("#no-stack", Static)
        nothing.update(standing.problem or "The bare base answers: nothing was learned yet.")
        nothing.display = bool(standing.problem) or not standing.layers
        self.query_one("#turning").display = bool(standing.layers)
        self.query_one(Revisions).show(standing)
        self.query_one("#changing").display = bool(standing.revisions)
        self.query_one("#report", Static).update(views.report(standing.report))
        self.query_one("#memory", ForgettableList).show(views.memory(standing.items))

    # Tabs

    @property
    def tab(self) -> str:
        """The tab that is turned to: "stack", "revisions", "report", "why" or "memory"."""
        return self.query_one(TabbedContent).active.removesuffix("-tab")

    def open(self, tab: str) -> None:
        """Shows a tab."""
        self.display = True
        self._turn_to(tab)
        self._explain()

    def focus_tabs(self) -> None:
        """Goes to the row of tabs."""
        self.query_one("Tabs").focus()

    def _turn_to(self, tab: str) -> None:
        self.query_one(TabbedContent).active = f"{tab}-tab"

    def on_tabbed_content_tab_activated(self) -> None:
        self._explain()

    # Why

    def about(self, talk: Conversation, selected: Exchange | None, *, anew: bool = False) -> None:
        """The conversation that is shown, and what is selected in it; ``anew``: why it was so may have changed."""
        self._talk, self._selected = talk, selected
        if anew or self._turn != self._explained:
            self._explain()

    @property
    def _turn(self) -> str | None:
        return None if self._selected is None else self._selected.turn

    def _explain(self) -> None:
        if not self.display or self.tab != "why":
            return
        turn = self._explained = self._turn
        if turn is None:
            self.query_one("#why", ForgettableList).show(views.why(None))
        else:
            self.studying.explain(turn, partial(self._account, turn))

    def _account(self, turn: str, account: Provenance) -> None:
        # Another reply may have been selected meanwhile.
        if turn == self._explained:
            self.query_one("#why", ForgettableList).show(views.why(account))

    # What Studying says

    def model_stands(self, standing: ModelState) -> None:
        self.call_next(self.show, standing)
        self.post_message(self.Changed())

    def model_changed(self) -> None:
        self.post_message(self.Changed())

    def model_learned(self, report: LearnReport) -> None:
        self._telling.note(f"{report.layer}: {report.verdict}. {report.reason}")
        # Turned to, but not opened over what somebody is typing on a small screen.
        self._turn_to("report")

    def model_compared(self, comparison: Comparison) -> None:
        def choose(number: int) -> None:
            self.studying.choose(comparison, number, screen.tell, screen.try_again)

        screen = BlindCompareDialog(comparison, choose)
        self.app.push_screen(screen)

    def model_would_forget(self, item: str, what: Content, report: ForgetReport) -> None:
        def sure(forget: bool | None) -> None:
            if forget:
                self.studying.forget(item)

        sheet = ConfirmDialog(
            "Forget this for good?", views.would_forget(what, report), "forget it", "keep it"
        )
        self.app.push_screen(sheet, sure)

    def model_forgot(self, report: ForgetReport) -> None:
        self.post_message(self.Forgot(report))
        self.app.push_screen(TextDialog("Forgotten", Content(printable(str(report)))))

    # What a person wants

    def on_weight_turned(self, event: Weight.Turned) -> None:
        self.studying.weigh(event.layer, event.weight)

    def on_revisions_wanted(self, event: Revisions.Wanted) -> None:
        if event.compare:
            self.compare(event.layer, event.revision or "base")
        else:
            self.studying.roll_back(event.layer, event.revision)

    def on_forgettable_list_forget(self, event: ForgettableList.Forget) -> None:
        self.studying.would_forget(event.item, event.text)

    def compare(self, layer: str | None = None, revision: str | None = None) -> None:
        """Two answers to the selected question, blind; of what is live and of a revision, as ``Studying.compare``."""
        if self._selected is None:
            self._telling.note(
                "Ask something first: two revisions are compared on the selected question."
            )
        else:
            self.studying.compare(self._talk.messages(self._selected.number), layer, revision)

    def roll_back(self) -> None:
        """Undoes the last change of the highest layer that has changed."""
        layers = [layer.name for layer in self.studying.standing.layers]
        if layers:
            self.studying.roll_back(layers[-1], "previous")
        else:
            self._telling.note("Nothing was learned yet; there is nothing to take back.")

    def read_report(self) -> None:
        """Has all that the last learn said over the screen."""
        report = self.studying.standing.report
        if report is None:
            self._telling.note("There is no report yet.")
        else:
            self.app.push_screen(TextDialog("The last report", Content(printable(str(report)))))


_TURNING = "[$secondary][b $primary]← →[/] turn a weight, [b $primary]1[/] as learned, [b $primary]0[/] without[/]"
_FORGETTING = "[$secondary][b $primary]d[/] forgets one; it asks first[/]"
_CHANGING = "[$secondary][b $primary]Enter[/] makes it live  [b $primary]b[/] compares blind[/]"
