"""What a verified reply asks of the model, as a term of a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from personalpeft.backends.base import Continuation, Outputs

# One token that the stack below finds this many nats likelier is held to it as firmly as one that it finds likelier still.
_FAR = 5.0


@dataclass(frozen=True, slots=True)
class PolicyGradient:
    """Says what went well more and what went badly less: the policy gradient (Williams 1992) of a reply that was just
    sampled from this very model, so that no ratio to an older one is needed, and the KL from the stack below by the
    estimator of Schulman (2020, "Approximating KL divergence", the third), a token.

    The gradient is summed over tokens and divided by ``longest``, the same for all replies: a mean over each reply's own
    tokens would forgive long replies their mistakes (Liu et al. 2025, "Understanding R1-Zero-Like Training").
    """

    said: Continuation
    advantage: float
    longest: int
    kl: float
    weight: float = 1.0
    whole: bool = False
    generic: bool = False

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.said,)

    @property
    def references(self) -> Sequence[Continuation]:
        return (self.said,)

    def loss(self, outputs: Sequence[Outputs], references: Sequence[Outputs]) -> Any:
        likelihood = outputs[0].token_logp
        beyond = (references[0].token_logp - likelihood).clamp(max=_FAR)
        apart = (beyond.exp() - beyond - 1).sum()
        return self.weight * (self.kl * apart - self.advantage * likelihood.sum()) / self.longest
