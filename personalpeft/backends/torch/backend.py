"""The torch backend: transformers supplies the model code; rows, slots, sampling and training are ours."""

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
from personalpeft.backends.torch.ops import choose_kernels
from personalpeft.backends.torch.ops.base import BLOCK
from personalpeft.backends.torch.training.logprobs import ReferenceReader, chunks, read_hidden
from personalpeft.backends.torch.training.reference_cache import ReferenceCache
from personalpeft.backends.torch.training.session import FrozenBelow, TorchSession, advance
from personalpeft.base_models.types import Base

_SCORED_AT_ONCE = 1024
# What rounding explains, in nats a token (docs/benchmarks.md has what was measured).
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
# Places for keys and values: the longest row that the base can read, and so much for each of the others.
_TOKENS_A_ROW = 512
# Of a processor's memory an eighth, which is shared with everything else; of a GPU's, half of what the base leaves.
_MEMORY_SHARE = {"cpu": 1 / 8, "cuda": 1 / 2}


class TorchBackend(TextMixin):
    """See ``personalpeft.backends.base.Backend``. Works for any transformers model whose projections the card's targets
    name.

    ``cache`` is where compiled kernels are kept, without it none are compiled, and what the bare base says of generic answers.
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
        kernels, why = choose_kernels(where.device, where.dtype, cache)
        self.logprob_tolerance = _TOLERANCE.get(where.dtype, _TOLERANCE[torch.float32])
        self._model = ModelRunner(base, where, kernels, cache)
        # Our kernels work on each row apart; what the framework's own operations do depends on the batch.
        holds = kernels.batch_invariant and self._model.batch_invariant
        self.batch_invariance = BatchInvariance.HOLDS if holds else BatchInvariance.NONE
        self.description = f"{where.reason}, {why}"
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
        self.max_length = min(blocks * BLOCK, base.card.context)
        self._batch = Batch(self._model, self._tokenizer, self._bank, pool, blocks, rows=self.rows)
        release_threads()  # Those who helped to load.

    def stage(self, adapter: AdapterStack) -> StagedStack:
        return self._bank.stage(adapter)

    def attach(self, key: str, staged: StagedStack) -> None:
        if not isinstance(staged, StagedWeights):
            raise TypeError("this was staged for another backend")
        self._bank.put(key, staged)

    def detach(self, key: str) -> None:
        if self._batch.uses(key):
            raise RuntimeError("a row of the batch uses this stack")
        self._bank.drop(key)

    def admit(self, sequence: SequenceState) -> int | None:
        return self._batch.admit(sequence)

    def step(self) -> Sequence[OutputChunk]:
        return self._batch.step()

    def remove(self, number: int) -> None:
        self._batch.remove(number)

    def clear_cache(self) -> None:
        self._batch.forget()

    def occupancy(self) -> Occupancy:
        return self._batch.occupancy()

    def check_integrity(self) -> None:
        self._batch.check_integrity()
        self._bank.check_integrity()

    def score(
        self, items: Sequence[Continuation], stack: str | None, *, kl: bool = False
    ) -> tuple[Score, ...]:
        scores = []
        for chunk in chunks(items, _SCORED_AT_ONCE):
            with torch.inference_mode():
                with self._model.exclusive(self._bank.uniform(stack)):
                    said = read_hidden(self._model, chunk)
                if kl:
                    with self._model.exclusive():
                        bare = read_hidden(self._model, chunk)
                    apart = [
                        float((b.logp.exp() * (b.logp - s.logp)).sum(-1).mean())
                        for b, s in zip(bare, said, strict=True)
                    ]
                for i, s in enumerate(said):
                    scores.append(
                        Score(
                            float(s.token_logp.mean()),
                            apart[i] if kl else None,
                            tuple(s.token_logp.tolist()),
                        )
                    )
        return tuple(scores)

    def session(self, spec: SessionSpec) -> Session:
        key = spec.base_key
        below = FrozenBelow(
            self._bank.number(key),
            self._bank.uniform(key),
            self._bank.below(key),
            self._references,
        )
        return TorchSession(self._model, spec, below)

    def advance(
        self, sessions: Sequence[Session], terms: Sequence[Sequence[Loss]], rates: Sequence[float]
    ) -> tuple[float, ...]:
        own = [session for session in sessions if isinstance(session, TorchSession)]
        if len(own) < len(sessions) or len(set(own)) < len(own):
            raise ValueError("these are not different sessions of this backend")
        return advance(self._model, own, terms, rates)

    def fingerprint(self) -> str:
        return self._model.fingerprint()

    def close(self) -> None:
        """Lets go of the model; the memory goes with the last reference."""
        del self._batch, self._bank, self._references, self._model


def _blocks(model: ModelRunner, rows: int) -> int:
    """How many blocks the pool has: enough for the longest row and something for each of the others, if there is memory."""
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
    return max(1, min(model.base.card.context + rows * _TOKENS_A_ROW, fits) // BLOCK)
