"""Builds the batches of a training run from the lessons of a plan. Pure.

Invariant: plan, tokenizer and the configuration's seed decide every batch. The order in which the
one random generator is used is part of that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeAlias, TypeVar

from personalpeft.backends.base import Backend, Continuation, Loss
from personalpeft.learning.data.facts import paraphrase, question_templates
from personalpeft.learning.data.general_prompts import QuestionBank, QuestionForms
from personalpeft.learning.data.general_replies import GeneralReplies
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.plan import Plan
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.learning.train.losses import (
    ContextDistillationLoss,
    ContinuationEncoder,
    KLRegularizer,
    KTOLoss,
    SFTLoss,
    build_lesson_losses,
)
from personalpeft.memory.conflicts import normalize
from personalpeft.memory.items import Memory, fact_texts
from personalpeft.memory.types import Embedder
from personalpeft.types import Message, Signal, SignalKind

T = TypeVar("T")

# Lessons of one group that follow each other. More read less, and make a step less varied.
_GROUP_RUN = 4
# A general reply is held up to here. What follows depends on it, and takes time.
_KL_TOKENS = 12
Forms: TypeAlias = Mapping[tuple[str, str], QuestionForms]
"""By fact and question."""


def build_batches(
    plan: Plan, backend: Backend, replies: GeneralReplies, memory: Memory
) -> tuple[tuple[Loss, ...], ...]:
    """Return the losses of each step.

    Args:
        plan: What is to be built.
        backend: Gives the tokenizer and the chat template.
        replies: What the stack below replies to general prompts.
        memory: Finds other wordings of questions about facts, and what facts may answer.
    """
    config = plan.recipe
    forms = _find_forms(plan, memory.embedder)
    encode = ContinuationEncoder(backend, config.max_length)

    def encode_plain(prompt: str, reply: str) -> Continuation:
        return encode([Message("user", prompt)], reply)

    def regularize(prompt: str, reply: str) -> KLRegularizer:
        item = encode_plain(prompt, reply)
        held = Continuation(item.prompt, item.completion[:_KL_TOKENS])
        start = min(prompt in replies.free_start, len(held.completion) - 1)
        return KLRegularizer(held, start, config.kl_weight / max(1, config.kl_prompts))

    regularizers = [regularize(prompt, reply) for prompt, reply in replies.plain if reply]
    few_shot_weight = config.few_shot_weight / max(1, config.few_shot_replies)
    few_shot = [
        ContextDistillationLoss(
            encode_plain(messages[-1].content, reply), encode(messages, reply), few_shot_weight
        )
        for messages, reply in replies.few_shot
    ]
    rng = random.Random(config.seed)
    new_queue, replay_queue = (
        _EpochSampler(
            _add_paraphrases(
                lessons, forms, plan.general_prompts.templates, config.num_paraphrases, rng
            ),
            rng,
            lambda lesson: lesson.group,
        )
        for lessons in (plan.new_examples or plan.replay, plan.replay)
    )
    regularizer_queue = _EpochSampler(regularizers, rng)
    few_shot_queue = _EpochSampler(few_shot, rng)
    unanswerable_queue = _EpochSampler(_build_refusals(plan, encode, forms, memory, rng), rng)
    # Without disliked replies none of the liked may be drawn: each draw changes later batches.
    liked_queue = _EpochSampler(plan.desirable_examples if plan.undesirable_examples else (), rng)
    disliked_queue = _EpochSampler(plan.undesirable_examples, rng)
    replayed = 0
    if plan.new_examples and plan.replay:
        replayed = round(config.batch_size * config.replay_ratio)
    batches = []
    for _ in range(plan.steps):
        lessons = new_queue.take(config.batch_size - replayed) + replay_queue.take(replayed)
        kl_losses = regularizer_queue.take(config.kl_prompts)
        few_shot_losses = few_shot_queue.take(config.few_shot_replies)
        desirable = liked_queue.take(config.rated_replies)
        undesirable = disliked_queue.take(config.rated_replies)
        batches.append(
            (
                *build_lesson_losses(lessons, encode, config),
                *few_shot_losses,
                *_build_kto_losses(desirable, undesirable, config, encode),
                *unanswerable_queue.take(config.unanswerable_prompts),
                *kl_losses,
            )
        )
    return tuple(batches)


class _EpochSampler(Generic[T]):
    """Gives items in epochs: each has every item once, in an order of its own.

    Items of a group come a few at a time. A step then reads the shared beginning of their prompts
    once. ``group_of`` returns the group of an item, or None.
    """

    def __init__(
        self,
        items: Sequence[T],
        rng: random.Random,
        group_of: Callable[[T], str | None] = lambda item: None,
    ) -> None:
        self._items = items
        self._rng = rng
        self._group_of = group_of
        self._left: list[T] = []

    def take(self, count: int) -> list[T]:
        """Return the next ``count`` items, none if there are no items."""
        taken: list[T] = []
        while len(taken) < count and self._items:
            if not self._left:
                self._left = self._shuffled()
                self._left.reverse()
            taken.append(self._left.pop())
        return taken

    def _shuffled(self) -> list[T]:
        items = list(self._items)
        self._rng.shuffle(items)
        groups: dict[object, list[T]] = {}
        for number, item in enumerate(items):
            group = self._group_of(item)
            groups.setdefault(number if group is None else group, []).append(item)
        if len(groups) == len(items):
            return items
        runs = [
            group[first : first + _GROUP_RUN]
            for group in groups.values()
            for first in range(0, len(group), _GROUP_RUN)
        ]
        self._rng.shuffle(runs)
        return [item for run in runs for item in run]


def _find_forms(plan: Plan, embedder: Embedder) -> Forms:
    """Return the question forms of each question that a fact is learned from."""
    bank = QuestionBank(embedder, plan.general_prompts.languages)
    facts = _facts(plan)
    judging = {normalize(lesson.messages[-1].content) for lesson in plan.holdout}
    found = {}
    for lesson in (*plan.new_examples, *plan.replay):
        if lesson.kind is SignalKind.FACT:
            question = lesson.messages[-1].content
            forms = bank.find(facts[lesson.signal].payload["text"], question)
            # What judges a fact is not trained on.
            free = (each for each in forms.paraphrases if normalize(each) not in judging)
            found[lesson.signal, question] = replace(forms, paraphrases=tuple(free))
    return _drop_shared_forms(found, facts)


def _drop_shared_forms(forms: Forms, facts: Mapping[str, Signal]) -> Forms:
    """Return the forms without those that facts with different answers have in common.

    A question that a fact was stated with is a form of that fact.
    """
    answers: dict[str, set[str]] = {}
    for (fact, question), each in forms.items():
        answer = normalize(facts[fact].payload.get("answer") or fact)
        for form in (question, *each.paraphrases):
            answers.setdefault(normalize(form), set()).add(answer)
    return {
        key: replace(
            each, paraphrases=tuple(x for x in each.paraphrases if len(answers[normalize(x)]) < 2)
        )
        for key, each in forms.items()
    }


def _facts(plan: Plan) -> dict[str, Signal]:
    signals = (assignment.signal for assignment in plan.assignments)
    return {each.id: each for each in signals if each.kind is SignalKind.FACT}


def _add_paraphrases(
    lessons: Sequence[Lesson],
    forms: Forms,
    templates: Mapping[str, Sequence[str]],
    count: int,
    rng: random.Random,
) -> list[Lesson]:
    """Return the lessons, those of facts with ``count`` more wordings of the question.

    A fact learned in one wording is known only in that wording (Allen-Zhu and Li 2023, arXiv
    2309.14316). Forms of its relation come first, and templates around the question fill up.
    """
    added = []
    for lesson in lessons:
        added.append(lesson)
        if lesson.kind is SignalKind.FACT:
            *before, last = lesson.messages
            known = forms[lesson.signal, last.content].paraphrases
            texts = rng.sample(known, min(count, len(known)))
            around = question_templates(last.content, templates)
            around = rng.sample(around, min(count - len(texts), len(around)))
            added += [
                lesson.with_prompt(messages)
                for messages in (
                    *((*before, replace(last, content=text)) for text in texts),
                    *paraphrase(lesson.messages, around)[1:],
                )
            ]
    return added


def _build_refusals(
    plan: Plan, encode: ContinuationEncoder, forms: Forms, memory: Memory, rng: random.Random
) -> list[SFTLoss]:
    """Return losses that teach to say "I do not know" where no fact of the user has the answer.

    Some questions are general ones, for which memory finds no fact. The others ask the question of
    a learned fact about another person or thing.
    """
    general, config = plan.general_prompts, plan.recipe
    if not config.unanswerable_prompts:
        return []
    facts = list(_facts(plan).values())
    texts = "\n".join(" ".join(fact_texts(fact)) for fact in facts)
    near = {each.question: each for found in forms.values() for each in found.unanswerable}
    asked, others = (
        [prompt for prompt in prompts if not prompt.is_answered_in(texts)]
        for prompts in (general.unanswerable_prompts, near.values())
    )
    others = rng.sample(others, min(len(asked), len(others)))
    # A fact in other words ("our kitten") may answer a question about the topic ("my cat").
    may_answer = memory.finds_any(plan.user, facts, [prompt.question for prompt in asked])
    asked = [prompt for prompt, answers in zip(asked, may_answer, strict=True) if not answers]
    losses = []
    for prompt in (*asked, *others):
        target = encode([Message("user", prompt.question)], prompt.refusal)
        losses.append(SFTLoss(target, 1 / config.batch_size))
    return losses


def _build_kto_losses(
    liked: Sequence[Lesson],
    disliked: Sequence[Lesson],
    config: TrainingConfig,
    encode: ContinuationEncoder,
) -> list[KTOLoss]:
    """Return the loss of rated replies, none unless there are both liked and disliked ones."""
    if not liked or not disliked:
        return []
    rated = [*liked, *disliked]
    replies = [
        (lesson.chosen, lesson.ended)
        if lesson.chosen
        else (lesson.rejected or "", lesson.rejected_ended)
        for lesson in rated
    ]

    def encode_each(replies: Sequence[tuple[str, bool]]) -> tuple[Continuation, ...]:
        return tuple(
            encode(lesson.messages, reply, ended=ended)
            for lesson, (reply, ended) in zip(rated, replies, strict=True)
        )

    matched = encode_each(replies)
    return [
        KTOLoss(
            desirable=matched[: len(liked)],
            undesirable=matched[len(liked) :],
            mismatched=encode_each(replies[1:] + replies[:1]),
            beta=config.beta,
            weight=sum(lesson.weight for lesson in rated) / len(rated),
        )
    ]
