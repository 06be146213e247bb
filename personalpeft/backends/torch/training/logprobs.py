"""The model's outputs for continuations, as losses read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from personalpeft.backends.base import Continuation, ModelOutputs
from personalpeft.backends.torch.autograd import differentiable
from personalpeft.backends.torch.model_runner import ModelRunner
from personalpeft.backends.torch.training.packing import PackedSequence, pack


@dataclass(frozen=True, eq=False)
class TorchOutputs:
    """Outputs for one continuation; log-probs are float32.

    References keep their hidden states, because logits are a hundred times as large. Logits
    computed from them have the same bits each time.

    Attributes:
        source: Logits ``[n, vocabulary]`` of the policy, or hidden states ``[n, size]`` of a
            reference.
        tokens: The scored tokens, ``[n]``.
        model: Computes.
        is_reference: Whether the outputs are of the stack below.
    """

    source: Tensor
    tokens: Tensor
    model: ModelRunner
    is_reference: bool = False

    @property
    def logits(self) -> Tensor:
        if not self.is_reference:
            return self.source
        with torch.no_grad():
            return self.model.logits(self.source)

    @property
    def logp(self) -> Tensor:
        return torch.log_softmax(self.logits, dim=-1, dtype=torch.float32)

    @cached_property
    def token_logp(self) -> Tensor:
        training, logits = self.model.ops.training, self.logits.contiguous()
        if training is None:
            logits32 = logits.float()
            picked = logits32.gather(1, self.tokens[:, None])[:, 0]
            return picked - torch.logsumexp(logits32, dim=-1)
        return differentiable(
            lambda logits, lse, tokens: logits.gather(1, tokens[:, None])[:, 0].float() - lse,
            training.token_logprob_backward,
            logits,
            training.logsumexp(logits),
            self.tokens,
        )

    def kl_div(self, run: slice, reference: ModelOutputs, reference_run: slice) -> Tensor:
        # All outputs of one loss are of this backend.
        p = cast(TorchOutputs, reference).logits[reference_run].detach()
        q = self.logits[run]
        training = self.model.ops.training
        if training is None:
            log_p, log_q = (
                torch.log_softmax(logits, dim=-1, dtype=torch.float32) for logits in (p, q)
            )
            return (log_p.exp() * (log_p - log_q)).sum(-1)
        p, q = p.contiguous(), q.contiguous()
        return differentiable(
            lambda q, q_lse, p, p_lse: training.kl_div(p, p_lse, q, q_lse),
            lambda q, q_lse, p, p_lse, grad: training.kl_div_backward(p, p_lse, q, q_lse, grad),
            q,
            training.logsumexp(q),
            p,
            training.logsumexp(p),
        )


def read_outputs(
    model: ModelRunner, items: Sequence[Continuation], packed: PackedSequence | None = None
) -> list[TorchOutputs]:
    """Return the outputs of each continuation, in one pass. The caller holds the model's lock.

    ``packed`` has the same continuations, packed in groups; None packs them in one group.
    """
    logits = model.logits(model.hidden(packed or pack(items)))
    parts = torch.split(logits, [len(item.completion) for item in items])
    return [
        TorchOutputs(own, torch.tensor(item.scored, device=own.device), model)
        for item, own in zip(items, parts, strict=True)
    ]
