"""The operations of a decoding step, and the shapes they work on.

Invariants: each implementation computes what ``ReferenceOps`` computes, up to rounding. None keeps
state between calls.
Shapes: T tokens, each of one row. Tensors are contiguous and in the base's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from personalpeft.adapters.types import Matrix
from personalpeft.backends.torch.ops.training_ops import TrainingOps

# Tokens in a block of the key-value cache.
KV_BLOCK_SIZE = 32
# Tokens of one row in a tile of attention.
_TILE = 8


@dataclass(frozen=True, slots=True)
class StackedLoRAWeights:
    """The slots of one group of projections that read the same input, such as q, k and v.

    Attributes:
        a: ``[slots, blocks, sections * max_rank, inputs]``.
        b: ``[slots, blocks, max_rank, outputs]``, with the outputs of the sections side by side.
        ends: Where each section's outputs end.

    Rows beyond a slot's rank are zero.
    """

    a: Tensor
    b: Tensor
    ends: tuple[int, ...]

    @property
    def max_rank(self) -> int:
        return self.b.shape[2]


@dataclass(frozen=True, slots=True)
class LoRAMapping:
    """The slot of each token (int32 ``[T]``, 0 for none) and the rank of each slot (int32)."""

    slots: Tensor
    ranks: Tensor


@dataclass(frozen=True)
class PrefillChunk:
    """Part of one row's prompt in a pass.

    Attributes:
        begin: Its first token in the pass.
        end: The end of its tokens in the pass.
        length: How many tokens of the row its last token sees, including itself.
        blocks: The row's blocks, int32.
    """

    begin: int
    end: int
    length: int
    blocks: Tensor

    @cached_property
    def tiles(self) -> Tensor:
        """Tiles, int32 ``[n, 4]``: first token, count, row, number of tokens the first sees."""
        count = self.end - self.begin
        first = range(0, count, _TILE)
        tiles = [(t, min(_TILE, count - t), 0, self.length - count + t + 1) for t in first]
        return torch.tensor(tiles, dtype=torch.int32)


@dataclass(frozen=True)
class AttentionMetadata:
    """Where a pass reads and writes keys and values.

    Attributes:
        write_slots: Each token's slot, ``block * KV_BLOCK_SIZE + offset``, int64 ``[T]``.
        block_table: The blocks of each decoded token's row, int32 ``[n, max_blocks]``.
        lengths: How many tokens each decoded token sees, int32 ``[n]``. The first n tokens of the
            pass are the decoded ones.
    """

    write_slots: Tensor
    block_table: Tensor
    lengths: Tensor

    @cached_property
    def tiles(self) -> Tensor:
        """Each decoded token as a tile of its own; see ``PrefillChunk.tiles``."""
        rows = torch.arange(len(self.lengths), dtype=torch.int32)
        return torch.stack([rows, torch.ones_like(rows), rows, self.lengths], dim=1)


class Ops(Protocol):
    """The operations for one device and dtype."""

    @property
    def name(self) -> str: ...

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's bits depend on that row alone, and not on how its prompt was chunked."""
        ...

    @property
    def training(self) -> TrainingOps | None:
        """The operations of a training step; None where autograd computes them."""
        ...

    def pack_weights(self, source: Matrix, target: Tensor, factor: float) -> bool:
        """Write ``source * factor`` to a tensor in host memory, and return whether all is finite.

        Runs on the calling thread alone, because a step may run beside it.

        Args:
            source: Three-dimensional, dense.
            target: Of the same shape; may be strided.
            factor: Multiplied in float32.
        """
        ...

    def apply_lora(
        self, x: Tensor, y: Tensor, mapping: LoRAMapping, weights: StackedLoRAWeights, block: int
    ) -> None:
        """Add ``B (A x)`` of each token's slot to ``y`` in place.

        LoRA (Hu et al. 2021, eq. 3) with an adapter per token (Punica's SGMV, Chen et al. 2023).

        Args:
            x: ``[T, inputs]``.
            y: ``[T, outputs]``.
            mapping: The slot of each token.
            weights: The slots.
            block: The block of the model.
        """
        ...

    def write_kv(
        self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata
    ) -> None:
        """Write keys and values to the paged cache.

        Args:
            k: ``[T, heads, dim]``.
            v: ``[T, heads, dim]``.
            keys: ``[blocks, heads, dim, KV_BLOCK_SIZE]``.
            values: ``[blocks, heads, KV_BLOCK_SIZE, dim]``.
            metadata: Each token's slot.
        """
        ...

    def paged_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        metadata: AttentionMetadata,
        *,
        scaling: float,
        softcap: float,
        window: int,
    ) -> Tensor:
        """Return the attention of decoded tokens (PagedAttention, Kwon et al. 2023, eq. 4).

        Args:
            q: ``[n, heads, dim]``, of the decoded tokens.
            keys: ``[blocks, kv_heads, dim, KV_BLOCK_SIZE]``.
            values: ``[blocks, kv_heads, KV_BLOCK_SIZE, dim]``.
            metadata: Where each row's keys and values are.
            scaling: Factor of the scores.
            softcap: Limit of the scores (Gemma 2, section 2); 0 for none.
            window: How many tokens each token sees; 0 for all.

        Returns:
            ``[n, heads, dim]``.
        """
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
        """Return the causal attention of a chunk's tokens; arguments as in ``paged_attention``."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return ``x / rms(x) * weight`` over the last dimension (Zhang & Sennrich 2019, eq. 4).

        The quotient is rounded to the dtype before it is multiplied by the weight.
        """
        ...

    def argmax(self, x: Tensor) -> Tensor:
        """Return the first index of the largest value of each row of ``[rows, n]``, int64."""
        ...
