"""The torch backend: model code, batching, slots and training.

Transformers has the model code of bases that ``llama`` does not compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from personalpeft.adapters.types import AdapterStack
from personalpeft.backends.base import Continuation, Score, Session, SessionSpec, StagedStack
from personalpeft.backends.batch_backend import BatchBackend
from personalpeft.backends.openmp import release_threads
from personalpeft.backends.sampler import top_logprobs
from personalpeft.backends.torch.batch import Batch
from personalpeft.backends.torch.decode_graphs import DecodeGraphs, Recorder, record_cuda_graph
from personalpeft.backends.torch.device import (
    NOT_MAPPABLE,
    DeviceChoice,
    WeightsChoice,
    choose_device,
    choose_weights,
    memory_to_plan,
)
from personalpeft.backends.torch.kv_cache import PagedKVCache, bytes_per_token
from personalpeft.backends.torch.lora_bank import LoRABank, StagedWeights, default_slots
from personalpeft.backends.torch.model_runner import ModelRunner
from personalpeft.backends.torch.ops import choose_ops
from personalpeft.backends.torch.ops.base import KV_BLOCK_SIZE
from personalpeft.backends.torch.training.logprobs import read_outputs
from personalpeft.backends.torch.training.packing import group_by_prefix
from personalpeft.backends.torch.training.reference_cache import ReferenceCache
from personalpeft.backends.torch.training.session import TorchSession, TrainingPasses
from personalpeft.base_models.mapped_weights import map_weights
from personalpeft.base_models.resolve import unpacked_folder
from personalpeft.base_models.types import Base
from personalpeft.errors import WeightsError
from personalpeft.settings import WeightsMode
from personalpeft.types import Progress

# Tokens of one scoring pass, and the most bytes of their logits.
_SCORE_TOKENS, _SCORE_BYTES = 1024, 64 * 2**20
# Differences due to rounding, nats per token (measured: docs/benchmarks/index.md).
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
# Cache tokens for each row beside the longest one.
_TOKENS_A_ROW = 512
# Share of memory for the cache: of a CPU's total, of a GPU's free.
_MEMORY_SHARE = {"cpu": 1 / 8, "cuda": 1 / 2}


class TorchBackend(BatchBackend, TrainingPasses):
    """See ``Backend``. Supports transformers models with the card's target modules.

    Args:
        base: The base model.
        slots: Size of the adapter bank; None for ``default_slots``.
        rows: Most sequences in a batch.
        where: Device and dtype; None chooses them.
        cache: For compiled kernels, product choices and reference outputs; None caches nothing.
        weights: Where the base's weights are kept.
        record: How decoding steps are recorded; None: as CUDA graphs on a GPU, else not at all.
        progress: Called with a stage and its progress, 0 to 1, while weights are unpacked.
    """

    name = "torch"
    _batch: Batch

    def __init__(
        self,
        base: Base,
        *,
        slots: int | None = 8,
        rows: int = 16,
        where: DeviceChoice | None = None,
        cache: Path | None = None,
        weights: WeightsMode = "auto",
        record: Recorder | None = None,
        progress: Progress = lambda stage, done: None,
    ) -> None:
        where = where or choose_device()
        super().__init__(base)
        self.rows = rows
        ops, reason = choose_ops(where.device, where.dtype, cache)
        self.logprob_tolerance = _TOLERANCE[where.dtype]
        # What float32 holds is the file's own numbers, so that nothing is trained on rounded ones.
        full = where.dtype is torch.float32
        unpacked = partial(unpacked_folder, base, full=full, progress=progress)
        kept = choose_weights(partial(map_weights, base), where, weights)
        try:
            self._model = ModelRunner(base, where, ops, cache, kept.mapped or unpacked())
        except WeightsError:
            if weights != "auto" or kept.mapped is None:
                raise
            # A model of a kind whose file has other names, such as a multimodal one.
            kept = WeightsChoice(None, NOT_MAPPABLE)
            self._model = ModelRunner(base, where, ops, cache, unpacked())
        # Results of torch's own operations depend on the batch.
        self.batch_invariant = ops.batch_invariant and self._model.batch_invariant
        self.maps_weights = kept.mapped is not None
        computed = ", ".join(filter(None, (where.reason, reason, kept.description)))
        logits_bytes = self._model.vocabulary_size * where.dtype.itemsize
        self._score_reads = max(1, _SCORE_BYTES // logits_bytes)
        self._references = ReferenceCache(self._model, f"{where.dtype}, {computed}", cache)
        self.slots = slots or default_slots(base.architecture, where, rows)
        self._bank = LoRABank(base.architecture, self.slots, ops)
        num_blocks = default_num_blocks(self._model, self.rows)
        kv_cache = PagedKVCache(self._model.module.config, num_blocks, ops)
        self.max_length = min(num_blocks * KV_BLOCK_SIZE, base.card.context)
        graphs = None
        self.description = computed
        if record is None and where.device.type == "cuda":
            record = record_cuda_graph
        if record is not None:
            graphs = DecodeGraphs(self._model, self._bank, kv_cache, record)
            graphs.try_recording()
            self.description = f"{computed}, {graphs.description}"
        self._batch = Batch(
            self._model,
            self._tokenizer,
            self._bank,
            kv_cache,
            rows=rows,
            max_length=self.max_length,
            graphs=None if graphs is None or graphs.failure else graphs,
        )
        release_threads()  # The threads that loaded the model.

    def stage(self, adapter: AdapterStack) -> StagedStack:
        return self._bank.stage(adapter)

    def attach(self, key: str, staged: StagedStack) -> None:
        if not isinstance(staged, StagedWeights):
            raise TypeError("the stack must be staged by this backend")
        self._bank.fill_slot(key, staged)

    def detach(self, key: str) -> None:
        self._bank.free_slot(key)

    def clear_cache(self) -> None:
        self._batch.clear_cache()

    def check_integrity(self) -> None:
        self._batch.check_integrity()
        self._bank.check_integrity()

    def score(
        self, items: Sequence[Continuation], stack: str | None, *, kl: bool = False, top: int = 0
    ) -> tuple[Score, ...]:
        scores: dict[int, Score] = {}
        for places in group_by_prefix(items, _SCORE_TOKENS, self._score_reads):
            group = [items[place] for place in places]
            with torch.inference_mode():
                with self._model.exclusive(self._bank.single_adapter_lora(stack)):
                    outputs = read_outputs(self._model, group)
                divergences: list[float | None] = [None] * len(outputs)
                if kl:
                    with self._model.exclusive():
                        base_outputs = read_outputs(self._model, group)
                    # Not from log-probs: those of all tokens in float32 took most of the memory.
                    divergences = [
                        float(output.kl_div(slice(None), base, slice(None)).mean())
                        for base, output in zip(base_outputs, outputs, strict=True)
                    ]
                for place, each, kl_div in zip(places, outputs, divergences, strict=True):
                    scores[place] = Score(
                        float(each.token_logp.mean()),
                        kl_div,
                        tuple(each.token_logp.tolist()),
                        top_logprobs(each.logp.cpu().numpy(), top) if top else (),
                    )
        return tuple(scores[place] for place in range(len(items)))

    def session(self, spec: SessionSpec) -> Session:
        return TorchSession(self._model, self._bank, self._references, spec)

    def close(self) -> None:
        """Release the model. Its memory is freed with the last reference."""
        del self._batch, self._bank, self._references, self._model


def default_num_blocks(model: ModelRunner, rows: int) -> int:
    """Return the number of cache blocks, as far as the memory allows.

    On a GPU each row may have the base's context. On a CPU one row may, and the others a part.
    """
    where, context = model.where, model.base.card.context
    on_gpu = where.device.type == "cuda"
    share = _MEMORY_SHARE["cuda" if on_gpu else "cpu"]
    fits = int(memory_to_plan(where.device) * share) // bytes_per_token(
        model.module.config, where.dtype
    )
    wanted = rows * context if on_gpu else context + rows * _TOKENS_A_ROW
    return max(1, min(wanted, fits) // KV_BLOCK_SIZE)
