"""Which layers a learn goes through, and what becomes of one that stands on something old: built over a stack that has
changed since, by a learn, a rollback or a weight.

Such a layer is judged again in the whole stack as it is now: what it was asked when it was built is asked again, of a
memory in the manner in which the stack below speaks now. An answer holds where its words are as likely as when the layer was
built, and where it is still in the manner that lies below the layer. Where no more got worse than the gate's margin allows it stays, is
not asked again for the same stack below, and what is learned next is built on it. Else it is built anew from nothing, and
that build goes through the gate as any does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from personalpeft.errors import AdapterError, Damaged, NotFound
from personalpeft.learning.data.assignment import Lesson, Assignment
from personalpeft.learning.evaluate.evaluation import (
    StackSelector,
    EffectiveStack,
    effective_stack,
    answer_logprobs,
    answer_logprobs_by_part,
    constant_stack,
)
from personalpeft.learning.gate.gate import EvalItem, Margins
from personalpeft.learning.plan import Plan, head_of, rank_of, stack_below, stands_on
from personalpeft.learning.staleness import trained_on
from personalpeft.services import Services
from personalpeft.store.base import Store
from personalpeft.types import Revision, Stack, StackEntry, Verdict

_MOST_ASKED = 8


@dataclass(frozen=True, slots=True)
class Standing:
    """How a layer stands on what has changed below it: ``held`` of ``asked`` answers are as good as when it was built."""

    asked: int
    held: int
    holds: bool

    def __str__(self) -> str:
        if not self.asked:
            return "what lies below has changed"
        return f"what lies below has changed; {self.held} of {self.asked} answers still hold"


def layers_of(store: Store, user: str, routings: Sequence[Assignment]) -> tuple[str, ...]:
    """All layers that have lessons or were built, lowest first; "style" where there is none."""
    known = [layer.name for layer in store.catalog.layers(user)]
    taught = [routing.layer for routing in routings if routing.layer is not None]
    names = list(dict.fromkeys((*known, *taught))) or ["style"]
    return tuple(sorted(names, key=rank_of))


def on_something_old(store: Store, user: str, live: Stack, layer: str) -> Revision | None:
    """The head of a layer that was built on another stack than now lies below, and was not found to hold on this one."""
    head = head_of(store, user, layer, live)
    stands = head is None or stands_on(head, stack_below(store, user, live, layer))
    return None if stands else head


def was_tried(store: Store, plan: Plan) -> bool:
    """Whether this very build was made already and is not to go live: building it again would say nothing new."""
    built = store.catalog.revisions(plan.user, layer=plan.layer)
    return any(
        each.inputs == plan.inputs and each.verdict is not Verdict.PROMOTED for each in built
    )


def judge_again(services: Services, margins: Margins, plan: Plan, head: Revision) -> Standing:
    """Asks a layer that stands on something old again; ``plan`` is what would be built in its place."""
    engine = services.engine
    # By the signal alone: a fact that is asked for in other words is the same fact.
    known = {
        key.partition("/")[0]: said.get("after")
        for key, said in head.scores.get("pins", {}).items()
    }
    pinned = [lesson for lesson in plan.holdout if known.get(lesson.signal) is not None]
    trained = trained_on(services.store, head)
    lessons = pinned or [lesson for lesson in plan.new_examples if lesson.signal in trained][-_MOST_ASKED:]
    # At its full weight: that somebody has it count less since is no fault of what lies below.
    live = replace(
        plan.live, entries=tuple(_in_full(entry, plan.layer) for entry in plan.live.entries)
    )
    asked = [lesson.messages[-1].content for lesson in lessons]
    answers = effective_stack(services.router, plan.user, plan.layer, live, asked, {})
    if not pinned:
        try:
            built = answer_logprobs(engine, lessons, _as_built(answers, head))
        except (AdapterError, Damaged, NotFound):
            # What it stood on is gone, so nothing can be said of it.
            return Standing(0, 0, holds=False)
        known = {lesson.signal: built[lesson.key] for lesson in lessons}
    now, below, base = (
        answer_logprobs_by_part(engine, lessons, by)
        for by in (answers.for_layer, constant_stack(plan.below), constant_stack(Stack(plan.live.base)))
    )
    lost = 0
    for lesson in lessons:
        key = lesson.key
        words = EvalItem(key, known[lesson.signal] or 0.0, now[key].words, base[key].words)
        manner = EvalItem(key, below[key].template or 0.0, now[key].template or 0.0, base[key].template)
        # That somebody answers in another manner is seen at a glance; a shade of it is no reason to build all anew.
        lost += words.regressed_beyond_margin or manner.forgotten
    return Standing(
        len(lessons),
        len(lessons) - lost,
        holds=bool(lessons) and lost <= margins.retention * len(lessons),
    )


def _in_full(entry: StackEntry, layer: str) -> StackEntry:
    return replace(entry, weight=1.0) if entry.layer == layer else entry


def _as_built(answers: EffectiveStack, head: Revision) -> StackSelector:
    """What answers, with what lay below this layer when it was built."""

    def by(lesson: Lesson) -> Stack:
        part = answers.for_layer(lesson)
        above = (entry for entry in part.entries if rank_of(entry.layer) >= rank_of(head.layer))
        return replace(part, entries=(*head.below, *above))

    return by
