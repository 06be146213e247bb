"""The status of learning, from the ledger and the leases alone. No model is loaded.

- ``training_status``: the running learn, for other processes. It exists only while the lease is
  held, so a killed learner leaves none. Setting it commits nothing and fails no learn.
- ``pending``: the reasons to learn. A lesson that any report lists is not pending. So a caller
  that learns on triggers learns once for each lesson, however often it looks.
- ``list_signal_status``: the use of every signal, in the order of the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from personalpeft.deprecation import RenamedAttributes
from personalpeft.formatting import pluralize
from personalpeft.former_names import ShownCode
from personalpeft.learning.data.lesson_assignment import Assignment, lessons_for, load_assignments
from personalpeft.learning.data.scrubber import RemovedText
from personalpeft.learning.layers import LayerState, ancestors, held_out_signals, known_layers
from personalpeft.learning.outcomes import (
    OUTSIDE_LAYER_USES,
    Placement,
    Reason,
    ReasonCode,
    SignalUse,
    reason,
)
from personalpeft.learning.plan import MIN_LESSONS
from personalpeft.learning.report import LearnReport, from_json, learn_reports, outcome_reports
from personalpeft.store.locks import learn_lease
from personalpeft.store.store import Store
from personalpeft.types import Layer, Signal, SignalRole, Stack, StackEntry, canonical_digest

_LAST_LEARNS = 3


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """The progress of a running learn, practice or erasure of a user.

    The stage is "Reading", "Learning", "Practicing" or "Judging". At first ``layer`` is None and
    ``stage`` empty. ``step`` of ``steps`` are done, or rounds of a practice; 0 of 0 at first.
    ``since`` is when it began.
    """

    layer: str | None
    stage: str
    step: int
    steps: int
    since: datetime

    @property
    def done(self) -> float:
        """The share of the steps that is done."""
        return self.step / self.steps if self.steps else 0.0


def training_status(store: Store, user: str) -> TrainingStatus | None:
    """Return what ``TrainingPipeline`` shows of a user, or None. See ``User.training_status``."""
    holder = store.leases.holder(learn_lease(user))
    if holder is None:
        return None
    layer, stage, step, steps = json.loads(holder.status) if holder.status else (None, "", 0, 0)
    return TrainingStatus(layer, stage, step, steps, datetime.fromisoformat(holder.since))


class TriggerKind(ShownCode):
    """Why a layer should learn."""

    LESSON = "lesson"
    """No learn has considered a lesson yet."""
    UNFINISHED = "unfinished"
    """A budget ended the last training."""
    STACK_BELOW_CHANGED = "stack_below_changed"
    RETRACTED = "lessons_retracted"


@dataclass(frozen=True, slots=True)
class TrainingTrigger:
    """One reason to learn. The same reason always has the same ``key``, and no other has it.

    ``at`` is when it arose, by the clock of that time; None where unknown.
    """

    key: str
    kind: TriggerKind
    layer: str
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Pending(
    RenamedAttributes,
    renamed={"news": "triggers", "learned": "last_learned_at", "seconds": "mean_build_seconds"},
):
    """The triggers of a user, and what helps to choose when to learn.

    ``too_few``: how many lessons each layer has that was never built and needs more for a first
    learn. ``last_learned_at``: when a learn last ended. ``mean_build_seconds``: how long the last
    builds took on average.
    """

    json_properties = ("lessons", "text")

    user: str
    triggers: tuple[TrainingTrigger, ...] = ()
    too_few: Mapping[str, int] = field(default_factory=dict)
    last_learned_at: datetime | None = None
    mean_build_seconds: float | None = None

    @property
    def lessons(self) -> int:
        """How many lessons, and layers to judge or build again, no learn has considered."""
        return sum(each.kind is not TriggerKind.UNFINISHED for each in self.triggers)

    @property
    def since(self) -> datetime | None:
        """When the oldest lesson of them was given."""
        lessons = (each for each in self.triggers if each.kind is not TriggerKind.UNFINISHED)
        return min((each.at for each in lessons if each.at is not None), default=None)

    @property
    def is_unfinished(self) -> bool:
        """Whether a learn ran out of its budget and can go on."""
        return any(each.kind is TriggerKind.UNFINISHED for each in self.triggers)

    @property
    def text(self) -> str:
        """What waits, in a few words."""
        lessons = sum(each.kind is TriggerKind.LESSON for each in self.triggers)
        if lessons:
            return f"{pluralize(lessons, 'lesson')} to learn from"
        if self.is_unfinished:
            return "An unfinished learn can continue"
        if self.triggers:
            removed = any(each.kind is TriggerKind.RETRACTED for each in self.triggers)
            return "Retracted feedback is to be removed" if removed else "A layer below changed"
        if few := sum(self.too_few.values()):
            return f"{pluralize(few, 'lesson')} so far; the first learn needs a few more"
        return "Nothing new to learn"

    def without(self, keys: Collection[str]) -> Pending:
        """Return it without the triggers of some keys."""
        return replace(self, triggers=tuple(each for each in self.triggers if each.key not in keys))


def pending(store: Store, user: str) -> Pending:
    """Return what triggers a learn of a user. Raises ``NotFound``."""
    assignments = load_assignments(store, user)
    layers = store.catalog.layers(user)
    built = {layer.name for layer in layers if layer.head is not None}
    reports = learn_reports(store.catalog.reports(user))
    triggers: list[TrainingTrigger] = []
    too_few: dict[str, int] = {}
    for layer in known_layers(store, user, assignments):
        lessons = lessons_for(assignments, layer)
        # As ``Plan.has_enough``, as far as that can be known without a model.
        is_enough = len(lessons) >= MIN_LESSONS or any(lesson.is_test for lesson in lessons)
        if layer in built or is_enough:
            triggers += _lesson_triggers(store, user, layer, assignments, reports)
        elif lessons:
            too_few[layer] = len(lessons)
    triggers += _stale_triggers(store, user, layers, assignments)
    learned = reports[-1].at if reports else None
    seconds = [each.seconds for each in reports if each.revision and each.steps][-_LAST_LEARNS:]
    average = sum(seconds) / len(seconds) if seconds else None
    return Pending(user, tuple(triggers), too_few, learned, average)


def _lesson_triggers(
    store: Store,
    user: str,
    layer: str,
    assignments: Sequence[Assignment],
    reports: Sequence[LearnReport],
) -> Iterator[TrainingTrigger]:
    """Yield a trigger for each lesson that no learn considered, and for unfinished training."""
    of_layer = [report for report in reports if report.layer == layer]
    # Reports with too few lessons do not count: a learn with enough must learn them all.
    considered = {
        signal for report in of_layer if report.revision for signal in _layer_signals(report)
    }
    # A learn that can use none of its new lessons records why. They wait for no further learn.
    considered |= {
        each.signal
        for report in of_layer
        for each in report.sources
        if each.use_code in (SignalUse.NO_CAPACITY, SignalUse.TOO_LONG)
    }
    trained = [report for report in of_layer if report.steps]
    # Later reports that trained nothing change nothing about it.
    unfinished = trained[-1] if trained and trained[-1].revision is None else None
    if unfinished:
        considered |= _layer_signals(unfinished)
    built = store.catalog.used_signals(user, layer)
    waiting = {each.signal.id for each in assignments if each.layer == layer} - built
    for each in assignments:
        if each.signal.id in waiting - considered:
            yield TrainingTrigger(each.signal.id, TriggerKind.LESSON, layer, each.signal.at)
    if unfinished and waiting:
        key = f"{layer} after step {unfinished.steps} at {unfinished.at.isoformat()}"
        yield TrainingTrigger(key, TriggerKind.UNFINISHED, layer, unfinished.at)


def _layer_signals(report: LearnReport) -> set[str]:
    return {each.signal for each in report.sources if each.use_code not in OUTSIDE_LAYER_USES}


def _stale_triggers(
    store: Store, user: str, layers: Sequence[Layer], assignments: tuple[Assignment, ...]
) -> Iterator[TrainingTrigger]:
    """Yield a trigger for each stale head that nothing was built in place of."""
    heads = [
        (layer, store.catalog.revision(user, layer.head))
        for layer in layers
        if layer.head is not None
    ]
    # Layers of two bases are no stack; a learn says so.
    base = heads[0][1].base if heads else ""
    entries = [StackEntry(layer.name, head.id, head.digest, layer.weight) for layer, head in heads]
    for layer, head in heads:
        state = LayerState(store, user, layer.name, Stack(base, tuple(entries)), assignments)
        if state.is_due:
            key = f"{head.id} on {state.below.digest[:12]}"
            kind = TriggerKind.STACK_BELOW_CHANGED
            if state.outdated:
                key += f" without {canonical_digest(sorted(state.outdated))[:12]}"
                kind = TriggerKind.RETRACTED
            yield TrainingTrigger(key, kind, layer.name)


@dataclass(frozen=True, slots=True)
class SignalStatus:
    """One signal: where it is placed and why, and its use so far.

    ``layer`` is set where a layer may learn from it. ``revision`` is the live one that first
    learned it, else the last that was trained on it. For a held-out signal it is the revision that
    held it out. For a successor of a held-out signal it is None. ``removed`` is the personal data
    that ``revision`` had replaced in its lessons.
    """

    json_properties = ("use", "why", "is_held_out", "pinned")

    signal: Signal
    place: Placement
    layer: str | None
    reason: Reason
    use_code: SignalUse
    revision: str | None = None
    removed: tuple[RemovedText, ...] = ()

    @property
    def use(self) -> str:
        """The use in words."""
        return self.use_code.text

    @property
    def why(self) -> str:
        """The reason in words."""
        return str(self.reason)

    @property
    def is_held_out(self) -> bool:
        """Whether it is held out to judge by, and never trained on."""
        return self.use_code is SignalUse.HELD_OUT

    @property
    def pinned(self) -> bool:
        """The old name of ``is_held_out``, for one release."""
        return self.is_held_out


def list_signal_status(store: Store, user: str, *, current: bool) -> tuple[SignalStatus, ...]:
    """Return the status of each signal, oldest first.

    Args:
        store: The open home.
        user: The user.
        current: Whether to leave out those that were replaced or retracted.

    Raises:
        NotFound: There is no such user.
    """
    assignments = load_assignments(store, user)
    builds = _Builds(store, user, assignments)
    status = {each.signal.id: _current_status(each, builds) for each in assignments}
    if current:
        return tuple(status.values())
    signals = store.ledger.signals(user, current=False)
    newer = {signal.supersedes: signal.id for signal in signals if signal.supersedes}
    return tuple(
        status.get(each.id) or _former_status(each, newer.get(each.id), builds) for each in signals
    )


class _Builds:
    """Which revisions were trained on a signal or hold it out, by layer and signal."""

    def __init__(self, store: Store, user: str, assignments: Sequence[Assignment]) -> None:
        self.live: dict[str, str] = {}
        self.tried: dict[tuple[str, str], str] = {}
        self.held_out: dict[tuple[str, str], str | None] = {}
        self.left_out: dict[tuple[str, str], SignalUse] = {}
        for revision in store.catalog.revisions(user):
            for signal, role in revision.signals.items():
                if role == SignalRole.HELD_OUT:
                    self.held_out.setdefault((revision.layer, signal), revision.id)
                else:
                    self.tried[revision.layer, signal] = revision.id
        for layer in store.catalog.layers(user):
            for signal in held_out_signals(store, user, layer.name, assignments):
                self.held_out.setdefault((layer.name, signal), None)
            head = store.catalog.revision(user, layer.head) if layer.head else None
            for revision in ancestors(store, head):
                trained = (s for s, role in revision.signals.items() if role == SignalRole.TRAINED)
                self.live |= dict.fromkeys(trained, revision.id)
        self.removed: dict[tuple[str | None, str], tuple[RemovedText, ...]] = {}
        reports = list(map(from_json, outcome_reports(store.catalog.reports(user))))
        for report in reports:
            for signal in {each.signal for each in report.removed}:
                of_signal = tuple(each for each in report.removed if each.signal == signal)
                self.removed[report.revision, signal] = of_signal
        # The last report of a layer decides.
        for report in {report.layer: report for report in reports if report.sources}.values():
            for each in report.sources:
                if each.use_code in (SignalUse.NO_CAPACITY, SignalUse.TOO_LONG):
                    self.left_out[report.layer, each.signal] = each.use_code


def _current_status(each: Assignment, builds: _Builds) -> SignalStatus:
    use, revision = _use_of(each, builds)
    removed = builds.removed.get((revision, each.signal.id), ())
    return SignalStatus(each.signal, each.place, each.layer, each.reason, use, revision, removed)


def _use_of(assignment: Assignment, builds: _Builds) -> tuple[SignalUse, str | None]:
    signal, layer = assignment.signal.id, assignment.layer
    if layer is None and assignment.place in (Placement.RULE, Placement.MEMORY):
        return SignalUse.IN_PROMPT, None
    if layer is None:
        return SignalUse.UNUSED, builds.live.get(signal)
    if (layer, signal) in builds.held_out:
        return SignalUse.HELD_OUT, builds.held_out[layer, signal]
    if signal in builds.live:
        return SignalUse.LEARNED, builds.live[signal]
    if (layer, signal) in builds.left_out:
        return builds.left_out[layer, signal], None
    if (layer, signal) in builds.tried:
        return SignalUse.LEARNED_NOT_LIVE, builds.tried[layer, signal]
    return SignalUse.PENDING, None


def _former_status(signal: Signal, newer: str | None, builds: _Builds) -> SignalStatus:
    revision = builds.live.get(signal.id)
    why, use = Reason(ReasonCode.RETRACTED), SignalUse.RETRACTED
    if newer:
        why, use = reason(ReasonCode.REPLACED, signal=newer), SignalUse.SUPERSEDED
    return SignalStatus(signal, Placement.HISTORY, None, why, use, revision)
