"""Compare two stacks on two bases by the same held-out lessons.

Bases have tokens of their own, so log-probs per token cannot be compared. The log-prob of a whole
text can: it is that of the same characters. It is divided by the bytes of the text, as bits per
byte are (Gao et al. 2020, arXiv 2101.00027, section 3.1). An end of turn counts as one byte. A long
text is cut at the same character for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from personalpeft.backends.base import Backend
from personalpeft.engine.engine import Request
from personalpeft.errors import PersonalPeftError
from personalpeft.learning.data.training_examples import Lesson
from personalpeft.learning.evaluate.eval_job import (
    EXAMPLE_SAMPLING,
    EvalJob,
    EvalSet,
    ThrottledScorer,
    effective_stack,
    make_eval_job,
)
from personalpeft.learning.evaluate.evaluation import MAX_EXAMPLES, evaluate, score_answers
from personalpeft.learning.evaluate.probes import load_general_prompts, prompt_languages
from personalpeft.learning.gate.evidence import EvalItem, Evidence
from personalpeft.learning.options import cancelled_error, not_cancelled
from personalpeft.learning.report import Example
from personalpeft.learning.train.config import MAX_LENGTH
from personalpeft.memory.languages import find_languages
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
    """A held-out lesson of a layer. Its chosen text is perhaps cut, for both sides alike."""

    layer: str
    lesson: Lesson

    @property
    def size(self) -> int:
        """The bytes of the text, and one for the end of the turn."""
        return len(self.lesson.chosen.encode()) + self.lesson.ended


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
    stacks = [_stacks(side, user, questions) for side in (old, new)]
    before, old_tokens = _score(old, questions, stacks[0], cancelled)
    bare = dict.fromkeys(stacks[0], Stack(old.stack.base))
    base, _ = _score(old, questions, bare, cancelled)
    after, new_tokens = _score(new, questions, stacks[1], cancelled)
    size = sum(question.size for question in questions)
    margin = max(old.tie_margin * old_tokens, new.tie_margin * new_tokens) / size if size else 0.0
    items = tuple(
        EvalItem(question.lesson.key, was, now, bare, tie_margin=margin)
        for question, was, now, bare in zip(questions, before, after, base, strict=True)
    )
    was, now = (
        _answer(side, user, questions, own, cancelled)
        for side, own in zip((old, new), stacks, strict=True)
    )
    examples = tuple(
        Example(question.lesson.messages[-1].content, *pair)
        for question, *pair in zip(questions[:MAX_EXAMPLES], was, now, strict=True)
    )
    return BaseComparison(questions, items, examples)


def measure_general(
    side: Side, user: str, prompts: Sequence[str], *, cancelled: Callable[[], bool]
) -> Evidence:
    """Return how a stack answers general probes, against its bare base.

    Args:
        side: The stack.
        user: The user.
        prompts: Prompts in the languages of the user.
        cancelled: Returns whether to stop.

    Raises:
        Cancelled: ``cancelled`` returned True.
        PersonalPeftError: The model failed.
    """
    services, bare = side.services, Stack(side.stack.base)
    general = load_general_prompts(find_languages(prompts, prompt_languages()))
    probes = [probe.question for probe in general.probes]
    completions = services.completions.complete_with_base(
        user, bare.base, probes, cancelled=cancelled
    )
    if cancelled():
        raise cancelled_error("before the verdict")
    eval_set = EvalSet(
        target=(), retention=(), other_layers=(), base_completions=completions, general=general
    )
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
    return Question(layer, replace(lesson, chosen=text, ended=ended))


def _stacks(side: Side, user: str, questions: Sequence[Question]) -> dict[str, Stack]:
    """Return by key the stack for each question, with the layer of the question attached."""
    prompts = [question.lesson.messages[-1].content for question in questions]
    # Which layers are attached to a prompt does not depend on the layer that asks.
    effective = effective_stack(side.services.router, user, "", side.stack, prompts, {})
    return {
        each.lesson.key: replace(effective, layer=each.layer).for_layer(each.lesson)
        for each in questions
    }


def _score(
    side: Side,
    questions: Sequence[Question],
    stacks: Mapping[str, Stack],
    cancelled: Callable[[], bool],
) -> tuple[list[float], int]:
    """Return the log-prob per byte of each question's text, and the tokens of all texts."""
    if cancelled():
        raise cancelled_error("before the verdict")
    scorer = ThrottledScorer(side.services.learning_engine, not_cancelled, cancelled)
    lessons = [question.lesson for question in questions]
    scores = score_answers(scorer, lessons, lambda each: stacks[each.key], MAX_LENGTH)
    lengths = {key: len(score.token_logprobs) for key, score in scores.items()}
    values = [
        scores[key].logp * lengths[key] / question.size
        for key, question in ((each.lesson.key, each) for each in questions)
    ]
    return values, sum(lengths.values())


def _answer(
    side: Side,
    user: str,
    questions: Sequence[Question],
    stacks: Mapping[str, Stack],
    cancelled: Callable[[], bool],
) -> list[str]:
    """Return the generated answers to the first questions."""
    requests = [
        Request(user, each.messages, stacks[each.key], EXAMPLE_SAMPLING, background=True)
        for each in (question.lesson for question in questions[:MAX_EXAMPLES])
    ]
    replies = side.services.completions.complete_for_users({user: requests}, cancelled=cancelled)
    texts = replies[user]
    if isinstance(texts, PersonalPeftError):
        raise texts
    if cancelled():
        raise cancelled_error("before the verdict")
    return texts
