"""Judge a layer again that was built on another stack below it than the live one.

A learn, a rollback or a weight changes the stack below. Then the layer's held-out lessons are
scored again in the whole stack. A lesson still holds where its words are as likely as when the
layer was built, and where it still follows the response template of the stack below. Where no more
fail than the gate's margin allows, the layer stays and is not judged again for the same stack. Else
it is built again from nothing, and that build passes the gate like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from personalpeft.errors import AdapterError, Damaged, NotFound
from personalpeft.learning.data.assignment import Assignment, Lesson
from personalpeft.learning.evaluate.evaluation import (
    EffectiveStack,
    answer_logprobs,
    answer_logprobs_by_part,
    constant_stack,
    effective_stack,
)
from personalpeft.learning.gate.gate import EvalItem, Margins
from personalpeft.learning.outcomes import Reason, ReasonCode, reason
from personalpeft.learning.plan import Plan, is_valid_on, layer_order, live_revision, stack_below
from personalpeft.learning.staleness import trained_on
from personalpeft.services import Services
from personalpeft.store.store import Store
from personalpeft.types import Revision, Stack, Verdict

_MAX_LESSONS = 8


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


def was_built(store: Store, plan: Plan) -> bool:
    """Return whether a build of the same inputs did not go live. It is not built twice."""
    revisions = store.catalog.revisions(plan.user, layer=plan.layer)
    return any(
        each.inputs == plan.inputs and each.verdict is not Verdict.PROMOTED for each in revisions
    )


def revalidate(
    services: Services, margins: Margins, plan: Plan, head: Revision
) -> RevalidationResult:
    """Score the held-out lessons of a stale head again. ``plan``: the build in its place."""
    engine = services.engine
    # By the signal alone: a fact that is paraphrased otherwise is the same fact.
    known: dict[str, float | None] = {
        key.partition("/")[0]: scores.get("after")
        for key, scores in head.scores.get("pins", {}).items()
    }
    held_out = [each for each in plan.holdout if known.get(each.signal) is not None]
    trained = trained_on(services.store, head)
    of_head = [lesson for lesson in plan.new_examples if lesson.signal in trained]
    lessons: Sequence[Lesson] = held_out or of_head[-_MAX_LESSONS:]
    # At its full weight: that the user lowered it says nothing about the stack below.
    entries = (
        replace(entry, weight=1.0) if entry.layer == plan.layer else entry
        for entry in plan.live.entries
    )
    live = replace(plan.live, entries=tuple(entries))
    prompts = [lesson.messages[-1].content for lesson in lessons]
    stack = effective_stack(services.router, plan.user, plan.layer, live, prompts, {})
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
            constant_stack(plan.below),
            constant_stack(Stack(plan.live.base)),
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


def _as_built(stack: EffectiveStack, head: Revision, lesson: Lesson) -> Stack:
    """Return the stack for a lesson, with what was below the head when it was built."""
    part = stack.for_layer(lesson)
    order = layer_order(head.layer)
    above = (entry for entry in part.entries if layer_order(entry.layer) >= order)
    return replace(part, entries=(*head.below, *above))
