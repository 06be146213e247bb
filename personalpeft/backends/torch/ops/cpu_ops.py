"""The operations in C++ for CPUs. A machine without a compiler runs ``ReferenceOps`` instead."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from personalpeft.adapters.types import Matrix
from personalpeft.backends.torch.ops.base import (
    AttentionMetadata,
    LoRAMapping,
    PrefillChunk,
    StackedLoRAWeights,
)
from personalpeft.backends.torch.ops.native_library import (
    SUFFIX,
    NoCompiler,
    bind_function,
    load_library,
)
from personalpeft.backends.torch.ops.training_ops import TrainingOps

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "apply_lora": (_P, _P, _I, _P, _P, _P, _I, _P, _I, _I, _I, _I, _P, _I),
    "write_kv": (_P, _P, _P, _P, _P, _I, _I, _I),
    "paged_attention": (_P, _P, _P, _P, _P, _I, _P, _I, _I, _I, _I, _F, _F, _I),
    "rms_norm": (_P, _P, _P, _I, _I, _F),
    "argmax": (_P, _P, _I, _I),
}


class CpuOps:
    """See ``Ops``. Raise ``NoCompiler`` if this machine cannot compile or load them."""

    name = "native"
    batch_invariant = True

    def __init__(self, cache: Path, dtype: torch.dtype) -> None:
        if dtype not in SUFFIX:
            raise NoCompiler(f"CPU operations need float32 or bfloat16, got {dtype}")
        library = load_library(cache, "decode.cpp")
        self.training = TrainingOps(cache, dtype)
        self._apply_lora, self._write_kv, self._paged_attention, self._rms_norm, self._argmax = (
            bind_function(library, f"{name}_{SUFFIX[dtype]}", signature)
            for name, signature in _SIGNATURES.items()
        )
        self._pack_weights = {
            source_dtype: bind_function(
                library,
                f"pack_weights_{source_dtype}_{SUFFIX[dtype]}",
                (_P, _P, _P, _P, _F),
                ctypes.c_int32,
            )
            for source_dtype in ("float16", "float32")
        }
        self._ends: dict[tuple[int, ...], Tensor] = {}

    def pack_weights(self, source: Matrix, target: Tensor, factor: float) -> bool:
        int64x3 = ctypes.c_int64 * 3
        source = np.ascontiguousarray(source)
        finite = self._pack_weights[source.dtype.name](
            source.ctypes.data,
            target.data_ptr(),
            int64x3(*source.shape),
            int64x3(*target.stride()),
            factor,
        )
        return bool(finite)

    def apply_lora(
        self, x: Tensor, y: Tensor, mapping: LoRAMapping, weights: StackedLoRAWeights, block: int
    ) -> None:
        size = x.element_size()
        ends = self._ends.get(weights.ends)
        if ends is None:
            ends = self._ends[weights.ends] = torch.tensor(weights.ends, dtype=torch.int32)
        self._apply_lora(
            x.data_ptr(),
            y.data_ptr(),
            len(x),
            mapping.slots.data_ptr(),
            mapping.ranks.data_ptr(),
            weights.a.data_ptr() + block * weights.a.stride(1) * size,
            weights.a.stride(0),
            weights.b.data_ptr() + block * weights.b.stride(1) * size,
            weights.b.stride(0),
            weights.max_rank,
            x.shape[1],
            y.shape[1],
            ends.data_ptr(),
            len(weights.ends),
        )

    def write_kv(
        self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata
    ) -> None:
        tokens, heads, dim = k.shape
        self._write_kv(
            k.data_ptr(),
            v.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            metadata.write_slots.data_ptr(),
            tokens,
            heads,
            dim,
        )

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
        return self._attend_tiles(
            q, keys, values, metadata.tiles, metadata.block_table, scaling, softcap, window
        )

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
        return self._attend_tiles(
            q, keys, values, chunk.tiles, chunk.blocks[None], scaling, softcap, window
        )

    def _attend_tiles(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tiles: Tensor,
        block_table: Tensor,
        scaling: float,
        softcap: float,
        window: int,
    ) -> Tensor:
        out = torch.empty_like(q)
        self._paged_attention(
            q.data_ptr(),
            out.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            tiles.data_ptr(),
            len(tiles),
            block_table.data_ptr(),
            block_table.shape[1],
            q.shape[1],
            keys.shape[1],
            q.shape[2],
            scaling,
            softcap,
            window,
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        y = torch.empty_like(x)
        self._rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            x.numel() // x.shape[-1],
            x.shape[-1],
            epsilon,
        )
        return y

    def argmax(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), dtype=torch.int64)
        self._argmax(x.data_ptr(), out.data_ptr(), len(x), x.shape[1])
        return out
