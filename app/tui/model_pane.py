"""The model, beside the conversation: stack, revisions, last report, provenance, memory.

Invariant: at most one learn, one comparison and one forgetting run at a time. The state is read
again after each change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.css.query import NoMatches
from textual.message import Message
from textual.widgets import Static, TabbedContent, TabPane

from personalpeft import TrainingStatus
from personalpeft.erasure import ForgetUserReport
from personalpeft.errors import NothingToLearn, PersonalPeftError
from personalpeft.rebase import RebaseReport
from personalpeft.types import HeadMove
from personalpeft_app.output import printable
from personalpeft_app.tui import dialogs, views
from personalpeft_app.tui.controls import ForgettableList, RevisionList, WeightControl
from personalpeft_app.tui.conversation import Exchange
from personalpeft_app.tui.keys import bindings
from personalpeft_app.tui.notifier import errors_shown, show_note
from personalpeft_app.tui.user_session import ModelState, TaskHandle, UserSession, describe_error

_WEIGHT_HINT = (
    "[$secondary][b $primary]← →[/] set a weight, [b $primary]1[/] as learned, "
    "[b $primary]0[/] without[/]"
)
_FORGET_HINT = "[$secondary][b $primary]d[/] forgets one; it asks first[/]"
_REVISION_HINT = (
    "[$secondary][b $primary]Enter[/] makes it live  [b $primary]b[/] compares blind[/]"
)


class ModelPane(Vertical):
    """The panes, under tabs. ``loading`` is the task that loads the model."""

    # Keys that the tabs and the weights do not use.
    BINDINGS: ClassVar[list[BindingType]] = bindings("In your model")

    class Changed(Message):
        """The state of the model or a task changed."""

    class Forgot(Message):
        """An item was forgotten."""

    @dataclass
    class UserForgotten(Message):
        """The user was forgotten: no act on them can succeed any more."""

        report: ForgetUserReport

    @dataclass
    class Rebased(Message):
        """The layers answer on another base now."""

        base: str

    def __init__(self, session: UserSession, loading: TaskHandle) -> None:
        super().__init__()
        self.state = ModelState()
        # What runs, by name: "load", "learn" (or a rebase), "compare", "forget".
        self.tasks = {"load": loading}
        self._session = session
        self._user = session.user
        self._runtime = session.runtime
        self._elsewhere: TrainingStatus | None = None
        self._watching = False
        self._withdrawn: int | None = None
        self._selected: Exchange | None = None
        # The turn that the Why tab shows.
        self._explained: str | None = None

    def compose(self) -> ComposeResult:
        with TabbedContent(id="tabs"):
            with TabPane("Stack", id="stack-tab"), VerticalScroll(can_focus=False):
                yield Static(id="no-stack", markup=False)
                yield Vertical(id="weights")
                yield Static(_WEIGHT_HINT, classes="hint", id="weight-hint")
            with TabPane("Revisions", id="revisions-tab"):
                yield RevisionList(id="revisions")
                yield Static(_REVISION_HINT, classes="hint", id="revision-hint")
            with TabPane("Report", id="report-tab"), VerticalScroll():
                yield Static(id="report", markup=False)
            with TabPane("Why", id="why-tab"):
                yield ForgettableList(id="why")
                yield Static(_FORGET_HINT, classes="hint")
            with TabPane("Memory", id="memory-tab"):
                yield ForgettableList(id="memory")
                yield Static(_FORGET_HINT, classes="hint")

    # Tasks

    @property
    def progress(self) -> list[tuple[str, float]]:
        """The stage and progress of each task, those of other programs last."""
        progress = [(each.stage, each.done) for each in self.tasks.values()]
        if self._elsewhere is not None and not self._is_training:
            stage = f"{self._elsewhere.stage or 'Learning'} {self._elsewhere.layer or ''}".strip()
            progress.append((f"Elsewhere: {stage}", self._elsewhere.done))
        return progress

    @property
    def _is_training(self) -> bool:
        return not self.tasks.keys().isdisjoint({"learn", "forget"})

    @contextmanager
    def _shown_task(self, name: str, stage: str) -> Iterator[TaskHandle]:
        """Show a task while the block runs."""
        self.tasks[name] = task = TaskHandle(stage)
        self.post_message(self.Changed())
        try:
            yield task
        finally:
            del self.tasks[name]
            self.post_message(self.Changed())

    @work
    async def load(self) -> None:
        with errors_shown(self):
            try:
                await self._session.call(self._session.load)
            finally:
                del self.tasks["load"]
        await self._refresh()

    @work
    async def check_for_changes(self) -> None:
        """Show what other programs train. An error waits for the next look."""
        if self._watching or self._is_training:
            return
        self._watching = True
        try:
            status = await self._session.call(self._user.training_status)
        except PersonalPeftError:
            return
        finally:
            self._watching = False
        known, self._elsewhere = self._elsewhere, None if self._is_training else status
        if self._elsewhere != known:
            self.post_message(self.Changed())
            if self._elsewhere is None:
                await self._refresh()

    @work
    async def refresh_state(self) -> None:
        await self._refresh()

    async def _refresh(self) -> None:
        with errors_shown(self):
            self.state = await self._session.call(self._session.read_model)
            known, self._withdrawn = self._withdrawn, len(self.state.withdrawn)
            for move in self.state.withdrawn[known:] if known is not None else ():
                show_note(
                    self,
                    f"{move.layer}: {move.before} failed its probation; "
                    f"{move.after or 'the bare base'} answers again.",
                )
            await self.show(self.state)
        self.post_message(self.Changed())

    async def show(self, state: ModelState) -> None:
        """Show a state, unless the program has closed the pane."""
        # While it closes, the widgets go one after another.
        with suppress(NoMatches):
            weights = {weight.layer_name: weight for weight in self.query(WeightControl)}
            for name in weights.keys() - {layer.name for layer in state.layers}:
                await weights[name].remove()
            for layer in state.layers:
                if layer.name in weights:
                    weights[layer.name].show(layer)
                else:
                    await self.query_one("#weights").mount(WeightControl(layer))
            problem = self.query_one("#no-stack", Static)
            problem.update(state.problem or "The bare base answers: nothing was learned yet.")
            problem.display = bool(state.problem) or not state.layers
            self.query_one("#weight-hint").display = bool(state.layers)
            self.query_one(RevisionList).show(views.revisions(state))
            self.query_one("#revision-hint").display = bool(state.revisions)
            self.query_one("#report", Static).update(views.report(state.report))
            self.query_one("#memory", ForgettableList).show(views.memory(state.items))

    # Tabs

    @property
    def tab(self) -> str:
        """The open tab: "stack", "revisions", "report", "why" or "memory"."""
        return self.query_one(TabbedContent).active.removesuffix("-tab")

    def open(self, tab: str) -> None:
        self.display = True
        self._activate(tab)
        self._explain()

    def focus_tabs(self) -> None:
        self.query_one("Tabs").focus()

    def _activate(self, tab: str) -> None:
        self.query_one(TabbedContent).active = f"{tab}-tab"

    def on_tabbed_content_tab_activated(self) -> None:
        self._explain()

    # Provenance

    def select(self, selected: Exchange | None) -> None:
        """Set the exchange that the Why tab and comparisons are about."""
        self._selected = selected
        if self._turn != self._explained:
            self._explain()

    @property
    def _turn(self) -> str | None:
        return self._selected.turn if self._selected is not None else None

    def _explain(self) -> None:
        if self.display and self.tab == "why":
            self._explained = self._turn
            self._show_why(self._turn)

    @work(exclusive=True, group="why")
    async def _show_why(self, turn: str | None) -> None:
        with errors_shown(self):
            why = await self._session.call(self._user.why, turn) if turn is not None else None
            self.query_one("#why", ForgettableList).show(views.why(why))

    # Learning

    @work
    async def learn(self) -> None:
        """Learn from all new feedback. While a learn runs, stop it."""
        if "learn" in self.tasks:
            self.tasks["learn"].stop()
            show_note(self, "It stops after this step; the next one resumes there.")
            return
        with errors_shown(self), self._shown_task("learn", "Learning") as task:
            try:
                report = await self._session.call(
                    self._user.learn, progress=task.progress, cancelled=task.cancelled
                )
                show_note(self, f"{report.layer}: {report.outcome.text}. {report.reason}")
                # The tab is set, but the pane does not open over what the user types.
                self._activate("report")
            except NothingToLearn as error:
                show_note(self, describe_error(error))
        await self._refresh()

    # Comparing

    @work
    async def compare(self, layer: str | None = None, revision: str | None = None) -> None:
        """Compare the head of a layer with another revision, blind, on the selected prompt.

        ``revision`` is an id or "base"; without one, or for the head, it is the previous head.
        """
        turn = self._turn
        if turn is None:
            show_note(self, "Ask something first: revisions are compared on the selected question.")
            return
        if "compare" in self.tasks:
            show_note(self, "A comparison is running; Esc stops it.")
            return
        heads = {each.name: each.head or "base" for each in self.state.layers}
        layer = layer or next(iter(heads), "style")
        other = "previous" if revision in (None, heads.get(layer)) else revision
        with errors_shown(self):
            with self._shown_task("compare", "Both are answering") as task:
                comparison = await self._session.call(
                    lambda: self._user.compare(
                        self._user.turn(turn).messages,
                        "live",
                        other,
                        layer=layer,
                        cancelled=task.cancelled,
                    )
                )
            if comparison.same:
                show_note(self, "Both answers are the same.")
            elif await self.app.push_screen_wait(
                dialogs.BlindCompareDialog(comparison, self._session)
            ):
                await self._refresh()

    def stop_comparing(self) -> bool:
        """Stop the comparison. Returns whether one was running."""
        task = self.tasks.get("compare")
        if task is not None:
            task.stop()
        return task is not None

    # Another base

    @work
    async def rebase(self) -> None:
        """Build all layers on a base that the user picks, show both, and switch if asked to.

        It takes the place of a learn, and is stopped as one.
        """
        if "learn" in self.tasks:
            show_note(self, "A learn is running; ^L stops it.")
            return
        with errors_shown(self):
            here, *others = await self._session.call(self._runtime.available_bases)
            options = {each.name: each.name for each in (here, *others)}
            options[here.name] += "  (open: after a change of its recipe or weights)"
            title = "Build your layers on which base?"
            dialog = dialogs.Picker(title, "enter builds and compares, esc does not", options)
            picked = await self.app.push_screen_wait(dialog)
            if picked is None:
                return
            report = await self._rebase(picked, accept=False)
            if all(each.before == each.after for each in report.layers):
                show_note(self, f"{report.outcome.text}: {report.reason}")
            elif await self.app.push_screen_wait(dialogs.rebase_dialog(report)):
                report = await self._rebase(picked, accept=True)
                if not report.switched:
                    show_note(self, report.reason)
                elif picked != here.name:
                    self.post_message(self.Rebased(picked))
        await self._refresh()

    async def _rebase(self, to: str, *, accept: bool) -> RebaseReport:
        with self._shown_task("learn", "Loading the other base") as task:
            return await self._session.call(
                self._runtime.rebase,
                self._user.id,
                to,
                accept=accept,
                compare_only=not accept,
                progress=task.progress,
                cancelled=task.cancelled,
            )

    # Heads and weights

    def roll_back(self, layer: str, to: str | None) -> None:
        """Make a revision live. "previous" undoes the last change, None is the bare base."""
        if any(each.name == layer and each.head == to for each in self.state.layers):
            show_note(self, f"{layer}: {to or 'the bare base'} is live already.")
        else:
            self._change(layer, partial(self._user.rollback, layer, to))

    def undo(self) -> None:
        """Undo the last change of the highest layer."""
        if self.state.layers:
            self.roll_back(self.state.layers[-1].name, "previous")
        else:
            show_note(self, "Nothing was learned yet; there is nothing to undo.")

    @work
    async def _change(self, layer: str, change: Callable[[], HeadMove | None]) -> None:
        with errors_shown(self):
            move = await self._session.call(change)
            if move is not None:
                before, after = (each or "the bare base" for each in (move.before, move.after))
                show_note(self, f"{layer}: {before} → {after}")
        await self._refresh()

    def on_weight_control_weight_changed(self, event: WeightControl.WeightChanged) -> None:
        self._change(event.layer, partial(self._user.set_weight, event.layer, event.weight))

    @on(RevisionList.RowAction, "#revisions")
    def _act_on_revision(self, event: RevisionList.RowAction) -> None:
        layer, revision = event.value
        if event.act == "compare":
            self.compare(layer, revision or "base")
        else:
            self.roll_back(layer, revision)

    # Forgetting

    @on(ForgettableList.RowAction, "#why, #memory")
    @work
    async def _forget(self, event: ForgettableList.RowAction) -> None:
        if event.act != "forget":
            return
        if "forget" in self.tasks:
            show_note(self, "An item is being forgotten; wait for it to end.")
            return
        with errors_shown(self):
            preview = await self._session.call(self._user.forget, event.value, dry_run=True)
            if not await self.app.push_screen_wait(dialogs.forget_dialog(event.text, preview)):
                return
            try:
                with self._shown_task("forget", "Forgetting") as task:
                    report = await self._session.call(
                        self._user.forget,
                        event.value,
                        progress=task.progress,
                        cancelled=task.cancelled,
                    )
            finally:
                await self._refresh()
            # The reply itself may be gone: the Why tab waits for the next selection.
            self._explained = ""
            self.post_message(self.Forgot())
            self.app.push_screen(dialogs.TextDialog("Forgotten", Content(printable(str(report)))))

    @work
    async def forget_user(self) -> None:
        """Erase the user and everything of them, once their id was typed."""
        with errors_shown(self):
            forget = partial(self._runtime.forget_user, self._user.id)
            preview = await self._session.call(forget, dry_run=True)
            if await self.app.push_screen_wait(dialogs.ForgetUserDialog(preview)):
                report = await self._session.call(forget)
                self.post_message(self.UserForgotten(report))

    # Consent

    @work
    async def switch_training(self) -> None:
        """Allow training on new feedback, or withhold it."""
        with errors_shown(self):
            allowed = not self.state.training
            await self._session.call(self._user.set_training, allowed)
            withheld = "New feedback is not trained on; rules and facts still act in the prompt."
            show_note(self, "New feedback is trained on." if allowed else withheld)
        await self._refresh()

    # The report

    def read_report(self) -> None:
        if self.state.report is None:
            show_note(self, "There is no report yet.")
        else:
            text = Content(printable(str(self.state.report)))
            self.app.push_screen(dialogs.TextDialog("The last report", text))
