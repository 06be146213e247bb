"""Builds the batches of a training run from the lessons of a plan. Pure.

Invariant: plan, tokenizer and the configuration's seed decide every batch. The order in which the
one random generator is used is part of that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Generic, TypeVar

from personalpeft.backends.base import Backend, Continuation, Loss
from personalpeft.learning.data.assignment import Lesson
from personalpeft.learning.data.facts import PARAPHRASE_TEMPLATES, paraphrase
from personalpeft.learning.data.style import NO_TEMPLATE, infer_template
from personalpeft.learning.evaluate.probes import load_general_prompts
from personalpeft.learning.plan import Plan
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.learning.train.losses import (
    MAX_CONTRAST_TOKENS,
    KTOLoss,
    SFTLoss,
    build_lesson_losses,
    encode_continuation,
    make_kl_regularizer,
)
from personalpeft.types import Message, SignalKind

T = TypeVar("T")


def build_batches(
    plan: Plan, backend: Backend, completions: Sequence[tuple[Sequence[Message], str]]
) -> tuple[tuple[Loss, ...], ...]:
    """Return the losses of each step. ``completions``: what the stack below replies generally."""
    config = plan.recipe
    # Answers of a memory use the template of the stack below, so it has none of its own.
    is_memory = plan.layer == "memory"
    shown = [*plan.new_examples, *plan.replay]
    patterns = [lesson.prompt_response.pattern for lesson in shown]
    template = NO_TEMPLATE if is_memory else infer_template(patterns)
    lesson_template = plan.template if is_memory else template
    regularizers = [
        make_kl_regularizer(
            backend,
            messages,
            reply,
            template,
            config.kl_weight / max(1, config.kl_prompts),
            below=plan.template,
            from_the_first=is_memory,
        )
        for messages, reply in completions
    ]
    liked = [lesson for lesson in shown if lesson.kind is SignalKind.RATING]
    rng = random.Random(config.seed)
    new_queue, replay_queue = (
        _EpochSampler(_add_paraphrases(lessons, config.num_paraphrases, rng), rng)
        for lessons in (plan.new_examples or plan.replay, plan.replay)
    )
    regularizer_queue = _EpochSampler([each for each in regularizers if each is not None], rng)
    unanswerable_queue = _EpochSampler(_build_refusals(plan, backend), rng)
    # Without disliked replies none of the liked may be drawn: each draw changes later batches.
    liked_queue = _EpochSampler(liked if plan.undesirable_examples else [], rng)
    disliked_queue = _EpochSampler(plan.undesirable_examples, rng)
    replayed = 0
    if plan.new_examples and plan.replay:
        replayed = round(config.batch_size * config.replay_ratio)
    batches = []
    for _ in range(plan.steps):
        lessons = new_queue.take(config.batch_size - replayed) + replay_queue.take(replayed)
        kl_losses = regularizer_queue.take(config.kl_prompts)
        desirable = liked_queue.take(config.rated_replies)
        undesirable = disliked_queue.take(config.rated_replies)
        batches.append(
            (
                *build_lesson_losses(lessons, backend, config, lesson_template),
                *_build_kto_losses(desirable, undesirable, config, backend),
                *unanswerable_queue.take(config.unanswerable_prompts),
                *kl_losses,
            )
        )
    return tuple(batches)


class _EpochSampler(Generic[T]):
    """Gives items in epochs: each has every item once, in an order of its own."""

    def __init__(self, items: Sequence[T], rng: random.Random) -> None:
        self._items = items
        self._rng = rng
        self._left: list[T] = []

    def take(self, count: int) -> list[T]:
        """Return the next ``count`` items, none if there are no items."""
        taken: list[T] = []
        while len(taken) < count and self._items:
            if not self._left:
                self._left = list(self._items)
                self._rng.shuffle(self._left)
                self._left.reverse()
            taken.append(self._left.pop())
        return taken


def _add_paraphrases(lessons: Sequence[Lesson], count: int, rng: random.Random) -> list[Lesson]:
    """Return the lessons, those of facts with more wordings of the question.

    A fact that is only ever asked in the same words is only known in these words (Allen-Zhu and
    Li 2023, "Physics of Language Models: Part 3.1", arXiv 2309.14316).
    """
    added = []
    for lesson in lessons:
        prompts: Sequence[tuple[Message, ...]] = [lesson.messages]
        if lesson.kind is SignalKind.FACT:
            templates = rng.sample(PARAPHRASE_TEMPLATES, min(count, len(PARAPHRASE_TEMPLATES)))
            prompts = paraphrase(lesson.messages, templates)
        added += [lesson.with_prompt(messages) for messages in prompts]
    return added


def _build_refusals(plan: Plan, backend: Backend) -> list[SFTLoss]:
    """Return losses that teach to say "I do not know" where no fact of the user has the answer."""
    general, config = load_general_prompts(), plan.recipe
    if not config.unanswerable_prompts:
        return []
    facts = "\n".join(
        " ".join([signal.payload["text"], *(signal.payload.get("questions") or ())])
        for signal in (assignment.signal for assignment in plan.assignments)
        if signal.kind is SignalKind.FACT
    )
    losses = []
    for prompt in general.unanswerable_prompts:
        if not prompt.is_answered_in(facts):
            answer = plan.template.apply(general.refusal_text, prompt.question)
            messages = [Message("user", prompt.question)]
            target = encode_continuation(backend, messages, answer, config.max_length)
            losses.append(SFTLoss(target, 1 / config.batch_size))
    return losses


def _build_kto_losses(
    liked: Sequence[Lesson],
    disliked: Sequence[Lesson],
    config: TrainingConfig,
    backend: Backend,
) -> list[KTOLoss]:
    """Return the loss of rated replies, none unless there are both liked and disliked ones."""
    if not liked or not disliked:
        return []
    rated = [*liked, *disliked]
    replies = [lesson.chosen or lesson.rejected or "" for lesson in rated]

    def encode(lesson: Lesson, reply: str) -> Continuation:
        return encode_continuation(backend, lesson.messages, reply, MAX_CONTRAST_TOKENS)

    matched = tuple(map(encode, rated, replies))
    return [
        KTOLoss(
            desirable=matched[: len(liked)],
            undesirable=matched[len(liked) :],
            mismatched=tuple(map(encode, rated, replies[1:] + replies[:1])),
            beta=config.beta,
            weight=sum(lesson.weight for lesson in rated) / len(rated),
        )
    ]
