"""From lessons to the terms of every step: what is read together and in which order. Pure, and decided by the recipe's
seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from personalpeft.backends.base import Backend, Continuation, Term
from personalpeft.learning.data.assignment import Lesson
from personalpeft.learning.data.facts import PARAPHRASE_TEMPLATES, paraphrase
from personalpeft.learning.data.response_template import NO_MANNER, manner_of
from personalpeft.learning.evaluate.probes import load_general_prompts
from personalpeft.learning.plan import Plan
from personalpeft.learning.train.config import Recipe
from personalpeft.learning.train.losses import (
    BEGINNING,
    OF_LESSONS,
    Batch,
    Supervised,
    Thumbs,
    continuation,
)
from personalpeft.learning.train.regularizer import anchor
from personalpeft.types import Message, SignalKind

T = TypeVar("T")


def schedule(
    plan: Plan, backend: Backend, generic: Sequence[tuple[Sequence[Message], str]]
) -> tuple[tuple[Term, ...], ...]:
    """The terms of each step. ``generic`` are questions that belong to nobody with what the stack below says to them.

    A batch takes its share of older lessons and of anchors, and goes through each list without repeating before the
    list is used up.
    """
    recipe = plan.recipe
    # What a memory says is in the manner of what lies below already; there is none of its own to learn.
    remembered = plan.layer == "memory"
    manner = (
        NO_MANNER
        if remembered
        else manner_of([lesson.prompt_response.pattern for lesson in (*plan.new_examples, *plan.replay)])
    )
    weight = recipe.anchor_weight / max(1, recipe.anchors)
    held = [
        anchor(
            backend, messages, reply, manner, weight, below=plan.template, from_the_first=remembered
        )
        for messages, reply in generic
    ]
    anchors = [each for each in held if each is not None]
    chance = random.Random(recipe.seed)
    fresh = _rounds(_put_in_other_ways(plan.new_examples or plan.replay, recipe.phrasings, chance), chance)
    older = _rounds(_put_in_other_ways(plan.replay, recipe.phrasings, chance), chance)
    keeping = _rounds(anchors, chance)
    not_told = _rounds(_not_told(plan, backend), chance)
    # Drawn only where they are needed: what is drawn decides every byte of what is built.
    good = [
        each
        for each in (*plan.new_examples, *plan.replay)
        if each.kind is SignalKind.RATING and plan.rejected_examples
    ]
    liked = _rounds(good, chance)
    disliked = _rounds(plan.rejected_examples, chance)
    batch = Batch(backend, recipe, plan.template if remembered else manner)
    replayed = round(recipe.batch * recipe.replay) if plan.new_examples and plan.replay else 0
    steps = []
    for _ in range(plan.steps):
        lessons = [next(fresh) for _ in range(recipe.batch - replayed)] + [
            next(older) for _ in range(replayed)
        ]
        kept = [next(keeping) for _ in range(recipe.anchors if anchors else 0)]
        thumbs = _thumbs(
            list(islice(liked, recipe.thumbs)),
            list(islice(disliked, recipe.thumbs)),
            recipe,
            backend,
        )
        unknown = islice(not_told, recipe.unknown)
        asked = [term for terms in OF_LESSONS for term in terms(lessons, batch)]
        steps.append((*asked, *thumbs, *unknown, *kept))
    return tuple(steps)


def _put_in_other_ways(
    lessons: Sequence[Lesson], phrasings: int, chance: random.Random
) -> list[Lesson]:
    """The lessons, those of facts by more than one phrasing of the question: what is only ever asked in the same words is
    only known in these words (Allen-Zhu & Li 2023, "Physics of Language Models: Part 3.1").
    """
    put = []
    for lesson in lessons:
        ways: Sequence[tuple[Message, ...]] = [lesson.messages]
        if lesson.kind is SignalKind.FACT:
            ways = paraphrase(lesson.messages, chance.sample(PARAPHRASE_TEMPLATES, min(phrasings, len(PARAPHRASE_TEMPLATES))))
        put += [lesson.with_prompt(messages) for messages in ways]
    return put


def _not_told(plan: Plan, backend: Backend) -> list[Supervised]:
    """That nobody has told what nobody has told, so that what was told of one thing is not said of another."""
    generic, recipe = load_general_prompts(), plan.recipe
    told = "\n".join(
        " ".join([routing.signal.payload["text"], *(routing.signal.payload.get("questions") or ())])
        for routing in plan.assignments
        if routing.signal.kind is SignalKind.FACT
    )
    asked = [each.question for each in generic.unanswerable_prompts if recipe.unknown and not each.is_answered_in(told)]

    def untold(question: str) -> Continuation:
        answer = plan.template.dress(generic.refusal_text, question)
        return continuation(backend, [Message("user", question)], answer, recipe.longest)

    return [Supervised(untold(question), 1 / recipe.batch) for question in asked]


def _thumbs(
    liked: Sequence[Lesson], disliked: Sequence[Lesson], recipe: Recipe, backend: Backend
) -> Iterator[Term]:
    """The term of replies that were only liked or not, where there are both."""
    if not liked or not disliked:
        return
    judged = [
        (lesson.messages, lesson.chosen or lesson.rejected or "") for lesson in (*liked, *disliked)
    ]
    others = judged[1:] + judged[:1]

    def beginning(messages: Sequence[Message], reply: str) -> Continuation:
        return continuation(backend, messages, reply, BEGINNING)

    said = [beginning(*each) for each in judged]
    weight = sum(lesson.weight for lesson in (*liked, *disliked)) / len(judged)
    yield Thumbs(
        liked=tuple(said[: len(liked)]),
        disliked=tuple(said[len(liked) :]),
        mismatched=tuple(
            beginning(messages, reply)
            for (messages, _), (_, reply) in zip(judged, others, strict=True)
        ),
        beta=recipe.beta,
        weight=weight,
    )


def _rounds(items: Sequence[T], chance: random.Random) -> Iterator[T]:
    """The items for ever, in rounds: each round has every item once, in an order of its own."""
    shuffle: Callable[[list[T]], None] = chance.shuffle
    while items:
        order = list(items)
        shuffle(order)
        yield from order
