"""What a lesson asks of the model, as terms of a loss over log-probs. Each is a few lines and names its source.

A term says which continuations it reads and what it makes of their log-probs; the backend reads them all in one pass.
Log-probs are natural, float32; a continuation counts by its mean over tokens, so that a long answer weighs no more than
a short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from personalpeft.backends.base import Continuation, Outputs, Reference


@dataclass(frozen=True, slots=True)
class Supervised:
    """Says this more: weighted negative log-likelihood of a wanted answer."""

    wanted: Continuation
    weight: float = 1.0
    reference: Reference = "none"

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.wanted,)

    def loss(self, outputs: Sequence[Outputs], reference: Sequence[Outputs]) -> Any:
        return -self.weight * outputs[0].token_logp.mean()


@dataclass(frozen=True, slots=True)
class Preferred:
    """Says this rather than that: DPO (Rafailov et al. 2023, equation 7) with a likelihood term on the chosen answer
    (Pang et al. 2024, equation 1), without which the chosen answer grows less likely where the two differ by few
    tokens.
    """

    chosen: Continuation
    rejected: Continuation
    beta: float
    weight: float = 1.0
    positive: float = 1.0
    reference: Reference = "tokens"

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.chosen, self.rejected)

    def loss(self, outputs: Sequence[Outputs], reference: Sequence[Outputs]) -> Any:
        from torch.nn.functional import logsigmoid

        gains = [o.token_logp.sum() - r.token_logp.sum() for o, r in zip(outputs, reference, strict=True)]
        likelier = outputs[0].token_logp.mean()
        return -self.weight * (logsigmoid(self.beta * (gains[0] - gains[1])) + self.positive * likelier)


@dataclass(frozen=True, slots=True)
class Anchor:
    """Stays as it was here: mean KL a token from what lies below to the candidate, over the whole vocabulary.

    The first ``free`` tokens and the one that ends the turn may change: openings and endings are where a style lives,
    and what lies between is where the facts are.
    """

    kept: Continuation
    weight: float = 1.0
    free: int = 3
    reference: Reference = "distribution"

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.kept,)

    def loss(self, outputs: Sequence[Outputs], reference: Sequence[Outputs]) -> Any:
        before, now = reference[0].logp[self.free : -1], outputs[0].logp[self.free : -1]
        return self.weight * (before.exp() * (before - now)).sum(-1).mean()
