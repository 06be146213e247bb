"""Compare two stacks on two bases by the same held-out lessons.

Bases have tokens of their own, so log-probs per token cannot be compared. The log-prob of a whole
text can: it is that of the same characters. It is divided by the bytes of the text, as bits per
byte are (Gao et al. 2020, arXiv 2101.00027, section 3.1). An end of turn counts as one byte. A long
text is cut at the same character for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from personalpeft.backends.base import Backend, Continuation
from personalpeft.engine.engine import Request
from personalpeft.errors import PersonalPeftError
from personalpeft.learning.data.training_examples import Lesson
from personalpeft.learning.evaluate.evaluation import (
    EXAMPLE_SAMPLING,
    MAX_EXAMPLES,
    EvalJob,
    EvalSet,
    ThrottledScorer,
    effective_stack,
    evaluate,
    make_eval_job,
)
from personalpeft.learning.evaluate.probes import load_general_prompts
from personalpeft.learning.gate.evidence import EvalItem, Evidence
from personalpeft.learning.options import not_cancelled
from personalpeft.learning.report import Example
from personalpeft.learning.train.config import MAX_LENGTH
from personalpeft.learning.train.loop import cancelled_error
from personalpeft.learning.train.losses import encode_continuation
from personalpeft.services import Services
from personalpeft.types import Stack


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two stacks: the wired parts of its base, the stack, and the base's tie margin."""

    services: Services
    stack: Stack
    tie_margin: float


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out lesson, as both sides read it: ``text`` is the wanted answer, perhaps cut."""

    layer: str
    lesson: Lesson
    text: str
    ended: bool

    @property
    def size(self) -> int:
        """The bytes of the text, and one for the end of the turn."""
        return len(self.text.encode()) + self.ended


@dataclass(frozen=True, slots=True)
class BaseComparison:
    """The same questions on both sides, in nats per byte; ``examples`` has generated answers."""

    questions: tuple[Question, ...]
    items: tuple[EvalItem, ...]
    examples: tuple[Example, ...]


def compare_sides(
    old: Side,
    new: Side,
    user: str,
    lessons: Mapping[str, Sequence[Lesson]],
    *,
    cancelled: Callable[[], bool],
) -> BaseComparison:
    """Ask both sides the same questions.

    Args:
        old: The live stack.
        new: The stack that may take its place.
        user: The user.
        lessons: The held-out lessons by layer.
        cancelled: Returns whether to stop.

    Raises:
        Cancelled: ``cancelled`` returned True.
    """
    backends = [side.services.learning_engine.backend for side in (old, new)]
    questions = tuple(
        _question(layer, lesson, backends) for layer, some in lessons.items() for lesson in some
    )
    before, old_tokens = _score(old, user, questions, cancelled)
    base, _ = _score(old, user, questions, cancelled, is_bare=True)
    after, new_tokens = _score(new, user, questions, cancelled)
    size = sum(question.size for question in questions)
    margin = (
        max(old.tie_margin * sum(old_tokens), new.tie_margin * sum(new_tokens)) / size
        if size
        else 0.0
    )
    items = tuple(
        EvalItem(question.lesson.key, was, now, bare, tie_margin=margin)
        for question, was, now, bare in zip(questions, before, after, base, strict=True)
    )
    shown = questions[:MAX_EXAMPLES]
    texts = [_answer(side, user, shown, cancelled) for side in (old, new)]
    examples = tuple(
        Example(question.lesson.messages[-1].content, *pair)
        for question, *pair in zip(shown, *texts, strict=True)
    )
    return BaseComparison(questions, items, examples)


def measure_general(side: Side, user: str, *, cancelled: Callable[[], bool]) -> Evidence:
    """Return how a stack answers general probes, against its bare base.

    Args:
        side: The stack.
        user: The user.
        cancelled: Returns whether to stop.

    Raises:
        Cancelled: ``cancelled`` returned True.
        PersonalPeftError: The model failed.
    """
    services, bare = side.services, Stack(side.stack.base)
    probes = [probe.question for probe in load_general_prompts().probes]
    completions = services.completions.complete_with_base(
        user, bare.base, probes, cancelled=cancelled
    )
    if cancelled():
        raise cancelled_error("before the verdict")
    eval_set = EvalSet(target=(), retention=(), other_layers=(), base_completions=completions)
    job: EvalJob = make_eval_job(services.router, user, "", bare, side.stack, eval_set, {})
    result = evaluate(
        services.learning_engine, services.completions, {user: job}, cancelled=cancelled
    )[user]
    if isinstance(result, PersonalPeftError):
        raise result
    return result[0]


def _question(layer: str, lesson: Lesson, backends: Sequence[Backend]) -> Question:
    """Return a lesson, with its text cut where one of the bases has too many tokens for it."""
    text, ended = lesson.chosen, lesson.ended
    while (longest := max(len(each.encode(text)) for each in backends)) >= MAX_LENGTH:
        text = text[: min(len(text) - 1, len(text) * (MAX_LENGTH - 1) // longest)]
        ended = False
    return Question(layer, lesson, text, ended)


def _score(
    side: Side,
    user: str,
    questions: Sequence[Question],
    cancelled: Callable[[], bool],
    *,
    is_bare: bool = False,
) -> tuple[list[float], list[int]]:
    """Return the log-prob per byte of each question's text, and the number of its tokens."""
    services = side.services
    scorer = ThrottledScorer(services.learning_engine, not_cancelled, cancelled)
    values, tokens = [0.0] * len(questions), [0] * len(questions)
    by_stack: dict[Stack, list[tuple[int, Continuation]]] = {}
    for number, (question, stack) in enumerate(
        zip(questions, _stacks(side, user, questions), strict=True)
    ):
        item = encode_continuation(
            scorer.backend,
            question.lesson.messages,
            question.text,
            MAX_LENGTH,
            ended=question.ended,
        )
        asked = Stack(stack.base) if is_bare else stack
        by_stack.setdefault(asked, []).append((number, item))
    for stack, some in by_stack.items():
        if cancelled():
            raise cancelled_error("before the verdict")
        scores = scorer.score([item for _, item in some], stack)
        for (number, item), score in zip(some, scores, strict=True):
            tokens[number] = len(item.completion)
            values[number] = score.logp * tokens[number] / questions[number].size
    return values, tokens


def _stacks(side: Side, user: str, questions: Sequence[Question]) -> list[Stack]:
    """Return the stack that answers each question, with the layer of the question attached."""
    prompts = [question.lesson.messages[-1].content for question in questions]
    router = side.services.router
    by_layer = {
        layer: effective_stack(router, user, layer, side.stack, prompts, {})
        for layer in {question.layer for question in questions}
    }
    return [by_layer[each.layer].for_layer(each.lesson) for each in questions]


def _answer(
    side: Side, user: str, questions: Sequence[Question], cancelled: Callable[[], bool]
) -> list[str]:
    """Return the generated answer to each question."""
    requests = [
        Request(user, question.lesson.messages, stack, EXAMPLE_SAMPLING, background=True)
        for question, stack in zip(questions, _stacks(side, user, questions), strict=True)
    ]
    replies = side.services.completions.complete_for_users({user: requests}, cancelled=cancelled)
    texts = replies[user]
    if isinstance(texts, PersonalPeftError):
        raise texts
    if cancelled():
        raise cancelled_error("before the verdict")
    return texts
