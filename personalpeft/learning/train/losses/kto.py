"""Say such things more and such things less: replies that were only liked or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from personalpeft.backends.base import Continuation, Outputs


@dataclass(frozen=True, slots=True)
class Thumbs:
    """Says such things more and such things less, where nothing shows what would have been right: KTO (Ethayarajh et al.
    2024, equation 8), with both weights lambda at 1.

    A reply's gain over the stack below is compared with what any reply gains, which is estimated as in the paper on
    ``mismatched``, the replies of some of these prompts after others; no gradient flows through that.
    """

    liked: tuple[Continuation, ...]
    disliked: tuple[Continuation, ...]
    mismatched: tuple[Continuation, ...]
    beta: float
    weight: float = 1.0
    whole: bool = False
    generic: bool = False

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (*self.liked, *self.disliked, *self.mismatched)

    @property
    def references(self) -> Sequence[Continuation]:
        return self.continuations

    def loss(self, outputs: Sequence[Outputs], references: Sequence[Outputs]) -> Any:
        import torch

        gains = torch.stack(
            [
                o.token_logp.sum() - r.token_logp.sum()
                for o, r in zip(outputs, references, strict=True)
            ]
        )
        judged = len(self.liked) + len(self.disliked)
        usual = gains[judged:].detach().mean().clamp(min=0)
        direction = torch.ones_like(gains[:judged])
        direction[len(self.liked) :] = -1
        return (
            self.weight
            * (1 - torch.sigmoid(self.beta * direction * (gains[:judged] - usual))).mean()
        )
