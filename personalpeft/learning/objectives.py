"""What a lesson asks of the model, as terms of a loss over log-probs. Each is a few lines and names its source.

A term says which continuations it reads and what it makes of their log-probs; the backend reads them all in one pass.
Log-probs are natural, float32; a continuation counts by its mean over tokens, so that a long answer weighs no more than
a short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from personalpeft.backends.base import Continuation, Outputs


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

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.chosen, self.rejected)

    @property
    def references(self) -> Sequence[Continuation]:
        return self.continuations

    def loss(self, outputs: Sequence[Outputs], references: Sequence[Outputs]) -> Any:
        from torch.nn.functional import logsigmoid

        gains = [o.token_logp.sum() - r.token_logp.sum() for o, r in zip(outputs, references, strict=True)]
        return -self.weight * logsigmoid(self.beta * (gains[0] - gains[1]))


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

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (*self.liked, *self.disliked, *self.mismatched)

    @property
    def references(self) -> Sequence[Continuation]:
        return self.continuations

    def loss(self, outputs: Sequence[Outputs], references: Sequence[Outputs]) -> Any:
        import torch

        gains = torch.stack([o.token_logp.sum() - r.token_logp.sum() for o, r in zip(outputs, references, strict=True)])
        judged = len(self.liked) + len(self.disliked)
        usual = gains[judged:].detach().mean().clamp(min=0)
        direction = torch.ones_like(gains[:judged])
        direction[len(self.liked) :] = -1
        return self.weight * (1 - torch.sigmoid(self.beta * direction * (gains[:judged] - usual))).mean()


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

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.learned,)

    @property
    def references(self) -> Sequence[Continuation]:
        return (self.taught,)

    def loss(self, outputs: Sequence[Outputs], references: Sequence[Outputs]) -> Any:
        taught = references[0].logp
        return self.weight * (taught.exp() * (taught - outputs[0].logp)).sum() / len(self.learned.completion)


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
