"""What the model said of continuations, as terms of a loss read it, and what it said before, kept for several sessions.

Invariant: a reference is read by itself, in no company, so that its bits depend on the stack below and on the
continuation alone, whoever else is learning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from personalpeft.backends.base import Continuation, ModelOutputs
from personalpeft.backends.torch.lora_layers import ActiveLoRA
from personalpeft.backends.torch.model_runner import ModelRunner
from personalpeft.backends.torch.training.fused_modules import kl_div, token_logprob
from personalpeft.backends.torch.training.packing import pack
from personalpeft.backends.torch.training.reference_cache import ReferenceCache


class _WithLogits(Protocol):
    @property
    def logits(self) -> Tensor: ...


@dataclass(frozen=True)
class TensorOutputs:
    """What the model gave for one continuation, from its logits ``[n, vocabulary]``; log-probs are float32."""

    logits: Tensor
    tokens: Tensor
    model: ModelRunner

    @cached_property
    def logp(self) -> Tensor:
        return torch.log_softmax(self.logits, dim=-1, dtype=torch.float32)

    @cached_property
    def token_logp(self) -> Tensor:
        return token_logprob(self.logits, self.tokens, self.model.kernels.training)

    def kl_div(self, run: slice, reference: ModelOutputs, reference_run: slice) -> Tensor:
        return _kl_between(self, run, reference, reference_run)


@dataclass(frozen=True, eq=False)
class ReferenceLogprobs:
    """What the stack below said of one continuation.

    Kept are the hidden states that the head reads: a whole distribution is a hundred times as large, and comes out of
    them the same whenever it is asked for.
    """

    hidden: Tensor
    tokens: Tensor
    model: ModelRunner

    @cached_property
    def token_logp(self) -> Tensor:
        with torch.no_grad():
            return token_logprob(self.logits, self.tokens, self.model.kernels.training)

    @property
    def logits(self) -> Tensor:
        with torch.no_grad():
            return self.model.logits(self.hidden)

    @property
    def logp(self) -> Tensor:
        return torch.log_softmax(self.logits, dim=-1, dtype=torch.float32)

    def kl_div(self, run: slice, reference: ModelOutputs, reference_run: slice) -> Tensor:
        return _kl_between(self, run, reference, reference_run)


class TokenReference:
    """As much of a reference as most terms ask for."""

    def __init__(self, reference: ReferenceLogprobs) -> None:
        self.token_logp = reference.token_logp

    @property
    def logits(self) -> Tensor:
        raise LookupError("this term asked for the reference's tokens only")

    logp = logits

    def kl_div(self, run: slice, reference: ModelOutputs, reference_run: slice) -> Tensor:
        return self.logits


def _kl_between(
    own: TensorOutputs | ReferenceLogprobs, run: slice, reference: ModelOutputs, reference_run: slice
) -> Tensor:
    # What one term compares is of one backend, and all of this one's have logits.
    before = cast(_WithLogits, reference)
    return kl_div(before.logits[reference_run], own.logits[run], own.model.kernels.training)


class ReferenceReader:
    """What stacks said, found again as long as anybody holds it, so that several users who learn above the same stack are held
    to the same answers; what the bare base said of generic ones lasts.
    """

    def __init__(self, model: ModelRunner, generic: ReferenceCache) -> None:
        self._model = model
        self._generic = generic
        self._known: WeakValueDictionary[tuple[int, Continuation], ReferenceLogprobs] = (
            WeakValueDictionary()
        )

    def read(
        self, items: Mapping[Continuation, bool], stack: int, bound: ActiveLoRA | None
    ) -> dict[Continuation, ReferenceLogprobs]:
        """What a stack says, which is ``bound`` and known by a number that no other ever had; of each item whether it is
        generic.
        """
        found = {}
        for item, generic in items.items():
            with torch.no_grad(), self._model.exclusive(bound):
                known = self._known.get((stack, item))
                if known is None:
                    hidden = self._hidden(item, lasting=generic and bound is None)
                    tokens = torch.tensor(item.completion, device=hidden.device)
                    known = self._known[stack, item] = ReferenceLogprobs(
                        hidden, tokens, self._model
                    )
                found[item] = known
        self._generic.save()
        return found

    def _hidden(self, item: Continuation, *, lasting: bool) -> Tensor:
        hidden = self._generic.get(item) if lasting else None
        if hidden is None:
            hidden = self._model.hidden(pack([item]))
            if lasting:
                self._generic.add(item, hidden)
        return hidden.to(self._model.where.device)


def read_hidden(model: ModelRunner, items: Sequence[Continuation]) -> list[TensorOutputs]:
    """The outputs of each continuation, in one pass. Needs the model's turn."""
    return split_outputs(model, items, model.hidden(pack(items)))


def split_outputs(
    model: ModelRunner, items: Sequence[Continuation], hidden: Tensor
) -> list[TensorOutputs]:
    """The outputs of each continuation, from the hidden states of all of them."""
    logits = torch.split(model.logits(hidden), [len(item.completion) for item in items])
    return [
        TensorOutputs(own, torch.tensor(item.completion, device=own.device), model)
        for item, own in zip(items, logits, strict=True)
    ]


def chunks(items: Sequence[Continuation], tokens: int) -> list[list[Continuation]]:
    """Continuations in order, in groups of about so many tokens: attention over a pack costs the square of its length."""
    groups: list[list[Continuation]] = []
    size = tokens
    for item in items:
        length = len(item.prompt) + len(item.completion)
        if size + length > tokens:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += length
    return groups
