"""Say this rather than that: what an edit or a preference tells apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from personalpeft.backends.base import Continuation, Outputs, Term
from personalpeft.learning.data.assignment import Lesson
from personalpeft.learning.train.losses.base import BEGINNING, Batch, continuation


@dataclass(frozen=True, slots=True)
class Preferred:
    """Says this rather than that: DPO (Rafailov et al. 2023, equation 7). Alone it makes the chosen answer less likely where
    the two differ by few tokens, so it always goes with a likelihood term on the chosen answer (Pang et al. 2024, equation
    1), which is the ``Supervised`` of the same lesson.
    """

    chosen: Continuation
    rejected: Continuation
    beta: float
    weight: float = 1.0
    whole: bool = False
    generic: bool = False

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.chosen, self.rejected)

    @property
    def references(self) -> Sequence[Continuation]:
        return self.continuations

    def loss(self, outputs: Sequence[Outputs], references: Sequence[Outputs]) -> Any:
        from torch.nn.functional import logsigmoid

        gains = [
            o.token_logp.sum() - r.token_logp.sum()
            for o, r in zip(outputs, references, strict=True)
        ]
        return -self.weight * logsigmoid(self.beta * (gains[0] - gains[1]))


def terms(lessons: Sequence[Lesson], batch: Batch) -> Iterator[Term]:
    """One for each of the first lessons that have a rejected text, as many as the recipe has pairs."""
    recipe, backend = batch.recipe, batch.backend
    for lesson in [each for each in lessons if each.rejected is not None and each.teacher_messages is None][
        : recipe.pairs
    ]:
        wanted = continuation(
            backend, lesson.messages, lesson.chosen, recipe.longest, ended=lesson.ended
        )
        # Its beginning will do: it is only there to be told apart, and what follows holds things that are true.
        rejected = continuation(backend, lesson.messages, lesson.rejected or "", BEGINNING)
        yield Preferred(wanted, rejected, recipe.beta, lesson.weight / len(lessons))
