"""Say without a fact in the prompt what was said with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from personalpeft.backends.base import Continuation, Outputs, Term
from personalpeft.learning.data.assignment import Lesson
from personalpeft.learning.train.losses.base import Batch, continuation


@dataclass(frozen=True, slots=True)
class Distilled:
    """Says without something in the prompt what the stack below says with it: KL over the whole vocabulary, from what
    ``taught`` gives to ``learned``, which has the same completion after the shorter prompt; the mean over its tokens (Snell
    et al. 2022, "Learning by Distilling Context", section 2).
    """

    learned: Continuation
    taught: Continuation
    weight: float = 1.0
    whole: bool = True
    generic: bool = False

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.learned,)

    @property
    def references(self) -> Sequence[Continuation]:
        return (self.taught,)

    def loss(self, outputs: Sequence[Outputs], references: Sequence[Outputs]) -> Any:
        taught = references[0].logp
        return (
            self.weight
            * (taught.exp() * (taught - outputs[0].logp)).sum()
            / len(self.learned.completion)
        )


def terms(lessons: Sequence[Lesson], batch: Batch) -> Iterator[Term]:
    """One for each lesson that the model taught itself."""
    recipe, backend = batch.recipe, batch.backend
    for lesson in lessons:
        if lesson.teacher_messages is not None:
            learned = continuation(
                backend, lesson.messages, lesson.chosen, recipe.longest, ended=lesson.ended
            )
            taught = continuation(
                backend, lesson.teacher_messages, lesson.chosen, recipe.longest, ended=lesson.ended
            )
            yield Distilled(learned, taught, lesson.weight / len(lessons))
