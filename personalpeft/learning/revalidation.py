"""Judge a head again after the stack below its layer changed.

The layer's held-out lessons are scored in the whole stack. A lesson passes if its words are as
likely as when the layer was built. If no more fail than the gate's margin allows, the layer stays.
It is not judged again for the same stack. Otherwise it is built again from scratch, and that build
passes the gate like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from personalpeft.errors import AdapterError, Damaged, NotFound
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.evaluate.eval_job import (
    EffectiveStack,
    effective_stack,
)
from personalpeft.learning.evaluate.scoring import StackSelector, score_answers
from personalpeft.learning.gate.evidence import EvalItem
from personalpeft.learning.gate.gate import Margins
from personalpeft.learning.layers import layer_order, trained_on
from personalpeft.learning.outcomes import Reason, ReasonCode, reason
from personalpeft.learning.plan import Plan
from personalpeft.services import Services
from personalpeft.types import Revision, Stack

_MAX_LESSONS = 8


def revalidate(
    services: Services, margins: Margins, head: Revision, plan: Plan
) -> tuple[bool, Reason]:
    """Score the held-out lessons of a stale head again. Without any, score its newest lessons.

    Args:
        services: The wired parts.
        margins: The harm that the gate allows.
        head: The live revision.
        plan: The build that would replace it.

    Returns:
        Whether enough lessons still pass, and why the layer stays or is built again.
    """
    engine = services.learning_engine
    # By the signal alone: a fact that is paraphrased otherwise is the same fact.
    known: dict[str, float | None] = {
        key.partition("/")[0]: scores.get("after")
        for key, scores in head.scores.get("items", {}).items()
    }
    held_out = [each for each in plan.holdout if known.get(each.signal) is not None]
    trained = trained_on(services.store, head)
    of_head = [lesson for lesson in plan.new_examples if lesson.signal in trained]
    lessons: Sequence[Lesson] = held_out or of_head[-_MAX_LESSONS:]
    # At its full weight: that the user lowered it says nothing about the stack below.
    entries = (
        replace(entry, weight=1.0) if entry.layer == head.layer else entry
        for entry in plan.live.entries
    )
    full = replace(plan.live, entries=tuple(entries))
    prompts = [lesson.messages[-1].content for lesson in lessons]
    bare = Stack(plan.live.base)
    stack = effective_stack(services.router, head.user, head.layer, full, prompts, {})

    def logprobs(select: StackSelector) -> dict[str, float]:
        scores = score_answers(engine, lessons, select, plan.recipe.max_length)
        return {key: score.logp for key, score in scores.items()}

    if not held_out:
        try:
            built = logprobs(lambda each: _as_built(stack, head, each))
        except (AdapterError, Damaged, NotFound):
            # The stack that it was built on is gone, so nothing can be compared.
            return False, Reason(ReasonCode.STACK_BELOW_CHANGED)
        known = {lesson.signal: built[lesson.key] for lesson in lessons}
    now, base = logprobs(stack.for_layer), logprobs(lambda _: bare)
    items = (
        EvalItem(each.key, known[each.signal] or 0.0, now[each.key], base[each.key])
        for each in lessons
    )
    lost = sum(item.regressed_beyond_margin for item in items)
    if not lessons:
        return False, Reason(ReasonCode.STACK_BELOW_CHANGED)
    valid = len(lessons) - lost
    why = reason(ReasonCode.STACK_BELOW_CHECKED, valid=valid, asked=len(lessons))
    return lost <= margins.max_regressed * len(lessons), why


def _as_built(stack: EffectiveStack, head: Revision, lesson: Lesson) -> Stack:
    """Return the stack for a lesson, with what was below the head when it was built."""
    part = stack.for_layer(lesson)
    order = layer_order(head.layer)
    above = (entry for entry in part.entries if layer_order(entry.layer) >= order)
    return replace(part, entries=(*head.below, *above))
