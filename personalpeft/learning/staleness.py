"""What revisions were trained on, what they lie on, and whether they are still valid.

Retraction: signals that were retracted are a reason to learn until they are answered: by a build
without them in the head's place, or by the revision below all that the layer learned. An answer
holds until the head is learned again, and a refused one while nothing else would be built. A user
who rolls back to the head after the answer decides.

Revalidation: a learn, a rollback or a weight changes the stack below a layer. Then the layer's
held-out lessons are scored again in the whole stack. A lesson still holds where its words are as
likely as when the layer was built, and where it still follows the response template of the stack
below. Where no more fail than the gate's margin allows, the layer stays and is not judged again for
the same stack. Else it is built again from nothing, and that build passes the gate like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from personalpeft.errors import AdapterError, Damaged, NotFound
from personalpeft.learning.data.assignment import (
    Assignment,
    Lesson,
    lessons_for,
    undesirable_lessons_for,
)
from personalpeft.learning.evaluate.evaluation import (
    EffectiveStack,
    answer_logprobs,
    answer_logprobs_by_part,
    constant_stack,
    effective_stack,
)
from personalpeft.learning.gate.gate import EvalItem, Margins
from personalpeft.learning.layers import is_valid_on, layer_order, live_revision, stack_below
from personalpeft.learning.outcomes import TRAINED_USES, MoveCause, Reason, ReasonCode, reason
from personalpeft.learning.report import learn_reports
from personalpeft.memory.conflicts import normalize, normalized_questions
from personalpeft.services import Services
from personalpeft.store.store import Store
from personalpeft.types import Revision, Signal, SignalKind, Stack

_RATINGS = (SignalKind.RATING, SignalKind.REWARD)


_MAX_LESSONS = 8


def ancestors(store: Store, revision: Revision | None) -> Iterator[Revision]:
    """Yield a revision and those that it was built on, newest first."""
    while revision is not None:
        yield revision
        parent = revision.parent
        revision = store.catalog.revision(revision.user, parent) if parent else None


def trained_on(store: Store, revision: Revision | None) -> set[str]:
    """Return all signals that a revision and its ancestors were trained on."""
    return {
        signal
        for each in ancestors(store, revision)
        for signal, role in each.signals.items()
        if role == "train"
    }


def has_practice_since(store: Store, revision: Revision, root: Revision | None) -> bool:
    """Return whether a revision or an ancestor above ``root`` was practised.

    No build from lessons brings practice back.
    """
    for each in ancestors(store, revision):
        if root is not None and each.id == root.id:
            return False
        if "practice" in each.recipe:
            return True
    return False


def root_revision(store: Store, head: Revision) -> Revision | None:
    """Return the oldest ancestor where it has no signals: it was imported, or practised.

    No build from lessons brings it back.
    """
    *_, root = ancestors(store, head)
    return None if root.signals else root


def restated(
    store: Store, user: str, known: Collection[str], assignments: Sequence[Assignment]
) -> set[str]:
    """Return the ``known`` signals that are no longer current and need not be unlearned.

    These are facts of which every question has another answer by now, since to learn that is to
    unlearn the old one, and signals that were given once more and are lessons in the same words.
    """
    answered = {
        each.signal.id: set(normalized_questions(each.signal))
        for each in assignments
        if each.signal.kind is SignalKind.FACT and each.extra_examples
    }
    lessons = {
        _content(each.signal)
        for each in assignments
        if each.lesson is not None or each.extra_examples
    }
    current = {each.signal.id for each in assignments}
    old = _load_signals(store, user, set(known) - current)
    found = {signal.id for signal in old if _content(signal) in lessons}
    for each in assignments:
        newer = each.superseded_by if each.superseded_by in answered else each.signal.id
        older = each.signal if newer != each.signal.id else None
        while newer in answered:
            if older is not None and answered[newer].issuperset(normalized_questions(older)):
                found.add(older.id)
            before = (older or each.signal).supersedes
            if before is None:
                break
            older = store.ledger.signal(user, before)
    return found


def retracted_signals(
    store: Store, user: str, head: Revision, assignments: Sequence[Assignment]
) -> frozenset[str]:
    """Return what a head was trained on that was retracted or changed, and not restated.

    That includes a like that gave way to a dislike, and a fact whose questions are no longer
    known. Lessons that later ones contradict came with those and go with them.
    """
    known = trained_on(store, head)
    current = {each.signal.id: each for each in assignments}
    undone = {signal for signal in known & current.keys() if _is_undone(current[signal], current)}
    return frozenset(known - current.keys() - restated(store, user, known, assignments) | undone)


def replacement_for(
    store: Store, head: Revision, retracted: frozenset[str], assignments: Sequence[Assignment]
) -> Revision | None:
    """Return the last build in a head's place without the ``retracted`` signals.

    None where there was none since the head was learned, or where the gate refused it and another
    one would be built now.
    """
    built = {each.id: each for each in store.catalog.revisions(head.user, layer=head.layer)}
    lessons = {
        lesson.signal
        for select in (lessons_for, undesirable_lessons_for)
        for lesson in select(assignments, head.layer)
    }
    replacement = None
    # By the reports, which say in whose place: a build may equal a revision older than the head.
    for report in learn_reports(store.catalog.reports(head.user)):
        revision = built.get(report.revision or "")
        if revision is None or not report.steps:
            continue
        if revision.id == head.id and report.live:
            replacement = None
        elif report.before == head.id != revision.parent:
            trained = {each.signal for each in report.sources if each.use_code in TRAINED_USES}
            is_valid = report.live or revision.id == head.id or trained <= lessons
            if is_valid and not retracted & trained:
                replacement = revision
    return replacement


def was_cleared(store: Store, head: Revision) -> bool:
    """Return whether a head was taken down since nothing of it was left, and rolled back to."""
    cleared = False
    for move in store.catalog.head_moves(head.user, layer=head.layer):
        if move.before == head.id and move.cause == MoveCause.RETRACTED:
            cleared = True
        elif move.after == head.id and move.cause in (MoveCause.LEARN, MoveCause.ACCEPTED):
            cleared = False
    return cleared


@dataclass(frozen=True, slots=True)
class RevalidationResult:
    """How many of the lessons that were scored still hold, and whether that is enough."""

    asked: int
    valid: int
    is_valid: bool

    @property
    def reason(self) -> Reason:
        """The result as a reason to keep the layer, or to build it again."""
        if not self.asked:
            return Reason(ReasonCode.STACK_BELOW_CHANGED)
        return reason(ReasonCode.STACK_BELOW_CHECKED, valid=self.valid, asked=self.asked)


def known_layers(store: Store, user: str, assignments: Sequence[Assignment]) -> tuple[str, ...]:
    """Return all layers that have lessons or were built, lowest first; "style" if there is none."""
    built = [layer.name for layer in store.catalog.layers(user)]
    taught = [each.layer for each in assignments if each.layer is not None]
    names = list(dict.fromkeys((*built, *taught))) or ["style"]
    return tuple(sorted(names, key=layer_order))


def stale_head(store: Store, user: str, live: Stack, layer: str) -> Revision | None:
    """Return a layer's head where it is not valid on the stack that is below it now."""
    head = live_revision(store, user, layer, live)
    if head is None or is_valid_on(head, stack_below(store, user, live, layer)):
        return None
    return head


def revalidate(
    services: Services,
    margins: Margins,
    head: Revision,
    live: Stack,
    holdout: Sequence[Lesson],
    examples: Sequence[Lesson],
) -> RevalidationResult:
    """Score the held-out lessons of a stale head again, else the newest ``examples``."""
    engine = services.engine
    # By the signal alone: a fact that is paraphrased otherwise is the same fact.
    known: dict[str, float | None] = {
        key.partition("/")[0]: scores.get("after")
        for key, scores in head.scores.get("pins", {}).items()
    }
    held_out = [each for each in holdout if known.get(each.signal) is not None]
    trained = trained_on(services.store, head)
    of_head = [lesson for lesson in examples if lesson.signal in trained]
    lessons: Sequence[Lesson] = held_out or of_head[-_MAX_LESSONS:]
    # At its full weight: that the user lowered it says nothing about the stack below.
    entries = (
        replace(entry, weight=1.0) if entry.layer == head.layer else entry for entry in live.entries
    )
    full = replace(live, entries=tuple(entries))
    prompts = [lesson.messages[-1].content for lesson in lessons]
    stack = effective_stack(services.router, head.user, head.layer, full, prompts, {})
    if not held_out:
        try:
            built = answer_logprobs(engine, lessons, lambda each: _as_built(stack, head, each))
        except (AdapterError, Damaged, NotFound):
            # The stack that it was built on is gone, so nothing can be compared.
            return RevalidationResult(0, 0, is_valid=False)
        known = {lesson.signal: built[lesson.key] for lesson in lessons}
    now, below, base = (
        answer_logprobs_by_part(engine, lessons, select)
        for select in (
            stack.for_layer,
            constant_stack(stack_below(services.store, head.user, live, head.layer)),
            constant_stack(Stack(live.base)),
        )
    )
    lost = 0
    for lesson in lessons:
        key = lesson.key
        words = EvalItem(key, known[lesson.signal] or 0.0, now[key].words, base[key].words)
        template = EvalItem(
            key, below[key].template or 0.0, now[key].template or 0.0, base[key].template
        )
        # A small change of the template is no reason to build again; a lost one is.
        lost += words.regressed_beyond_margin or template.forgotten
    is_valid = bool(lessons) and lost <= margins.max_regressed * len(lessons)
    return RevalidationResult(len(lessons), len(lessons) - lost, is_valid)


def _load_signals(store: Store, user: str, ids: Collection[str]) -> Iterator[Signal]:
    for signal in ids:
        try:
            yield store.ledger.signal(user, signal)
        except NotFound:
            # Erased, so nothing says that it was restated.
            continue


def _content(signal: Signal) -> tuple[object, ...]:
    """Return what a signal teaches: signals of the same content are one lesson."""
    payload = signal.payload
    match signal.kind:
        case SignalKind.RATING | SignalKind.REWARD:
            return "rating", signal.turn, payload["value"] > 0
        case SignalKind.EDIT | SignalKind.PREFERENCE:
            return "answer", signal.turn, payload["text"]
        case SignalKind.FACT:
            questions = frozenset(normalized_questions(signal))
            return "fact", questions, normalize(payload.get("answer") or ""), payload["text"]
    return str(signal.kind), *sorted((key, str(value)) for key, value in payload.items())


def _is_undone(assignment: Assignment, current: Mapping[str, Assignment]) -> bool:
    """Return whether a former lesson has no later one in its place that causes a build."""
    if assignment.superseded_by is None:
        return assignment.signal.kind is SignalKind.FACT and not assignment.extra_examples
    while assignment.superseded_by is not None:
        assignment = current[assignment.superseded_by]
    # A dislike is no lesson where there are too few.
    is_rating = assignment.signal.kind in _RATINGS and assignment.lesson is None
    return is_rating and assignment.signal.payload["value"] < 0


def _as_built(stack: EffectiveStack, head: Revision, lesson: Lesson) -> Stack:
    """Return the stack for a lesson, with what was below the head when it was built."""
    part = stack.for_layer(lesson)
    order = layer_order(head.layer)
    above = (entry for entry in part.entries if layer_order(entry.layer) >= order)
    return replace(part, entries=(*head.below, *above))
