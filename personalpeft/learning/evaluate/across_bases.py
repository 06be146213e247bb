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
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.evaluate.eval_job import (
    EXAMPLE_SAMPLING,
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
    live, candidate = (_Respondent(side, user, questions, cancelled) for side in (old, new))
    before, old_tokens = live.score()
    base, _ = live.score(bare=True)
    after, new_tokens = candidate.score()
    size = sum(question.size for question in questions)
    margin = max(old.tie_margin * old_tokens, new.tie_margin * new_tokens) / size if size else 0.0
    items = tuple(
        EvalItem(question.lesson.key, was, now, bare, tie_margin=margin)
        for question, was, now, bare in zip(questions, before, after, base, strict=True)
    )
    asked = [question.lesson.messages[-1].content for question in questions[:MAX_EXAMPLES]]
    examples = tuple(map(Example, asked, live.answer(), candidate.answer()))
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
        undecided=(), retention=(), other_layers=(), base_completions=completions, general=general
    )
    job = make_eval_job(services.router, user, "", bare, side.stack, eval_set, {})
    result = evaluate(services, {user: job}, cancelled=cancelled)[user]
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


class _Respondent:
    """A side that is asked questions, with the layer of each question attached."""

    def __init__(
        self, side: Side, user: str, questions: Sequence[Question], cancelled: Callable[[], bool]
    ) -> None:
        self._engine, self._bare = side.services.learning_engine, Stack(side.stack.base)
        self._user, self._questions, self._cancelled = user, questions, cancelled
        prompts = [question.lesson.messages[-1].content for question in questions]
        # Which layers are attached to a prompt does not depend on the layer that asks.
        effective = effective_stack(side.services.router, user, "", side.stack, prompts, {})
        self._stacks = {
            each.lesson.key: replace(effective, layer=each.layer).for_layer(each.lesson)
            for each in questions
        }

    def score(self, *, bare: bool = False) -> tuple[list[float], int]:
        """Return the log-prob per byte of each question's text, and the tokens of all texts."""
        self._check_not_cancelled()
        scorer = ThrottledScorer(self._engine, not_cancelled, self._cancelled)
        lessons = [question.lesson for question in self._questions]
        stacks = dict.fromkeys(self._stacks, self._bare) if bare else self._stacks
        scores = score_answers(scorer, lessons, lambda each: stacks[each.key], MAX_LENGTH)
        totals = {key: score.logp * len(score.token_logprobs) for key, score in scores.items()}
        values = [totals[each.lesson.key] / each.size for each in self._questions]
        return values, sum(len(score.token_logprobs) for score in scores.values())

    def answer(self) -> list[str]:
        """Return the generated answers to the first questions."""
        lessons = [question.lesson for question in self._questions[:MAX_EXAMPLES]]
        requests = [
            Request(
                self._user,
                each.messages,
                self._stacks[each.key],
                EXAMPLE_SAMPLING,
                background=True,
            )
            for each in lessons
        ]
        texts = self._engine.complete(requests, cancelled=self._cancelled)
        self._check_not_cancelled()
        return texts

    def _check_not_cancelled(self) -> None:
        if self._cancelled():
            raise cancelled_error("before the verdict")
