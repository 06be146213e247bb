"""The operations of a decoding step in torch calls, for any device, and the shapes they work on.

Invariants: subclasses of ``Ops`` compute the same faster, up to rounding, and are tested against
it. None keeps state between calls.
Shapes: T tokens, each of one row. Tensors are contiguous and in the base's dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from personalpeft.adapters.types import Matrix
from personalpeft.backends.torch.ops.packed_matmul import PackedMatmul
from personalpeft.backends.torch.ops.training_ops import Heads, TrainingOps
from personalpeft.base_models.mapped_weights import MappedTensor

# Tokens in a block of the key-value cache.
KV_BLOCK_SIZE = 32
# Tokens of one row in a tile of attention.
_TILE = 8


@dataclass(frozen=True, slots=True)
class StackedLoRAWeights:
    """The slots of one group of projections that read the same input, such as q, k and v.

    Attributes:
        a: ``[slots, layers, sections * max_rank, inputs]``.
        b: ``[slots, layers, max_rank, outputs]``, with the outputs of the sections side by side.
        ends: Where each section's outputs end.

    Rows beyond a slot's rank are zero.
    """

    a: Tensor
    b: Tensor
    ends: tuple[int, ...]

    @property
    def max_rank(self) -> int:
        return self.b.shape[2]

    def slot(self, slot: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return views of a slot's first rows.

        A is ``[layers, sections, rank, inputs]``, B is ``[layers, rank, outputs]``.
        """
        a = self.a[slot].unflatten(1, (len(self.ends), self.max_rank))
        return a[:, :, :rank], self.b[slot, :, :rank]


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
        kv_indices: Where each token is written, ``block * KV_BLOCK_SIZE + offset``, int64 ``[T]``.
        block_table: The blocks of each decoded token's row, int32 ``[n, max_blocks]``.
        lengths: How many tokens each decoded token sees, int32 ``[n]``. The first n tokens of the
            pass are the decoded ones.
    """

    kv_indices: Tensor
    block_table: Tensor
    lengths: Tensor

    @cached_property
    def tiles(self) -> Tensor:
        """Each decoded token as a tile of its own; see ``PrefillChunk.tiles``."""
        rows = torch.arange(len(self.lengths), dtype=torch.int32)
        return torch.stack([rows, torch.ones_like(rows), rows, self.lengths], dim=1)


class KVLayer(NamedTuple):
    """The paged keys and values of one layer of the model.

    Attributes:
        keys: ``[blocks, kv_heads, dim, KV_BLOCK_SIZE]``.
        values: ``[blocks, kv_heads, KV_BLOCK_SIZE, dim]``.
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How a layer of the model attends.

    Attributes:
        scaling: Factor of the scores.
        softcap: Limit of the scores (Gemma 2, section 2); 0 for none.
        window: How many tokens each token sees; 0 for all.
    """

    scaling: float
    softcap: float = 0.0
    window: int = 0


class NoKernels(RuntimeError):
    """Faster operations cannot be compiled or used. The message is a reason for ``doctor``."""


class Ops:
    """The operations for one device and one dtype, which is that of the base.

    Attributes:
        batch_invariant: Whether a row's bits depend on that row alone, and not on how its prompt
            was chunked.
        training: The operations of a training step; None where autograd computes them.
        matmul: Our product of matrices; None where libraries compute them.
    """

    batch_invariant = False
    training: TrainingOps | None = None
    matmul: PackedMatmul | None = None

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros on the device. On a CPU, pages of memory are taken when first written."""
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        zeros = np.zeros(math.prod(shape) * self.dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(zeros).view(self.dtype).view(shape)

    def pack_weights(self, source: Matrix, target: Tensor, factor: float) -> bool:
        """Write ``source * factor`` to a tensor in host memory, and return whether all is finite.

        Runs on the calling thread alone, because a step may run beside it.

        Args:
            source: Three-dimensional, dense.
            target: Of the same shape; may be strided.
            factor: Multiplied in float32.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = torch.from_numpy(np.multiply(source, np.float32(factor), dtype=np.float32))
        target.copy_(scaled)
        return bool(torch.isfinite(scaled).all())

    def apply_lora(
        self, x: Tensor, y: Tensor, mapping: LoRAMapping, weights: StackedLoRAWeights, layer: int
    ) -> None:
        """Add ``B (A x)`` of each token's slot to ``y`` in place.

        LoRA (Hu et al. 2021, eq. 3) with an adapter per token (Punica's SGMV, Chen et al. 2023).

        Args:
            x: ``[T, inputs]``.
            y: ``[T, outputs]``.
            mapping: The slot of each token.
            weights: The slots.
            layer: The layer of the model.
        """
        slots = mapping.slots.long()
        a, b = weights.a[slots, layer], weights.b[slots, layer]
        shrunk = torch.bmm(a, x[:, :, None])[:, :, 0]
        begin = 0
        for section, end in enumerate(weights.ends):
            inputs = shrunk[:, None, section * weights.max_rank : (section + 1) * weights.max_rank]
            y[:, begin:end] += torch.bmm(inputs, b[:, :, begin:end])[:, 0]
            begin = end

    def write_kv(self, k: Tensor, v: Tensor, kv: KVLayer, metadata: AttentionMetadata) -> None:
        """Write keys and values to the paged cache.

        Args:
            k: ``[T, kv_heads, dim]``.
            v: ``[T, kv_heads, dim]``.
            kv: The cache of one layer.
            metadata: Where each token is written.
        """
        block, offset = metadata.kv_indices // KV_BLOCK_SIZE, metadata.kv_indices % KV_BLOCK_SIZE
        kv.keys[block, :, :, offset] = k
        kv.values[block, :, offset] = v

    def rotate_and_write_kv(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: Heads,
        kv: KVLayer,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Rotate queries and keys (RoFormer, Su et al. 2021), and write keys and values.

        Args:
            qkv: ``[T, (heads + 2 kv_heads) * dim]``; only rows must be contiguous.
            cos: ``[T, dim]``.
            sin: ``[T, dim]``.
            heads: The shape of attention.
            kv: The cache of one layer.
            metadata: Where each token is written.

        Returns:
            The queries, ``[T, heads, dim]``.
        """
        kv_size = heads.kv_heads * heads.dim
        q, k, v = (
            part.unflatten(1, (-1, heads.dim))
            for part in qkv.split([heads.heads * heads.dim, kv_size, kv_size], dim=1)
        )
        cos, sin = cos[:, None], sin[:, None]
        q, k = apply_rotary_embedding(q, cos, sin), apply_rotary_embedding(k, cos, sin)
        self.write_kv(k, v.contiguous(), kv, metadata)
        return q

    def paged_attention(
        self, q: Tensor, kv: KVLayer, metadata: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        """Return the attention of decoded tokens (PagedAttention, Kwon et al. 2023, eq. 4).

        Args:
            q: Queries of the decoded tokens, ``[n, heads, dim]``.
            kv: The cache of one layer.
            metadata: The rows' blocks and lengths.
            params: Scaling, window and soft cap.

        Returns:
            ``[n, heads, dim]``.
        """
        out = torch.empty_like(q)
        for row, length in enumerate(metadata.lengths.tolist()):
            k, v = _gather_kv(kv, metadata.block_table[row], length)
            first = max(0, length - params.window) if params.window else 0
            out[row] = attention(q[row : row + 1], k[first:], v[first:], None, params)[0]
        return out

    def prefill_attention(
        self, q: Tensor, kv: KVLayer, chunk: PrefillChunk, params: AttentionParams
    ) -> Tensor:
        """Return the causal attention of a chunk's tokens.

        Args:
            q: Queries of the chunk, ``[tokens, heads, dim]``.
            kv: The cache of one layer, which has the chunk's keys and values.
            chunk: The tokens' place in their row.
            params: Scaling, window and soft cap.

        Returns:
            ``[tokens, heads, dim]``.
        """
        k, v = _gather_kv(kv, chunk.blocks, chunk.length)
        key_positions = torch.arange(chunk.length, device=q.device)
        query_positions = key_positions[chunk.length - len(q) :, None]
        seen = key_positions <= query_positions
        if params.window:
            seen &= query_positions - key_positions < params.window
        return attention(q, k, v, seen, params)

    def unpack(self, matrix: MappedTensor, rows: slice, columns: slice, out: Tensor) -> None:
        """Unpack a part of a matrix, in transformers' order of rows.

        Args:
            matrix: The matrix, as its file stores it.
            rows: The rows; both ends are given.
            columns: The columns, from the begin of a block to the end of one.
            out: Takes the numbers, rounded once to the dtype; only rows must be contiguous.
        """
        out.copy_(torch.from_numpy(matrix.numbers(rows, columns)))

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return ``x / rms(x) * weight`` over the last dimension (Zhang & Sennrich 2019, eq. 4).

        Args:
            x: ``[..., size]``.
            weight: ``[size]``. The quotient is rounded to the dtype before it is multiplied.
            epsilon: Added to the mean square.
        """
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon)
        return weight * (x32 * scale).to(x.dtype)

    def rms_norm_backward(self, x: Tensor, weight: Tensor, grad: Tensor, epsilon: float) -> Tensor:
        """Return the gradient of ``rms_norm`` with respect to ``x``.

        Args:
            x: ``[..., size]``.
            weight: ``[size]``.
            grad: Gradient of the result, like ``x``.
            epsilon: Added to the mean square.
        """
        x32, inner = x.float(), grad.float() * weight.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon)
        correction = scale.square() * (inner * x32).mean(-1, keepdim=True)
        return (scale * (inner - x32 * correction)).to(x.dtype)

    def argmax(self, x: Tensor) -> Tensor:
        """Return the first index of the largest value of each row of ``[rows, n]``, int64."""
        return x.argmax(-1)


def apply_rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``[..., dim]`` rotated by angles with these cosines and sines (Su et al. 2021)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _gather_kv(kv: KVLayer, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return copies of a row's first ``length`` keys and values, ``[length, heads, dim]`` each."""
    used = blocks[: -(-length // KV_BLOCK_SIZE)].long()
    k = kv.keys[used].permute(0, 3, 1, 2).flatten(0, 1)
    v = kv.values[used].permute(0, 2, 1, 3).flatten(0, 1)
    return k[:length], v[:length]


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: AttentionParams
) -> Tensor:
    """Return the attention of queries over keys, ``[n, heads, dim]``.

    Args:
        q: Queries, ``[n, heads, dim]``.
        k: Keys, ``[m, kv_heads, dim]``.
        v: Values, ``[m, kv_heads, dim]``.
        mask: ``[n, m]``, True where visible. It covers the window.
        params: Scaling and soft cap.
    """
    group = q.shape[1] // k.shape[1]
    # Repeated by hand: torch's enable_gqa is slow on CPUs.
    q, k, v = (
        q.transpose(0, 1),
        *(t.transpose(0, 1).repeat_interleave(group, dim=0) for t in (k, v)),
    )
    scaling, softcap = params.scaling, params.softcap
    if softcap:
        scores = softcap * torch.tanh((q.float() @ k.float().transpose(1, 2)) * scaling / softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ v.float()).to(q.dtype).transpose(0, 1)
    out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scaling)
    return out[0].transpose(0, 1)
