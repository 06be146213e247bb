"""The torch backend. Transformers has the model code; batching, slots and training are ours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from personalpeft.adapters.types import AdapterStack
from personalpeft.backends.base import (
    Continuation,
    Loss,
    Occupancy,
    OutputChunk,
    Score,
    SequenceState,
    Session,
    SessionSpec,
    StagedStack,
)
from personalpeft.backends.batch_invariance import BatchInvariance
from personalpeft.backends.tokenizer import TextMixin
from personalpeft.backends.torch.batch import Batch
from personalpeft.backends.torch.kv_cache import PagedKVCache, bytes_per_token
from personalpeft.backends.torch.lora_bank import LoRABank, StagedWeights
from personalpeft.backends.torch.model_runner import DeviceChoice, ModelRunner, choose_device
from personalpeft.backends.torch.openmp import release_threads
from personalpeft.backends.torch.ops import choose_ops
from personalpeft.backends.torch.ops.base import KV_BLOCK_SIZE
from personalpeft.backends.torch.training.logprobs import (
    ReferenceReader,
    group_by_tokens,
    read_hidden,
)
from personalpeft.backends.torch.training.reference_cache import ReferenceCache
from personalpeft.backends.torch.training.session import FrozenBelow, TorchSession, advance
from personalpeft.base_models.types import Base

_SCORE_TOKENS = 1024
# Differences due to rounding, nats per token (measured: docs/benchmarks/index.md).
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
# Cache tokens for each row beside the longest one.
_TOKENS_A_ROW = 512
# Share of memory for the cache: of a CPU's total, of a GPU's free.
_MEMORY_SHARE = {"cpu": 1 / 8, "cuda": 1 / 2}


class TorchBackend(TextMixin):
    """See ``Backend``. Supports transformers models with the card's target modules.

    Args:
        base: The base model.
        slots: Size of the adapter bank.
        rows: Most sequences in a batch.
        where: Device and dtype; None chooses them.
        cache: For compiled kernels, product choices and reference outputs; None caches nothing.
    """

    name = "torch"

    def __init__(
        self,
        base: Base,
        *,
        slots: int = 8,
        rows: int = 16,
        where: DeviceChoice | None = None,
        cache: Path | None = None,
    ) -> None:
        where = where or choose_device()
        super().__init__(base)
        self.base = base
        self.slots, self.rows = slots, rows
        kernels, reason = choose_ops(where.device, where.dtype, cache)
        self.logprob_tolerance = _TOLERANCE.get(where.dtype, _TOLERANCE[torch.float32])
        self._model = ModelRunner(base, where, kernels, cache)
        # Results of torch's own operations depend on the batch.
        invariant = kernels.batch_invariant and self._model.batch_invariant
        self.batch_invariance = BatchInvariance.HOLDS if invariant else BatchInvariance.NONE
        self.description = f"{where.reason}, {reason}"
        self._references = ReferenceReader(
            self._model, ReferenceCache(base.digest, f"{where.dtype}, {self.description}", cache)
        )
        self._bank = LoRABank(
            base.architecture,
            slots=self.slots,
            dtype=where.dtype,
            device=where.device,
            kernels=kernels,
        )
        blocks = _blocks(self._model, self.rows)
        pool = PagedKVCache(
            self._model.module.config,
            blocks,
            dtype=where.dtype,
            device=where.device,
            kernels=kernels,
        )
        self.max_length = min(blocks * KV_BLOCK_SIZE, base.card.context)
        self._batch = Batch(self._model, self._tokenizer, self._bank, pool, blocks, rows=self.rows)
        release_threads()  # The threads that loaded the model.

    def stage(self, adapter: AdapterStack) -> StagedStack:
        return self._bank.stage(adapter)

    def attach(self, key: str, staged: StagedStack) -> None:
        if not isinstance(staged, StagedWeights):
            raise TypeError("the stack must be staged by this backend")
        self._bank.put(key, staged)

    def detach(self, key: str) -> None:
        if self._batch.uses(key):
            raise RuntimeError("a row of the batch uses this stack; remove it first")
        self._bank.drop(key)

    def admit(self, sequence: SequenceState) -> int | None:
        return self._batch.admit(sequence)

    def step(self) -> Sequence[OutputChunk]:
        return self._batch.step()

    def remove(self, number: int) -> None:
        self._batch.remove(number)

    def clear_cache(self) -> None:
        self._batch.clear_cache()

    def occupancy(self) -> Occupancy:
        return self._batch.occupancy()

    def check_integrity(self) -> None:
        self._batch.check_integrity()
        self._bank.check_integrity()

    def score(
        self, items: Sequence[Continuation], stack: str | None, *, kl: bool = False
    ) -> tuple[Score, ...]:
        scores = []
        for chunk in group_by_tokens(items, _SCORE_TOKENS):
            with torch.inference_mode():
                with self._model.exclusive(self._bank.single_adapter_lora(stack)):
                    outputs = read_hidden(self._model, chunk)
                if kl:
                    with self._model.exclusive():
                        base_outputs = read_hidden(self._model, chunk)
                    divergences = [
                        float((base.logp.exp() * (base.logp - output.logp)).sum(-1).mean())
                        for base, output in zip(base_outputs, outputs, strict=True)
                    ]
                for i, output in enumerate(outputs):
                    scores.append(
                        Score(
                            float(output.token_logp.mean()),
                            divergences[i] if kl else None,
                            tuple(output.token_logp.tolist()),
                        )
                    )
        return tuple(scores)

    def session(self, spec: SessionSpec) -> Session:
        key = spec.base_key
        frozen_below = FrozenBelow(
            self._bank.attachment_id(key),
            self._bank.single_adapter_lora(key),
            self._bank.fused_weights(key),
            self._references,
        )
        return TorchSession(self._model, spec, frozen_below)

    def advance(
        self, sessions: Sequence[Session], terms: Sequence[Sequence[Loss]], rates: Sequence[float]
    ) -> tuple[float, ...]:
        torch_sessions = [session for session in sessions if isinstance(session, TorchSession)]
        if len(torch_sessions) < len(sessions) or len(set(torch_sessions)) < len(torch_sessions):
            raise ValueError("sessions must be distinct sessions of this backend")
        return advance(self._model, torch_sessions, terms, rates)

    def fingerprint(self) -> str:
        return self._model.fingerprint()

    def close(self) -> None:
        """Release the model. Its memory is freed with the last reference."""
        del self._batch, self._bank, self._references, self._model


def _blocks(model: ModelRunner, rows: int) -> int:
    """Return the number of cache blocks: for the longest row and a part for each other."""
    config, where = model.module.config, model.where
    if where.device.type == "cuda":
        memory, _ = torch.cuda.mem_get_info(where.device)
    else:
        memory = (
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            if hasattr(os, "sysconf")
            else 2**33
        )
    share = _MEMORY_SHARE.get(where.device.type, _MEMORY_SHARE["cpu"])
    fits = int(memory * share) // bytes_per_token(config, where.dtype)
    return max(1, min(model.base.card.context + rows * _TOKENS_A_ROW, fits) // KV_BLOCK_SIZE)
