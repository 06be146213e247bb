"""Decoding steps as CUDA graphs: one launch stands for all kernels of a step.

A step of a small model is a thousand short kernels. Queuing them takes several times as long as
running them. So a step is recorded for each padded shape, and then replayed (as vLLM does). The
first step of a shape runs without a graph, and compiles its kernels. The second one records.

Invariants: a recording reads its inputs from one buffer, and everything else from memory that it
keeps alive. Padding rows use a spare block of the cache, and change no bit of the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from personalpeft.backends.torch.host_to_device import InputBuffer
from personalpeft.backends.torch.kv_cache import ForwardContext, PagedKVCache
from personalpeft.backends.torch.lora_bank import LoRABank
from personalpeft.backends.torch.model_runner import ModelRunner
from personalpeft.backends.torch.ops.base import KV_BLOCK_SIZE, AttentionMetadata

_log = logging.getLogger(__name__)

# Rows of recordings. Beyond the last they are multiples of it.
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
# Blocks of the shortest table. Longer ones are powers of two.
_BLOCKS = 32

Step: TypeAlias = Callable[[], Tensor]
"""Queues the kernels of a step and returns its logits."""

Recorder: TypeAlias = Callable[[Step], Step]
"""Records a step that has run before. The recording writes to the same memory each time.

It may raise ``RuntimeError``.
"""


def record_cuda_graph(step: Step) -> Step:
    """Record a step as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may allocate memory meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


class DecodeInputs(NamedTuple):
    """What a step of n decoding rows reads.

    Attributes:
        tokens: ``[n]``.
        positions: ``[n]``.
        kv_indices: Where each token's keys and values go, ``[n]``.
        slots: The rows' adapters, ``[n]``.
        lengths: How many tokens each row sees, ``[n]``.
        block_table: The rows' blocks, ``[n, blocks]``.
    """

    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    kv_indices: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]

    def padded(self, rows: int, blocks: int, spare_block: int) -> DecodeInputs:
        """Return the inputs of more rows, with a wider table.

        Args:
            rows: The new ``n``. The rows that are added write to the spare block.
            blocks: The new width of the table.
            spare_block: The block that no request uses.
        """
        more, wider = rows - len(self.tokens), blocks - self.block_table.shape[1]
        return DecodeInputs(
            np.pad(self.tokens, (0, more)),
            np.pad(self.positions, (0, more)),
            np.pad(self.kv_indices, (0, more), constant_values=spare_block * KV_BLOCK_SIZE),
            np.pad(self.slots, (0, more)),
            np.pad(self.lengths, (0, more), constant_values=1),
            np.pad(self.block_table, ((0, more), (0, wider)), constant_values=spare_block),
        )


class DecodeGraphs:
    """Run steps that read no prompts. Not thread-safe: one thread runs the batch.

    Args:
        model: The base.
        bank: The rows' adapters.
        kv_cache: The rows' keys and values.
        record: How a step is recorded.

    Attributes:
        failure: Why steps are not recorded, after one could not be.
    """

    def __init__(
        self, model: ModelRunner, bank: LoRABank, kv_cache: PagedKVCache, record: Recorder
    ) -> None:
        self._model, self._bank, self._kv_cache = model, bank, kv_cache
        self._record = record
        self._weights = bank.weights
        self._steps: dict[tuple[int, int, bool], _PaddedStep] = {}
        self.failure: str | None = None

    @property
    def description(self) -> str:
        """Whether steps are recorded, for ``doctor``."""
        return f"no CUDA graphs, slower: {self.failure}" if self.failure else "CUDA graphs"

    def try_recording(self) -> None:
        """Run one row before there are others. A recording must repeat each bit of its step."""
        spare, one = self._kv_cache.spare_block, np.ones(1, np.int64)
        row = DecodeInputs(
            tokens=one,
            positions=one,
            kv_indices=one + spare * KV_BLOCK_SIZE,
            slots=np.zeros(1, np.int32),
            lengths=np.full(1, 2, np.int32),
            block_table=np.full((1, 1), spare, np.int32),
        )
        first, second, third = (self.step(row).clone() for _ in range(3))
        if self.failure is None and not (first.equal(second) and first.equal(third)):
            self.failure = "a recorded step gives other results"

    def step(self, inputs: DecodeInputs) -> Tensor:
        """Queue one step.

        Returns:
            Logits ``[n, vocabulary]``, until the next step overwrites them.
        """
        rows, blocks = inputs.block_table.shape
        if self._weights is not self._bank.weights:
            # The slots moved, since their rank grew. Recordings would read the former ones.
            self._weights = self._bank.weights
            self._model.synchronize()
            self._steps.clear()
        shape, adapted = (_padded_rows(rows), _padded_blocks(blocks)), bool(inputs.slots.any())
        padded = inputs.padded(*shape, self._kv_cache.spare_block)
        key = *shape, adapted
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._prepare(padded, adapted=adapted)
            return step.run()[:rows]
        # First: a recorder may compute the step, and former inputs would overwrite blocks that other
        # rows have taken since.
        step.buffer.fill(padded)
        if step.recording is None and self.failure is None:
            try:
                step.recording, step.tables = self._record(step.run), self._model.rotary_tables()
            except RuntimeError as error:
                self.failure = str(error).strip().splitlines()[0]
                _log.warning("Steps are not recorded any more: %s", self.failure)
        if step.recording is None or self.failure is not None:
            return step.run()[:rows]
        # Without the model's lock: it reads no adapters that a pass activates. On a GPU its kernels
        # go between those of a pass.
        return step.recording()[:rows]

    def _prepare(self, inputs: DecodeInputs, *, adapted: bool) -> _PaddedStep:
        """Return the step of one padded shape. It has not run, which compiles its kernels."""
        # Not through this object: a cycle of references would keep the model after its end.
        model, kv_cache = self._model, self._kv_cache
        device, length = model.where.device, inputs.block_table.shape[1] * KV_BLOCK_SIZE
        buffer = InputBuffer(inputs, device)
        tokens, positions, kv_indices, slots, lengths, block_table = buffer.tensors
        reads = torch.arange(len(tokens), device=device)
        active = self._bank.batched_lora(slots) if adapted else None

        def run() -> Tensor:
            metadata = AttentionMetadata(kv_indices, block_table, lengths)
            batch = ForwardContext(kv_cache, metadata, ())
            return model.step(tokens, positions, reads, batch, active, length=length)

        return _PaddedStep(buffer, run)


@dataclass(slots=True)
class _PaddedStep:
    """The step of one padded shape, with its inputs on the device.

    ``tables`` are those that the recording reads. The model replaces one that becomes too short.
    """

    buffer: InputBuffer
    run: Step
    recording: Step | None = None
    tables: Sequence[Tensor] = ()


def _padded_rows(rows: int) -> int:
    most = _ROWS[-1]
    return next((each for each in _ROWS if each >= rows), -(-rows // most) * most)


def _padded_blocks(blocks: int) -> int:
    return max(_BLOCKS, 1 << (blocks - 1).bit_length())
