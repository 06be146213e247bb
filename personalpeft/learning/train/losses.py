"""The losses of supervised learning: SFT, DPO, KTO, context distillation and the KL regularizer.

A loss names the continuations that it reads. The backend runs them all in one pass. The loss gets
their log-probs (natural, float32, one for each token of the completion). The weights of a step's
losses make each lesson count the same, however long its answer is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from personalpeft.backends.base import Backend, Continuation, ModelOutputs
from personalpeft.types import Message


class BaseLoss:
    """What most losses share: each continuation is also scored under the stack below."""

    is_general: ClassVar[bool] = False

    @property
    def continuations(self) -> Sequence[Continuation]:
        raise NotImplementedError

    @property
    def references(self) -> Sequence[Continuation]:
        return self.continuations


@dataclass(frozen=True, slots=True)
class SFTLoss(BaseLoss):
    """Negative log-likelihood of a wanted answer, averaged over tokens."""

    target: Continuation
    weight: float = 1.0

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.target,)

    @property
    def references(self) -> Sequence[Continuation]:
        return ()

    def loss(self, outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> Any:
        return -self.weight * outputs[0].token_logp.mean()


@dataclass(frozen=True, slots=True)
class DPOLoss(BaseLoss):
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290, eq. 7).

    ``-log sigmoid(beta * (r(chosen) - r(rejected)))``, where ``r`` is the log-ratio of the trained
    stack to the stack below. Alone it makes a chosen answer less likely where the two differ by few
    tokens. So the same lesson has an ``SFTLoss`` too (Pang et al. 2024, arXiv 2404.19733, eq. 1).
    """

    chosen: Continuation
    rejected: Continuation
    beta: float
    weight: float = 1.0

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.chosen, self.rejected)

    def loss(self, outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> Any:
        from torch.nn.functional import logsigmoid

        chosen, rejected = _log_ratios(outputs, references)
        return -self.weight * logsigmoid(self.beta * (chosen - rejected))


@dataclass(frozen=True, slots=True)
class KTOLoss(BaseLoss):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8), lambda 1.

    ``1 - sigmoid(+-beta * (r - z))`` averaged over the replies, plus for desirable ones. ``z``
    estimates the KL from the stack below as in the paper, on ``mismatched``: replies after the
    prompts of others. No gradient flows through it.
    """

    desirable: tuple[Continuation, ...]
    undesirable: tuple[Continuation, ...]
    mismatched: tuple[Continuation, ...]
    beta: float
    weight: float = 1.0

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (*self.desirable, *self.undesirable, *self.mismatched)

    def loss(self, outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> Any:
        import torch

        ratios = torch.stack(_log_ratios(outputs, references))
        rated = len(self.desirable) + len(self.undesirable)
        baseline = ratios[rated:].detach().mean().clamp(min=0)
        sign = torch.ones_like(ratios[:rated])
        sign[len(self.desirable) :] = -1
        values = torch.sigmoid(self.beta * sign * (ratios[:rated] - baseline))
        return self.weight * (1 - values).mean()


@dataclass(frozen=True, slots=True)
class ContextDistillationLoss(BaseLoss):
    """Context distillation (Askell et al. 2021, arXiv 2112.00861).

    ``KL(p_below(. | prompt with context) || p(. | prompt))`` over the whole vocabulary, averaged
    over the tokens of one completion. ``teacher`` has the context, ``student`` does not.
    """

    student: Continuation
    teacher: Continuation
    weight: float = 1.0

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.student,)

    @property
    def references(self) -> Sequence[Continuation]:
        return (self.teacher,)

    def loss(self, outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> Any:
        whole = slice(0, len(self.student.completion))
        return self.weight * outputs[0].kl_div(whole, references[0], whole).mean()


@dataclass(frozen=True, slots=True)
class KLRegularizer(BaseLoss):
    """KL from the stack below on its own reply to a general prompt.

    ``KL(p_below || p)`` over the whole vocabulary, averaged over the tokens of the reply from
    ``start`` on.
    """

    reply: Continuation
    start: int = 0
    weight: float = 1.0
    is_general: ClassVar[bool] = True

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.reply,)

    def loss(self, outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> Any:
        held = slice(self.start, len(self.reply.completion))
        return self.weight * outputs[0].kl_div(held, references[0], held).mean()


def _log_ratios(outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> list[Any]:
    """Return ``log p(completion) - log p_below(completion)`` of each."""
    pairs = zip(outputs, references, strict=True)
    return [own.token_logp.sum() - below.token_logp.sum() for own, below in pairs]


def encode_continuation(
    backend: Backend,
    messages: Sequence[Message],
    answer: str,
    max_length: int,
    *,
    ended: bool = True,
) -> Continuation:
    """Return an answer after its messages, as tokens.

    Args:
        backend: Gives the tokenizer and the chat template.
        messages: The conversation.
        answer: The text of the answer.
        max_length: The most tokens of the answer.
        ended: Whether the answer ended by itself. If so, the base's end of turn is added. An
            answer that was cut off must not teach to stop there.
    """
    tokens = backend.encode(answer) + (backend.end_of_turn if ended else ())
    return Continuation(backend.render(messages), tokens[:max_length])
