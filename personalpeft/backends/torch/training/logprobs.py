"""The model's outputs for continuations, as losses read them, and shared reference outputs.

Invariant: a reference is computed in a pass of its own. Its bits depend on the stack below and the
continuation alone.
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


class _HasLogits(Protocol):
    @property
    def logits(self) -> Tensor: ...


@dataclass(frozen=True)
class PolicyOutputs:
    """Outputs for one continuation, from logits ``[n, vocabulary]``; log-probs are float32."""

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
class ReferenceOutputs:
    """Outputs of the stack below for one continuation.

    It keeps the hidden states: the logits are a hundred times as large, and computed from them with
    the same bits each time.
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
    """A reference's token log-probs, for losses that need no distribution."""

    def __init__(self, reference: ReferenceOutputs) -> None:
        self.token_logp = reference.token_logp

    @property
    def logits(self) -> Tensor:
        raise LookupError("a loss that reads logits of references must set needs_full_logp")

    logp = logits

    def kl_div(self, run: slice, reference: ModelOutputs, reference_run: slice) -> Tensor:
        return self.logits


def _kl_between(
    own: PolicyOutputs | ReferenceOutputs,
    run: slice,
    reference: ModelOutputs,
    reference_run: slice,
) -> Tensor:
    # All outputs of one loss are of this backend, and have logits.
    with_logits = cast(_HasLogits, reference)
    return kl_div(with_logits.logits[reference_run], own.logits[run], own.model.kernels.training)


class ReferenceReader:
    """Compute reference outputs, and share them between sessions above the same stack.

    Outputs are kept while a session uses them. General ones of the bare base go to the cache.
    """

    def __init__(self, model: ModelRunner, generic: ReferenceCache) -> None:
        self._model = model
        self._cache = generic
        self._known: WeakValueDictionary[tuple[int, Continuation], ReferenceOutputs] = (
            WeakValueDictionary()
        )

    def read(
        self, items: Mapping[Continuation, bool], stack: int, active: ActiveLoRA | None
    ) -> dict[Continuation, ReferenceOutputs]:
        """Return the reference outputs of continuations.

        Args:
            items: The continuations, and whether each is general.
            stack: The attachment id of the stack below.
            active: The stack; None for the bare base.
        """
        found = {}
        for item, generic in items.items():
            with torch.no_grad(), self._model.exclusive(active):
                reference = self._known.get((stack, item))
                if reference is None:
                    hidden = self._hidden(item, persistent=generic and active is None)
                    tokens = torch.tensor(item.completion, device=hidden.device)
                    reference = self._known[stack, item] = ReferenceOutputs(
                        hidden, tokens, self._model
                    )
                found[item] = reference
        self._cache.save()
        return found

    def _hidden(self, item: Continuation, *, persistent: bool) -> Tensor:
        hidden = self._cache.get(item) if persistent else None
        if hidden is None:
            hidden = self._model.hidden(pack([item]))
            if persistent:
                self._cache.add(item, hidden)
        return hidden.to(self._model.where.device)


def read_hidden(model: ModelRunner, items: Sequence[Continuation]) -> list[PolicyOutputs]:
    """Return the outputs of each continuation, in one pass. The caller holds the model's lock."""
    return split_outputs(model, items, model.hidden(pack(items)))


def split_outputs(
    model: ModelRunner, items: Sequence[Continuation], hidden: Tensor
) -> list[PolicyOutputs]:
    """Return the outputs of each continuation, from the hidden states of all."""
    logits = torch.split(model.logits(hidden), [len(item.completion) for item in items])
    return [
        PolicyOutputs(own, torch.tensor(item.completion, device=own.device), model)
        for item, own in zip(items, logits, strict=True)
    ]


def group_by_tokens(items: Sequence[Continuation], tokens: int) -> list[list[Continuation]]:
    """Split continuations into groups of about ``tokens`` tokens, in order."""
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
