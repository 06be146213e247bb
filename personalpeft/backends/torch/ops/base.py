"""The few inner operations of a decoding step that decide its speed, and the shapes that they work on.

Invariants: every implementation computes what ``plain`` computes, up to rounding; none keeps anything between calls.
Shapes: T tokens, of which each belongs to one row; numbers are contiguous and in the base's own format.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from personalpeft.adapters.types import Matrix

if TYPE_CHECKING:
    from personalpeft.backends.torch.ops.training_ops import TrainingOps

# Tokens to a block of the key-value cache.
BLOCK = 32


@dataclass(frozen=True, slots=True)
class StackedLoRAWeights:
    """The slots of one group of projections that read the same input, such as q, k and v.

    ``a`` is ``[slots, blocks, sections * capacity, inputs]``, ``b`` ``[slots, blocks, capacity, outputs]``, where the
    outputs of the sections lie side by side and end at ``ends``. What a slot's rank does not fill is zero.
    """

    a: Tensor
    b: Tensor
    ends: tuple[int, ...]

    @property
    def max_rank(self) -> int:
        return self.b.shape[2]


@dataclass(frozen=True, slots=True)
class LoRAMapping:
    """Which slot each token points to (int32 ``[T]``, 0 for none), and the rank that each slot holds (int32
    ``[slots]``).
    """

    slots: Tensor
    ranks: Tensor


# Tokens of one row that are worked on together.
_TILE = 8


@dataclass(frozen=True)
class PrefillChunk:
    """A stretch of one row's prompt in a pass: its tokens are ``begin`` to ``end`` of the pass, and the last of them is
    the row's token ``length - 1``. ``blocks`` (int32) are the row's.
    """

    begin: int
    end: int
    length: int
    blocks: Tensor

    @cached_property
    def tiles(self) -> Tensor:
        """The chunk in tiles of few tokens, int32 ``[n, 4]``: first token, count, row, tokens that the first one sees."""
        count = self.end - self.begin
        first = range(0, count, _TILE)
        tiles = [(t, min(_TILE, count - t), 0, self.length - count + t + 1) for t in first]
        return torch.tensor(tiles, dtype=torch.int32)


@dataclass(frozen=True)
class AttentionMetadata:
    """Where a pass finds and puts keys and values.

    ``writes`` (int64 ``[T]``) is each token's own place in the pool: block times ``BLOCK`` plus offset. The first
    ``len(lengths)`` tokens are decoded: token i sees the first ``lengths[i]`` (int32) tokens of its row, in the blocks
    that ``table[i]`` (int32 ``[n, longest]``) names.
    """

    write_slots: Tensor
    block_table: Tensor
    lengths: Tensor

    @cached_property
    def tiles(self) -> Tensor:
        """Each decoded token as a tile of its own; see ``Chunk.tiles``."""
        rows = torch.arange(len(self.lengths), dtype=torch.int32)
        return torch.stack([rows, torch.ones_like(rows), rows, self.lengths], dim=1)


class Ops(Protocol):
    """One way to do them, for one device and number format."""

    @property
    def name(self) -> str: ...

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's bits depend on that row alone, and a prompt's not on the parts that it was read in."""
        ...

    @property
    def training(self) -> TrainingOps | None:
        """The operations of a training step; None where the framework's own serve."""
        ...

    def pack_weights(self, source: Matrix, place: Tensor, factor: float) -> bool:
        """Writes ``source * factor``, three-dimensional, to a place of the same shape in host memory, which may be
        strided; whether all of it is finite. Uses the calling thread alone, since it runs beside a step.
        """
        ...

    def apply_lora(
        self, x: Tensor, y: Tensor, pointers: LoRAMapping, shelf: StackedLoRAWeights, block: int
    ) -> None:
        """Adds ``B (A x)`` of each token's slot to ``y`` in place; x is ``[T, inputs]``, y ``[T, outputs]``."""
        ...

    def write_kv(
        self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: AttentionMetadata
    ) -> None:
        """Puts ``[T, heads, dim]`` keys and values into the pool: ``[pool, heads, dim, BLOCK]`` and ``[pool, heads,
        BLOCK, dim]``.
        """
        ...

    def paged_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        places: AttentionMetadata,
        *,
        scaling: float,
        softcap: float,
        window: int,
    ) -> Tensor:
        """Attention of the decoded tokens, ``[n, heads, dim]``, over their rows. ``softcap`` and ``window`` 0: none."""
        ...

    def prefill_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        chunk: PrefillChunk,
        *,
        scaling: float,
        softcap: float,
        window: int,
    ) -> Tensor:
        """Attention of a chunk's tokens, ``[end - begin, heads, dim]``, each over its row up to itself."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """``x / rms(x) * weight`` over the last dimension (Zhang & Sennrich 2019), rounded before the weight."""
        ...

    def argmax(self, x: Tensor) -> Tensor:
        """Where each row of ``[rows, n]`` is largest, int64 ``[rows]``; of equals the first."""
        ...
