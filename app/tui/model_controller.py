"""What is known of the model, and what changes it: learning, comparing, rolling back, turning weights, forgetting. What other
programs learn of the same user is seen too.

Invariant: at most one learn, one comparison and one forgetting go on at a time, and ``standing`` is looked at again after each change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from personalpeft.errors import NothingToLearn, PersonalPeftError
from personalpeft_app.tui.background_tasks import BackgroundTasks
from personalpeft_app.tui.notifier import Notifier
from personalpeft_app.tui.user_session import ModelState, TaskHandle, UserSession, describe_error

if TYPE_CHECKING:
    from textual.content import Content

    from personalpeft import LearnReport, Provenance, TrainingStatus
    from personalpeft.chat.compare import Comparison, LabeledComparison
    from personalpeft.erasure import ForgetReport
    from personalpeft.types import HeadMove


class Listener(Protocol):
    """What hears of it, in the screen's thread."""

    def model_stands(self, standing: ModelState) -> None:
        """How things are now."""

    def model_changed(self) -> None:
        """Something has begun or is over: loading the model, or a learn of another program."""

    def model_learned(self, report: LearnReport) -> None:
        """A learn is over."""

    def model_compared(self, comparison: Comparison) -> None:
        """Two different answers are there."""

    def model_would_forget(self, item: str, what: Content, report: ForgetReport) -> None:
        """What would go with something that somebody wants forgotten."""

    def model_forgot(self, report: ForgetReport) -> None:
        """Something was destroyed."""


class ModelController:
    """See above. ``loading``, ``learning``, ``comparing`` and ``forgetting`` are there while that goes on here."""

    def __init__(
        self,
        desk: UserSession,
        threads: BackgroundTasks,
        telling: Notifier,
        listener: Listener,
        loading: TaskHandle,
    ) -> None:
        self._desk = desk
        self._user = desk.user
        self._threads = threads
        self._telling = telling
        self._listener = listener
        self._withdrawn: int | None = None
        self.standing = ModelState()
        self.loading: TaskHandle | None = loading
        self.learning: TaskHandle | None = None
        self.comparing: TaskHandle | None = None
        self.forgetting: TaskHandle | None = None
        self._elsewhere: TrainingStatus | None = None
        self._looking = False

    @property
    def jobs(self) -> Iterable[TaskHandle]:
        """All that goes on."""
        return [
            job
            for job in (self.loading, self.learning, self.comparing, self.forgetting)
            if job is not None
        ]

    @property
    def going(self) -> list[tuple[str, float]]:
        """What goes on and how far it is, 0 to 1, what another program learns last."""
        here = [(job.stage or "Loading the model", job.done) for job in self.jobs]
        other = self._elsewhere
        if other is None or self._leased:
            return here
        doing = f"{other.stage or 'Learning'} {other.layer or ''}".strip()
        return [*here, (f"Elsewhere: {doing}", other.done)]

    @property
    def _leased(self) -> bool:
        # Whatever is learned now is learned here.
        return self.learning is not None or self.forgetting is not None

    def watch(self) -> None:
        """Has a look at what other programs learn, unless one is under way."""
        if not self._looking and not self._leased:
            self._looking = True
            self._threads.run(self._user.training_status, self._seen, self._not_seen)

    def _seen(self, learning: TrainingStatus | None) -> None:
        self._looking = False
        before, self._elsewhere = self._elsewhere, None if self._leased else learning
        if self._elsewhere != before:
            self._listener.model_changed()
        if before is not None and self._elsewhere is None:
            self.refresh()

    def _not_seen(self, error: PersonalPeftError) -> None:
        # It is looked again soon.
        self._looking = False

    def load(self) -> None:
        """Loads the model."""
        self._threads.run(self._desk.load, lambda _: self._loaded(), self._not_loaded)

    def refresh(self) -> None:
        """Looks how things are."""
        self._threads.run(self._desk.refresh, self._stands, self._telling.wrong)

    def learn(self) -> None:
        """Learns; where that goes on already, asks it to stop."""
        if self.learning is not None:
            self.learning.stop()
            self._telling.note("Learning stops after this step; the next learn goes on from there.")
            return
        job = self.learning = TaskHandle()
        job.progress("Learning", 0.0)
        self._threads.run(partial(self._desk.learn, job), self._learned, self._not_learned)

    def compare(
        self, messages: list[dict[str, str]], layer: str | None, revision: str | None
    ) -> None:
        """What is live in a layer against another revision, "base" or, where none is named or it is the one that is live, what
        was live before; on the same messages. Without a layer it is the lowest.
        """
        if self.comparing is not None:
            self._telling.note("A comparison is under way; Esc stops it.")
            return
        heads = {each.name: each.head or "base" for each in self.standing.layers}
        layer = layer or next(iter(heads), "style")
        other = "previous" if revision in (None, heads.get(layer)) else revision
        job = self.comparing = TaskHandle()
        job.progress("Both are answering", 0.0)
        self._threads.run(
            partial(self._desk.compare, messages, other, layer, job),
            self._compared,
            self._not_compared,
        )

    def stop_comparing(self) -> bool:
        """Ends the comparison that is under way; false where none is."""
        if self.comparing is None:
            return False
        self.comparing.stop()
        return True

    def choose(
        self,
        comparison: Comparison,
        number: int,
        then: Callable[[LabeledComparison], None],
        failed: Callable[[], None],
    ) -> None:
        """Keeps which of two answers is better."""

        def chosen(choice: LabeledComparison) -> None:
            then(choice)
            self.refresh()

        def not_chosen(error: PersonalPeftError) -> None:
            failed()
            self._telling.wrong(error)

        self._threads.run(partial(comparison.choose, number), chosen, not_chosen)

    def roll_back(self, layer: str, to: str | None) -> None:
        """Makes a revision live; "previous" undoes the last change, None is the bare base."""
        if any(each.name == layer and each.head == to for each in self.standing.layers):
            self._telling.note(f"{layer}: {to or 'the bare base'} is live already.")
            return
        self._threads.run(partial(self._user.rollback, layer, to), self._moved, self._telling.wrong)

    def weigh(self, layer: str, weight: float) -> None:
        """Turns a layer's weight."""
        self._threads.run(
            partial(self._user.set_weight, layer, weight), lambda _: self.refresh(), self._wrong
        )

    def explain(self, turn: str, then: Callable[[Provenance], None]) -> None:
        """Why a reply was as it was."""
        self._threads.run(partial(self._user.why, turn), then, self._telling.wrong)

    def would_forget(self, item: str, what: Content) -> None:
        """Finds out what would go with something; nothing is changed. ``what`` it is, in words."""
        if self.forgetting is not None:
            self._telling.note("Something is being forgotten; one after another.")
            return
        work = partial(self._user.forget, item, dry_run=True)
        self._threads.run(
            work, partial(self._listener.model_would_forget, item, what), self._telling.wrong
        )

    def forget(self, item: str) -> None:
        """Destroys something for good, and has built anew what is missing then."""
        job = self.forgetting = TaskHandle()
        job.progress("Forgetting", 0.0)
        self._threads.run(partial(self._desk.forget, item, job), self._forgot, self._not_forgotten)

    def _forgot(self, report: ForgetReport) -> None:
        self.forgetting = None
        self.refresh()
        self._listener.model_forgot(report)

    def _not_forgotten(self, error: PersonalPeftError) -> None:
        self.forgetting = None
        self._wrong(error)

    def _loaded(self) -> None:
        self.loading = None
        self.refresh()
        self._listener.model_changed()

    def _not_loaded(self, error: PersonalPeftError) -> None:
        self._loaded()
        self._telling.wrong(error)

    def _stands(self, standing: ModelState) -> None:
        for move in () if self._withdrawn is None else standing.withdrawn[self._withdrawn :]:
            back = move.after or "the bare base"
            self._telling.note(
                f"{move.layer}: {move.before} was live on probation and is no longer; {back} answers again."
            )
        self.standing, self._withdrawn = standing, len(standing.withdrawn)
        self._listener.model_stands(standing)

    def _learned(self, report: LearnReport) -> None:
        self.learning = None
        self.refresh()
        self._listener.model_learned(report)

    def _not_learned(self, error: PersonalPeftError) -> None:
        self.learning = None
        if isinstance(error, NothingToLearn):
            self._telling.note(describe_error(error))
            self.refresh()
        else:
            self._wrong(error)

    def _compared(self, comparison: Comparison) -> None:
        self.comparing = None
        self.refresh()
        if comparison.same:
            self._telling.note("Both say the same; there is nothing to choose.")
        else:
            self._listener.model_compared(comparison)

    def _not_compared(self, error: PersonalPeftError) -> None:
        self.comparing = None
        self._wrong(error)

    def _moved(self, move: HeadMove) -> None:
        self._telling.note(
            f"{move.layer}: {move.before or 'the bare base'} → {move.after or 'the bare base'}"
        )
        self.refresh()

    def _wrong(self, error: PersonalPeftError) -> None:
        self._telling.wrong(error)
        self.refresh()
