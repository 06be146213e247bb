"""Say this more: what an edit, a chosen answer or a demonstration shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from personalpeft.backends.base import Continuation, Outputs, Term
from personalpeft.learning.data.assignment import Lesson
from personalpeft.learning.data.response_template import NO_MANNER
from personalpeft.learning.train.losses.base import Batch, around, continuation


@dataclass(frozen=True, slots=True)
class Supervised:
    """Says this more: negative log-likelihood of a wanted answer, of which each token counts its share of ``shares``; without
    them all count the same, and 1 together.
    """

    wanted: Continuation
    weight: float = 1.0
    shares: tuple[float, ...] = ()
    references: tuple[Continuation, ...] = ()
    whole: bool = False
    generic: bool = False

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.wanted,)

    def loss(self, outputs: Sequence[Outputs], references: Sequence[Outputs]) -> Any:
        likelihood = outputs[0].token_logp
        if self.shares:
            likelihood = likelihood * likelihood.new_tensor(self.shares)
            return -self.weight * likelihood.sum()
        return -self.weight * likelihood.sum() / len(likelihood)


def terms(lessons: Sequence[Lesson], batch: Batch) -> Iterator[Term]:
    """One for each lesson that shows what is wanted."""
    for lesson in lessons:
        if lesson.teacher_messages is None:
            wanted = continuation(
                batch.backend,
                lesson.messages,
                lesson.chosen,
                batch.recipe.longest,
                ended=lesson.ended,
            )
            yield Supervised(
                wanted, lesson.weight / len(lessons), _shares(lesson, len(wanted.completion), batch)
            )


def _shares(lesson: Lesson, tokens: int, batch: Batch) -> tuple[float, ...]:
    """What each token of a wanted answer counts: those of the manner ``shared``, those between ``content``, and that it ends there
    1. All of it is over what they would come to with a ``content`` of 1, so an answer of few words in a long manner is no
    weaker lesson for it where the manner is not what it is to teach.
    """
    if batch.manner == NO_MANNER:
        return ()
    recipe, backend = batch.recipe, batch.backend
    opening, closing = around(backend, batch.manner, lesson.prompt_response.request)
    ending = len(backend.end_of_turn)
    if not lesson.ended:
        closing = ending = 0
    between = max(0, tokens - opening - closing - ending)
    shares = [recipe.shared] * opening + [recipe.content] * between + [recipe.shared] * closing
    shares = (shares + [1.0] * tokens)[:tokens]
    whole = max(1.0, tokens - (1 - recipe.shared) * (opening + closing))
    return tuple(share / whole for share in shares)
