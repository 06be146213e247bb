"""The operations in C++ for CPUs. A machine without a compiler runs ``Ops`` instead."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from personalpeft.adapters.types import Matrix
from personalpeft.backends.torch.ops.base import (
    AttentionMetadata,
    AttentionParams,
    KVLayer,
    LoRAMapping,
    Ops,
    PrefillChunk,
    StackedLoRAWeights,
)
from personalpeft.backends.torch.ops.native_library import load_library
from personalpeft.backends.torch.ops.packed_matmul import PackedMatmul
from personalpeft.backends.torch.ops.training_ops import Heads, TrainingOps
from personalpeft.base_models.mapped_weights import MappedTensor


class CpuOps(Ops):
    """Raise ``NoKernels`` if this machine cannot compile or load them."""

    batch_invariant = True

    def __init__(self, cache: Path, dtype: torch.dtype) -> None:
        super().__init__(torch.device("cpu"), dtype)
        self._library = load_library(cache, dtype)
        self.training = TrainingOps(self._library)
        # This processor or the dtype may have none.
        self.matmul = PackedMatmul(self._library) if self._library.supports_matmul() else None
        self._ends: dict[tuple[int, ...], Tensor] = {}

    def pack_weights(self, source: Matrix, target: Tensor, factor: float) -> bool:
        int64x3 = ctypes.c_int64 * 3
        source = np.ascontiguousarray(source)
        pack = getattr(self._library, f"pack_weights_{source.dtype.name}")
        sizes, strides = int64x3(*source.shape), int64x3(*target.stride())
        return bool(pack(source.ctypes.data, target, sizes, strides, factor))

    def apply_lora(
        self, x: Tensor, y: Tensor, mapping: LoRAMapping, weights: StackedLoRAWeights, layer: int
    ) -> None:
        size = x.element_size()
        if weights.ends not in self._ends:
            self._ends[weights.ends] = torch.tensor(weights.ends, dtype=torch.int32)
        self._library.apply_lora(
            x,
            y,
            len(x),
            mapping.slots,
            mapping.ranks,
            weights.a.data_ptr() + layer * weights.a.stride(1) * size,
            weights.a.stride(0),
            weights.b.data_ptr() + layer * weights.b.stride(1) * size,
            weights.b.stride(0),
            weights.max_rank,
            x.shape[1],
            y.shape[1],
            self._ends[weights.ends],
            len(weights.ends),
        )

    def write_kv(self, k: Tensor, v: Tensor, kv: KVLayer, metadata: AttentionMetadata) -> None:
        self._library.write_kv(k, v, *kv, metadata.kv_indices, *k.shape)

    def rotate_and_write_kv(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: Heads,
        kv: KVLayer,
        metadata: AttentionMetadata,
    ) -> Tensor:
        q = qkv.new_empty((len(qkv), heads.heads, heads.dim))
        self._library.rotate_and_write_kv(
            qkv,
            qkv.stride(0),
            cos,
            sin,
            q,
            *kv,
            metadata.kv_indices,
            len(qkv),
            heads.heads,
            heads.kv_heads,
            heads.dim,
        )
        return q

    def paged_attention(
        self, q: Tensor, kv: KVLayer, metadata: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        return self._attend_tiles(q, kv, metadata.tiles, metadata.block_table, params)

    def prefill_attention(
        self, q: Tensor, kv: KVLayer, chunk: PrefillChunk, params: AttentionParams
    ) -> Tensor:
        return self._attend_tiles(q, kv, chunk.tiles, chunk.blocks[None], params)

    def _attend_tiles(
        self, q: Tensor, kv: KVLayer, tiles: Tensor, block_table: Tensor, params: AttentionParams
    ) -> Tensor:
        out = torch.empty_like(q)
        self._library.paged_attention(
            q,
            out,
            *kv,
            tiles,
            len(tiles),
            block_table,
            block_table.shape[1],
            q.shape[1],
            kv.keys.shape[1],
            q.shape[2],
            params.scaling,
            params.softcap,
            params.window,
        )
        return out

    def unpack(self, matrix: MappedTensor, rows: slice, columns: slice, out: Tensor) -> None:
        block = matrix.block_elements
        self._library.unpack_blocks(
            int(matrix.format),
            matrix.data.ctypes.data,
            matrix.data.strides[0],
            rows.start,
            rows.stop - rows.start,
            columns.start // block,
            (columns.stop - columns.start) // block,
            matrix.head_size,
            out,
            out.stride(0),
        )

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        y = torch.empty_like(x)
        size = x.shape[-1]
        self._library.rms_norm(x, weight, y, x.numel() // size, size, epsilon)
        return y

    def rms_norm_backward(self, x: Tensor, weight: Tensor, grad: Tensor, epsilon: float) -> Tensor:
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._library.rms_norm_backward(x, weight, grad, out, x.numel() // size, size, epsilon)
        return out

    def argmax(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), dtype=torch.int64)
        self._library.argmax(x, out, *x.shape)
        return out
