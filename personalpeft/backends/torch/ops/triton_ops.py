"""The operations as Triton kernels for NVIDIA GPUs, compiled at the first use of a shape.

Invariant: nothing waits for the device, and grids depend on shapes alone. So a whole step can be
queued, or captured as a graph, before its first kernel has run.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from personalpeft.backends.torch.ops import triton_kernels
from personalpeft.backends.torch.ops.base import (
    AttentionMetadata,
    AttentionParams,
    KVLayer,
    LoRAMapping,
    NoKernels,
    Ops,
    PrefillChunk,
    StackedLoRAWeights,
)
from personalpeft.backends.torch.ops.self_test import depends_on_batch, find_wrong_kernel

# What the kernels are written for.
_TILE: int = triton_kernels.TILE.value
_OUTPUTS: int = triton_kernels.OUTPUTS.value
_SPLIT_BLOCKS: int = triton_kernels.SPLIT_BLOCKS.value
# Values that one program writes to the cache.
_WRITE_SIZE = 1024
# Query rows of a tile of attention.
_QUERY_ROWS = 64


class TritonOps(Ops):
    """Operations on host memory and those torch does well are inherited."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self._tiles: dict[tuple[int, ...], tuple[Tensor, int]] = {}

    def apply_lora(
        self, x: Tensor, y: Tensor, mapping: LoRAMapping, weights: StackedLoRAWeights, layer: int
    ) -> None:
        tokens, sections, capacity = len(x), len(weights.ends), weights.max_rank
        shrunk = torch.empty((tokens, sections, capacity), dtype=torch.float32, device=x.device)
        triton_kernels.shrink[(tokens, triton.cdiv(capacity, _TILE), sections)](
            x,
            shrunk,
            mapping.slots,
            mapping.ranks,
            weights.a[0, layer],
            weights.a.stride(0),
            tokens,
            x.shape[1],
            capacity,
            sections,
        )
        tiles, aligned = self._split_tiles(weights.ends)
        triton_kernels.expand[(tokens, len(tiles))](
            shrunk,
            y,
            mapping.slots,
            mapping.ranks,
            weights.b[0, layer],
            weights.b.stride(0),
            tiles,
            tokens,
            y.shape[1],
            capacity,
            sections,
            ALIGNED=aligned,
        )

    def write_kv(self, k: Tensor, v: Tensor, kv: KVLayer, metadata: AttentionMetadata) -> None:
        tokens, heads, dim = k.shape
        write_size = min(_WRITE_SIZE, triton.next_power_of_2(heads * dim))
        grid = (tokens, triton.cdiv(heads * dim, write_size))
        triton_kernels.write_kv[grid](
            k, v, *kv, metadata.kv_indices, heads, dim, WRITE_SIZE=write_size
        )

    def paged_attention(
        self, q: Tensor, kv: KVLayer, metadata: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        tokens, heads, dim = q.shape
        table, lengths = metadata.block_table, metadata.lengths
        splits = triton.cdiv(table.shape[1], _SPLIT_BLOCKS)
        out = partial = torch.empty_like(q)
        if splits > 1:
            partial = q.new_empty((tokens, heads, splits, dim), dtype=torch.float32)
        lse = q.new_empty((tokens, heads, splits), dtype=torch.float32)
        grid = (tokens, kv.keys.shape[1], splits)
        _launch_attention(grid, q, partial, lse, kv, table, lengths, params)
        if splits > 1:
            triton_kernels.merge_splits[(tokens, heads)](
                partial, lse, out, lengths, params.window, splits, DIM=dim, WIDTH=_width(dim)
            )
        return out

    def prefill_attention(
        self, q: Tensor, kv: KVLayer, chunk: PrefillChunk, params: AttentionParams
    ) -> Tensor:
        out = torch.empty_like(q)
        kv_heads = kv.keys.shape[1]
        query_tokens = max(1, _QUERY_ROWS // triton.next_power_of_2(q.shape[1] // kv_heads))
        blocks = chunk.blocks.to(q.device)
        grid = (triton.cdiv(len(q), query_tokens), kv_heads, 1)
        # No kernel reads log-sum-exps or lengths of rows here.
        _launch_attention(grid, q, out, out, kv, blocks, blocks, params, chunk.length, query_tokens)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        y = torch.empty_like(x)
        size = x.shape[-1]
        width = triton.next_power_of_2(size)
        # One warp for 512 values.
        warps = min(8, max(1, width // 512))
        triton_kernels.rms_norm[(x.numel() // size,)](
            x, weight, y, size, epsilon, WIDTH=width, num_warps=warps
        )
        return y

    def _split_tiles(self, ends: tuple[int, ...]) -> tuple[Tensor, int]:
        """Return tiles of outputs within one section (begin, end, section), and their alignment."""
        if ends not in self._tiles:
            sections = enumerate(zip((0, *ends), ends, strict=False))
            tiles = [
                (start, min(start + _OUTPUTS, end), section)
                for section, (begin, end) in sections
                for start in range(begin, end, _OUTPUTS)
            ]
            on_device = torch.tensor(tiles, dtype=torch.int32, device=self.device)
            self._tiles[ends] = on_device, math.gcd(16, *ends)
        return self._tiles[ends]


def try_triton_ops(device: torch.device, dtype: torch.dtype) -> TritonOps:
    """Return the operations after a trial of each. Raise ``NoKernels`` if one fails.

    They claim to be batch-invariant where the trial shows it: a compiler may choose other
    instructions for another kernel.
    """
    ops = TritonOps(device, dtype)
    try:
        wrong = find_wrong_kernel(ops)
        ops.batch_invariant = not depends_on_batch(ops)
    except Exception as error:  # A compiler, a linker, a driver: each fails in its own way.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise NoKernels(f"Triton kernels do not run here: {lines[-1]}") from error
    if wrong:
        raise NoKernels(f"Triton's {wrong} gives wrong results here")
    return ops


def _launch_attention(
    grid: tuple[int, int, int],
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    kv: KVLayer,
    table: Tensor,
    lengths: Tensor,
    params: AttentionParams,
    length: int = 0,
    query_tokens: int = 0,
) -> None:
    tokens, heads, dim = q.shape
    kv_heads, scaling, softcap = kv.keys.shape[1], params.scaling, params.softcap
    group = heads // kv_heads
    padded = triton.next_power_of_2(group)
    # The kernel uses exp2, so scores are scaled by log2(e).
    log2_e = math.log2(math.e)
    triton_kernels.paged_attention[grid](
        q,
        out,
        lse,
        *kv,
        table,
        lengths,
        tokens,
        length,
        table.shape[-1],
        params.window,
        scaling / softcap if softcap else scaling * log2_e,
        softcap * log2_e,
        kv_heads,
        TOKENS=query_tokens,
        GROUP=group,
        HEADS=padded if query_tokens else max(_QUERY_ROWS, padded),
        DIM=dim,
        WIDTH=_width(dim),
        SOFTCAP=softcap > 0,
    )


def _width(dim: int) -> int:
    return max(_TILE, int(triton.next_power_of_2(dim)))
