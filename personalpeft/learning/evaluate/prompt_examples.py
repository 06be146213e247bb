"""Add examples to the prompts to which an evaluation generates replies, as users would have them.

``chat.examples`` selects those of users. Here only lessons that were trained on are examples, since
no lesson may judge a candidate that answers after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from personalpeft.chat.examples import (
    MAX_LESSONS,
    MIN_LESSONS,
    begins_conversation,
    is_short,
    nearest_examples,
)
from personalpeft.learning.data.assignment import load_style_examples
from personalpeft.learning.data.general_prompts import PROBE_SAMPLING
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.evaluate.eval_job import EvalJob
from personalpeft.learning.layers import trained_on
from personalpeft.learning.plan import Plan
from personalpeft.memory.types import Vectors
from personalpeft.services import Services
from personalpeft.types import IS_SERVED, PROMPT_EXAMPLES, Message, PromptExample, split_system


def add_prompt_examples(services: Services, job: EvalJob, plan: Plan) -> EvalJob:
    """Return the evaluation of a style with the examples of the live revision and the candidate.

    Args:
        services: The wired parts.
        job: The evaluation, without examples.
        plan: What was built.
    """
    if plan.layer != "style":
        return job
    eval_set = job.eval_set
    held_out = (*eval_set.undecided, *eval_set.retention, *eval_set.rated.held_out)

    def find(examples: Sequence[PromptExample]) -> dict[str, tuple[Message, ...]]:
        return _examples_for_lessons(services, examples, held_out, eval_set.max_length)

    live = find(_live_examples(services, plan, {each.signal for each in held_out}))
    job = replace(job, live=replace(job.live, examples=live))
    lessons = (*plan.replay, *plan.new_examples)
    known = {each.signal: each for lesson in lessons if (each := lesson.example) is not None}
    examples = list(known.values())[-MAX_LESSONS:]
    if len(examples) < MIN_LESSONS:
        return job
    return replace(
        job,
        candidate=replace(job.candidate, examples=find(examples)),
        prompt_examples=_examples_for_probes(services, plan, examples),
    )


def _live_examples(
    services: Services, plan: Plan, held_out: Collection[str]
) -> list[PromptExample]:
    """Return the lessons that the live style was trained on, if its users get examples."""
    style = plan.live.style
    if style is None:
        return []
    head = services.store.catalog.revision(plan.user, style.revision)
    if not head.scores.get(PROMPT_EXAMPLES, {}).get(IS_SERVED):
        return []
    shown = trained_on(services.store, head) - set(held_out)
    known = load_style_examples(services.store, plan.user)
    return [each for each in known if each.signal in shown][-MAX_LESSONS:]


def _examples_for_probes(
    services: Services, plan: Plan, examples: Sequence[PromptExample]
) -> dict[str, tuple[Message, ...]]:
    """Return the examples that precede each probe which is like the lessons.

    As when users are served, long lessons are none.
    """
    backend = services.learning_engine.backend
    probes = [probe.question for probe in plan.general_prompts.probes]
    vectors = services.memory.embedder.embed([each.request for each in examples])
    found = {}
    for probe, row in zip(probes, services.router.embed_general(probes), strict=True):
        turns = _turns(examples, vectors, row)
        length = len(backend.render((*turns, Message("user", probe)))) + PROBE_SAMPLING.max_tokens
        if is_short(turns, backend) and length <= backend.max_length:
            found[probe] = turns
    return _without_empty(found)


def _examples_for_lessons(
    services: Services,
    examples: Sequence[PromptExample],
    held_out: Sequence[Lesson],
    max_length: int,
) -> dict[str, tuple[Message, ...]]:
    """Return, by key, the examples that precede each held-out lesson when a user asks it.

    As when users are served, later turns of a conversation and requests with tools have none, and
    the lessons of another system text and long lessons are none. ``max_length``: most tokens of a
    reply.
    """
    if len(examples) < MIN_LESSONS or not held_out:
        return {}
    backend = services.learning_engine.backend
    requests = [lesson.messages[-1].content for lesson in held_out]
    vectors = services.memory.embedder.embed([*(each.request for each in examples), *requests])
    found = {}
    for lesson, request in zip(held_out, vectors[len(examples) :], strict=True):
        system, _ = split_system(lesson.messages)
        own = [number for number, each in enumerate(examples) if each.system == system]
        if not begins_conversation(lesson.messages) or len(own) < MIN_LESSONS:
            continue
        turns = _turns([examples[number] for number in own], vectors[own], request)
        *before, last = lesson.messages
        length = len(backend.render((*before, *turns, last))) + max_length
        if is_short(turns, backend) and length <= backend.max_length:
            found[lesson.key] = turns
    return _without_empty(found)


def _turns(
    examples: Sequence[PromptExample], vectors: Vectors, request: Vectors
) -> tuple[Message, ...]:
    nearest = nearest_examples(examples, vectors, request)
    return tuple(chain.from_iterable(each.turns for each in nearest))


def _without_empty(found: Mapping[str, tuple[Message, ...]]) -> dict[str, tuple[Message, ...]]:
    return {key: turns for key, turns in found.items() if turns}
