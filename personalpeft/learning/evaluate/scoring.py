"""Score replies under the stacks that answer users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from personalpeft.backends.base import Backend, Continuation, Score
from personalpeft.engine.engine import Engine
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.options import MAX_YIELD_SECONDS, Condition, wait_while
from personalpeft.learning.train.losses import encode_continuation
from personalpeft.types import Stack


@dataclass(frozen=True, slots=True)
class ThrottledScorer:
    """Scores in turns with users who chat, since the model does one thing at a time."""

    engine: Engine
    paused: Condition
    cancelled: Condition

    @property
    def backend(self) -> Backend:
        return self.engine.backend

    def score(
        self, items: Sequence[Continuation], stack: Stack, *, kl: bool = False
    ) -> tuple[Score, ...]:
        wait_while(self.paused, self.cancelled)
        self.engine.yield_to_foreground(MAX_YIELD_SECONDS)
        return self.engine.score(items, stack, kl=kl)


Scorer: TypeAlias = Engine | ThrottledScorer
"""What scores continuations."""

StackSelector: TypeAlias = Callable[[Lesson], Stack]
"""Returns the stack that a lesson is scored with."""


def score_answers(
    engine: Scorer, lessons: Sequence[Lesson], select: StackSelector, max_length: int
) -> dict[str, Score]:
    """Return the score of each lesson's chosen reply, by the lesson's key.

    Args:
        engine: Scores.
        lessons: The lessons.
        select: Returns the stack for a lesson.
        max_length: The tokens at which a reply is cut, as in training.
    """
    items = [
        encode_continuation(
            engine.backend, each.messages, each.chosen, max_length, ended=each.ended
        )
        for each in lessons
    ]
    scores = score_each(engine, items, list(map(select, lessons)))
    return {lesson.key: score for lesson, score in zip(lessons, scores, strict=True)}


def score_each(
    engine: Scorer, items: Sequence[Continuation], stacks: Sequence[Stack]
) -> list[Score]:
    """Score each continuation under its own stack, those of one stack together."""
    scores: dict[int, Score] = {}
    for stack in dict.fromkeys(stacks):
        numbers = [number for number, each in enumerate(stacks) if each == stack]
        together = [items[number] for number in numbers]
        scores |= zip(numbers, engine.score(together, stack), strict=True)
    return [scores[number] for number in range(len(items))]
