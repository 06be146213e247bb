"""Say this more: what an edit, a chosen answer or a demonstration shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from personalpeft.backends.base import Continuation, Outputs, Term
from personalpeft.learning.lessons import Lesson
from personalpeft.learning.manner import NO_MANNER
from personalpeft.learning.objectives.base import Batch, continuation


@dataclass(frozen=True, slots=True)
class Supervised:
    """Says this more: negative log-likelihood of a wanted answer, of which the first ``opening`` and the last
    ``closing`` tokens count in full and what lies between counts ``content``.
    """

    wanted: Continuation
    weight: float = 1.0
    opening: int = 0
    closing: int = 0
    content: float = 1.0
    references: tuple[Continuation, ...] = ()
    whole: bool = False

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.wanted,)

    def loss(self, outputs: Sequence[Outputs], references: Sequence[Outputs]) -> Any:
        likelihood = outputs[0].token_logp
        between = likelihood[self.opening : len(likelihood) - self.closing]
        total = likelihood.sum() - (1 - self.content) * between.sum()
        return -self.weight * total / len(likelihood)


def terms(lessons: Sequence[Lesson], batch: Batch) -> Iterator[Term]:
    """One for each lesson that shows what is wanted."""
    recipe, backend, manner = batch.recipe, batch.backend, batch.manner
    # What the lessons have in common is what they teach; what only one of them says is beside the point.
    opening = len(backend.encode(manner.opening.rstrip()))
    closing = len(backend.encode(manner.closing) + backend.end_of_turn)
    content = 1.0 if manner == NO_MANNER else recipe.content
    for lesson in lessons:
        if lesson.heard is None:
            wanted = continuation(backend, lesson.messages, lesson.wanted, recipe.longest)
            yield Supervised(wanted, lesson.weight / len(lessons), opening, closing, content)
