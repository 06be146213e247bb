"""Keep to what lies below: generic answers, perhaps in another manner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from personalpeft.backends.base import Continuation, Outputs


@dataclass(frozen=True, slots=True)
class Anchor:
    """Keeps to what the stack below says: KL over the whole vocabulary on a run of tokens that ``said`` and ``kept``
    share.

    ``said`` may dress the same content in another manner; the candidate is held to go on inside the run as the stack
    below would in ``kept``. What of ``said`` lies outside of the run is learned by likelihood if ``learn_rest``, else
    left free. The loss is the mean over the tokens that count.
    """

    said: Continuation
    kept: Continuation
    first_said: int
    first_kept: int
    length: int
    learn_rest: bool
    weight: float = 1.0
    whole: bool = True
    generic: bool = True

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.said,)

    @property
    def references(self) -> Sequence[Continuation]:
        return (self.kept,)

    def loss(self, outputs: Sequence[Outputs], references: Sequence[Outputs]) -> Any:
        run = slice(self.first_said, self.first_said + self.length)
        kept = slice(self.first_kept, self.first_kept + self.length)
        total, count = outputs[0].divergence(run, references[0], kept).sum(), self.length
        if self.learn_rest:
            likelihood = outputs[0].token_logp
            total = total - likelihood.sum() + likelihood[run].sum()
            count = len(self.said.completion)
        return self.weight * total / max(1, count)
