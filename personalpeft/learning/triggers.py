"""What a learn would be based on, from the ledger alone: no model is loaded.

Invariant: what a report has considered, whatever its outcome, does not trigger again. So a caller
that learns on triggers learns once for each lesson, however often it looks and whatever its clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from personalpeft.learning.data.assignment import (
    Assignment,
    lessons_for,
    load_assignments,
    undesirable_lessons_for,
)
from personalpeft.learning.layers import stack_below
from personalpeft.learning.outcomes import (
    OUTSIDE_LAYER_USES,
)
from personalpeft.learning.plan import MIN_LESSONS
from personalpeft.learning.report import LearnReport, learn_reports
from personalpeft.learning.staleness import (
    known_layers,
    replacement_for,
    retracted_signals,
    stale_head,
    was_cleared,
)
from personalpeft.store.store import Store
from personalpeft.types import Layer, Stack, StackEntry, canonical_digest

_LAST_LEARNS = 3


class TriggerKind(StrEnum):
    """Why a layer should learn. The values are stored by daemons and shown."""

    LESSON = "lesson"
    """No learn has considered a lesson yet."""
    UNFINISHED = "begun"
    """A budget ended the last training."""
    STACK_BELOW_CHANGED = "below"
    RETRACTED = "taken back"


@dataclass(frozen=True, slots=True)
class TrainingTrigger:
    """One reason to learn. The same reason always has the same ``key``, and no other has it.

    ``at`` is since when it is there, by the clock of that time; None where unknown.
    """

    key: str
    kind: TriggerKind
    layer: str
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Pending:
    """The triggers of a user (``news``), and what helps to choose when to learn.

    ``too_few``: by layer that was never built, how many lessons it has of those that a first learn
    takes. ``learned``: when a learn last ended. ``seconds``: how long the last builds took on
    average.
    """

    user: str
    news: tuple[TrainingTrigger, ...]
    too_few: Mapping[str, int]
    learned: datetime | None
    seconds: float | None


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
        is_enough = len(lessons) >= MIN_LESSONS or any(lesson.is_probe for lesson in lessons)
        if layer in built or is_enough:
            triggers += _lesson_triggers(store, user, layer, assignments, reports)
        elif lessons:
            too_few[layer] = len(lessons)
    triggers += _stack_triggers(store, user, layers)
    triggers += _retraction_triggers(store, user, layers, assignments)
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
    # Not those that had too few lessons: the learn that has enough is to learn them all.
    considered = {
        signal for report in of_layer if report.revision for signal in _layer_signals(report)
    }
    trained = [report for report in of_layer if report.steps]
    # Later reports that trained nothing change nothing about it.
    unfinished = trained[-1] if trained and trained[-1].revision is None else None
    if unfinished:
        considered |= _layer_signals(unfinished)
    built = store.catalog.used_signals(user, layer)
    lessons = (*lessons_for(assignments, layer), *undesirable_lessons_for(assignments, layer))
    waiting = {lesson.signal for lesson in lessons} - built
    for each in assignments:
        if each.signal.id in waiting - considered:
            yield TrainingTrigger(each.signal.id, TriggerKind.LESSON, layer, each.signal.at)
    if unfinished and waiting:
        key = f"{layer} after step {unfinished.steps} at {unfinished.at.isoformat()}"
        yield TrainingTrigger(key, TriggerKind.UNFINISHED, layer, unfinished.at)


def _layer_signals(report: LearnReport) -> set[str]:
    return {each.signal for each in report.sources if each.use_code not in OUTSIDE_LAYER_USES}


def _stack_triggers(store: Store, user: str, layers: Sequence[Layer]) -> Iterator[TrainingTrigger]:
    live = [
        (layer, store.catalog.revision(user, layer.head))
        for layer in layers
        if layer.head is not None
    ]
    if not live:
        return
    # Layers of two bases are no stack; a learn says so.
    entries = [StackEntry(layer.name, head.id, head.digest, layer.weight) for layer, head in live]
    stack = Stack(live[0][1].base, tuple(entries))
    for layer, head in live:
        if stale_head(store, user, stack, layer.name) is not None:
            below = stack_below(store, user, stack, layer.name)
            key = f"{head.id} on {below.digest[:12]}"
            yield TrainingTrigger(key, TriggerKind.STACK_BELOW_CHANGED, layer.name)


def _retraction_triggers(
    store: Store, user: str, layers: Sequence[Layer], assignments: Sequence[Assignment]
) -> Iterator[TrainingTrigger]:
    for layer in layers:
        if layer.head is None:
            continue
        head = store.catalog.revision(user, layer.head)
        retracted = retracted_signals(store, user, head, assignments)
        if not retracted or was_cleared(store, head):
            continue
        if replacement_for(store, head, retracted, assignments) is None:
            key = f"{head.id} without {canonical_digest(sorted(retracted))[:12]}"
            yield TrainingTrigger(key, TriggerKind.RETRACTED, layer.name)
