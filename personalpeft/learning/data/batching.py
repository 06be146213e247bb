"""Make the training data of a plan: the losses of each step.

Invariant: plan, replies, tokenizer and the configuration's seed decide every batch. The order in
which the one random generator is used is part of that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeAlias, TypeVar

from personalpeft.backends.base import Backend, Continuation, Loss
from personalpeft.learning.data.general_replies import GeneralReplies
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.data.question_bank import QuestionBank, QuestionForms, fill_templates
from personalpeft.learning.plan import Plan
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.learning.train.losses import (
    ContextDistillationLoss,
    DPOLoss,
    KLRegularizer,
    KTOLoss,
    SFTLoss,
    encode_continuation,
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

Encode: TypeAlias = Callable[[Sequence[Message], str, bool], Continuation]
"""Returns an answer after its messages as tokens. The last argument is whether it ended."""

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
    signals = (assignment.signal for assignment in plan.assignments)
    facts = {each.id: each for each in signals if each.kind is SignalKind.FACT}
    forms = _find_forms(plan, facts, memory.embedder)
    # Steps repeat lessons. By identity, since equal messages may offer different tools. The value
    # keeps them alive.
    known: dict[tuple[int, str, bool], tuple[Sequence[Message], Continuation]] = {}

    def encode(messages: Sequence[Message], answer: str, ended: bool = True) -> Continuation:
        key = id(messages), answer, ended
        if key not in known:
            length = config.max_length
            made = encode_continuation(backend, messages, answer, length, ended=ended)
            known[key] = messages, made
        return known[key][1]

    def regularize(prompt: str, reply: str) -> KLRegularizer:
        item = encode([Message("user", prompt)], reply)
        held = Continuation(item.prompt, item.completion[:_KL_TOKENS])
        start = min(prompt in replies.free_start, len(held.completion) - 1)
        return KLRegularizer(held, start, config.kl_weight / max(1, config.kl_prompts))

    regularized = [regularize(prompt, reply) for prompt, reply in replies.plain if reply]
    few_shot_weight = config.few_shot_weight / max(1, config.few_shot_replies)
    distilled = [
        ContextDistillationLoss(
            encode(messages[-1:], reply), encode(messages, reply), few_shot_weight
        )
        for messages, reply in replies.few_shot
    ]
    rng = random.Random(config.seed)
    new, replay = (
        _in_epochs(_add_paraphrases(plan, lessons, forms, rng), rng, lambda lesson: lesson.group)
        for lessons in (plan.new_examples or plan.replay, plan.replay)
    )
    refusals = _in_epochs(_build_refusals(plan, facts, forms, encode, memory, rng), rng)
    regularizers, few_shot = _in_epochs(regularized, rng), _in_epochs(distilled, rng)
    # Without disliked replies none of the liked may be drawn: each draw changes later batches.
    liked = _in_epochs(plan.desirable_examples if plan.undesirable_examples else (), rng)
    disliked = _in_epochs(plan.undesirable_examples, rng)
    mixes = bool(plan.new_examples and plan.replay)
    replayed = round(config.batch_size * config.replay_ratio) if mixes else 0
    batches = []
    for _ in range(plan.steps):
        # All draw from one generator, so they keep this order.
        lessons = [*islice(new, config.batch_size - replayed), *islice(replay, replayed)]
        kl_losses = list(islice(regularizers, config.kl_prompts))
        few_shot_losses = list(islice(few_shot, config.few_shot_replies))
        desirable = list(islice(liked, config.rated_replies))
        undesirable = list(islice(disliked, config.rated_replies))
        batches.append(
            (
                *build_lesson_losses(lessons, encode, config),
                *few_shot_losses,
                *_build_kto_losses(desirable, undesirable, config, encode),
                *islice(refusals, config.unanswerable_prompts),
                *kl_losses,
            )
        )
    return tuple(batches)


def _in_epochs(
    items: Sequence[T],
    rng: random.Random,
    group_of: Callable[[T], str | None] = lambda item: None,
) -> Iterator[T]:
    """Yield items without end: each epoch has every item once, in an order of its own.

    Items of a group come a few at a time. A step then reads the shared beginning of their prompts
    once. ``group_of`` returns the group of an item, or None.
    """
    while items:
        epoch = list(items)
        rng.shuffle(epoch)
        groups: dict[object, list[T]] = {}
        for number, item in enumerate(epoch):
            group = group_of(item)
            groups.setdefault(number if group is None else group, []).append(item)
        if len(groups) < len(epoch):
            runs = [
                group[first : first + _GROUP_RUN]
                for group in groups.values()
                for first in range(0, len(group), _GROUP_RUN)
            ]
            rng.shuffle(runs)
            epoch = [item for run in runs for item in run]
        yield from epoch


def build_lesson_losses(
    lessons: Sequence[Lesson], encode: Encode, config: TrainingConfig
) -> Iterator[Loss]:
    """Yield the losses of one step's lessons: SFT, then context distillation, then DPO.

    Args:
        lessons: The lessons of the step.
        encode: Encodes their replies.
        config: The weights of the losses.
    """
    share = len(lessons)
    shown = [lesson for lesson in lessons if lesson.teacher_messages is None]
    for lesson in shown:
        target = encode(lesson.messages, lesson.chosen, lesson.ended)
        # Of a fact's few tokens only the first ones are news, and the mean dilutes them.
        weight = config.fact_weight if lesson.kind is SignalKind.FACT else 1.0
        yield SFTLoss(target, weight * lesson.weight / share)
    for lesson in lessons:
        if lesson.teacher_messages is not None:
            student, teacher = (
                encode(messages, lesson.chosen, lesson.ended)
                for messages in (lesson.messages, lesson.teacher_messages)
            )
            yield ContextDistillationLoss(student, teacher, lesson.weight / share)
    contrasted = [lesson for lesson in shown if lesson.rejected is not None]
    for lesson in contrasted[: config.preference_pairs]:
        chosen = encode(lesson.messages, lesson.chosen, lesson.ended)
        rejected = encode(lesson.messages, lesson.rejected or "", lesson.rejected_ended)
        yield DPOLoss(chosen, rejected, config.beta, lesson.weight / share)


def _find_forms(plan: Plan, facts: Mapping[str, Signal], embedder: Embedder) -> Forms:
    """Return the question forms of each question that a fact is learned from.

    What judges a fact is not trained on. Nor are forms that facts with different answers have in
    common. A question that a fact was stated with is a form of that fact.
    """
    bank = QuestionBank(embedder, plan.general_prompts.languages)
    found = {
        (each.signal, each.question): bank.find(facts[each.signal].payload["text"], each.question)
        for each in (*plan.new_examples, *plan.replay)
        if each.kind is SignalKind.FACT
    }
    judging = {normalize(lesson.question) for lesson in plan.holdout}
    answers: dict[str, set[str]] = {}
    for (fact, question), forms in found.items():
        answer = normalize(facts[fact].payload.get("answer") or fact)
        for form in (question, *forms.paraphrases):
            answers.setdefault(normalize(form), set()).add(answer)

    def may_train(form: str) -> bool:
        form = normalize(form)
        return form not in judging and len(answers[form]) < 2

    return {
        key: replace(forms, paraphrases=tuple(filter(may_train, forms.paraphrases)))
        for key, forms in found.items()
    }


def _add_paraphrases(
    plan: Plan, lessons: Sequence[Lesson], forms: Forms, rng: random.Random
) -> list[Lesson]:
    """Return the lessons, and those of facts in ``num_paraphrases`` more wordings of the question.

    A fact learned in one wording is known only in that wording (Allen-Zhu and Li 2023, arXiv
    2309.14316). Forms of its relation come first, and templates around the question fill up.
    """
    templates, count, added = plan.general_prompts.templates, plan.recipe.num_paraphrases, []
    for lesson in lessons:
        added.append(lesson)
        if lesson.kind is SignalKind.FACT:
            known = forms[lesson.signal, lesson.question].paraphrases
            texts = rng.sample(known, min(count, len(known)))
            around = fill_templates(lesson.question, templates)
            texts += rng.sample(around, min(count - len(texts), len(around)))
            added += map(lesson.with_question, texts)
    return added


def _build_refusals(
    plan: Plan,
    facts: Mapping[str, Signal],
    forms: Forms,
    encode: Encode,
    memory: Memory,
    rng: random.Random,
) -> list[SFTLoss]:
    """Return losses that teach to say "I do not know" where no fact of the user has the answer.

    Some questions are general ones, for which memory finds no fact. The others ask the question of
    a learned fact about another person or thing.
    """
    general, config = plan.general_prompts, plan.recipe
    if not config.unanswerable_prompts:
        return []
    texts = "\n".join(" ".join(fact_texts(fact)) for fact in facts.values())
    near = {each.question: each for found in forms.values() for each in found.unanswerable}
    asked, others = (
        [prompt for prompt in prompts if not prompt.is_answered_in(texts)]
        for prompts in (general.unanswerable_prompts, near.values())
    )
    others = rng.sample(others, min(len(asked), len(others)))
    # A fact in other words ("our kitten") may answer a question about the topic ("my cat").
    may_answer = memory.finds_any(
        plan.user, list(facts.values()), [prompt.question for prompt in asked]
    )
    asked = [prompt for prompt, answers in zip(asked, may_answer, strict=True) if not answers]
    return [
        SFTLoss(
            encode([Message("user", prompt.question)], prompt.refusal, True), 1 / config.batch_size
        )
        for prompt in (*asked, *others)
    ]


def _build_kto_losses(
    liked: Sequence[Lesson],
    disliked: Sequence[Lesson],
    config: TrainingConfig,
    encode: Encode,
) -> list[KTOLoss]:
    """Return the loss of rated replies, none unless there are both liked and disliked ones."""
    if not liked or not disliked:
        return []
    rated = [*liked, *disliked]
    # After the prompt of the next one, a reply says nothing of its own prompt.
    mismatched = zip(rated, [*rated[1:], *rated[:1]], strict=True)
    matched = tuple(encode(each.messages, *each.rated_reply) for each in rated)
    return [
        KTOLoss(
            desirable=matched[: len(liked)],
            undesirable=matched[len(liked) :],
            mismatched=tuple(encode(a.messages, *b.rated_reply) for a, b in mismatched),
            beta=config.beta,
            weight=sum(lesson.weight for lesson in rated) / len(rated),
        )
    ]
