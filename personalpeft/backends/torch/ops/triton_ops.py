"""The operations as Triton kernels for NVIDIA GPUs, compiled when a shape is first met and kept in Triton's own cache.

Invariant: nothing waits for the device, and how work is shared out is decided from shapes alone, so that a whole step
can be queued, or captured as a graph, before its first kernel has run.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from personalpeft.backends.torch.ops import triton_kernels
from personalpeft.backends.torch.ops.base import (
    BLOCK,
    AttentionMetadata,
    LoRAMapping,
    PrefillChunk,
    StackedLoRAWeights,
)
from personalpeft.backends.torch.ops.reference_ops import ReferenceOps

# The least that tensor cores take.
_LEAST = 16
# Inputs and outputs that a LoRA product takes at a time.
_INPUTS, _OUTPUTS = 256, 256
# Numbers that are put into the pool together.
_PUT = 1024
# Queries of a prompt that are answered together, and blocks of a row that a decoded token reads one after another; what
# is longer is read in parts, side by side.
_QUERIES, _PART = 64, 8


class NoTriton(RuntimeError):
    """Why the kernels could not be compiled or run here; a reason for ``doctor``, not an error for a user."""


class TritonOps(ReferenceOps):
    """See ``Kernels``. What host memory is for, and what the framework does well on a GPU, is as in the plain version."""

    name = "triton"
    # A tile of a prompt and a token that is decoded are computed in different orders.
    batch_invariant = False
    training = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stretches: dict[tuple[int, ...], tuple[Tensor, int]] = {}

    def apply_lora(
        self, x: Tensor, y: Tensor, pointers: LoRAMapping, shelf: StackedLoRAWeights, block: int
    ) -> None:
        tokens, sections, capacity = len(x), len(shelf.ends), shelf.max_rank
        narrow = torch.empty((tokens, sections, capacity), dtype=torch.float32, device=x.device)
        triton_kernels.shrink[(tokens, triton.cdiv(capacity, _LEAST), sections)](
            x,
            narrow,
            pointers.slots,
            pointers.ranks,
            shelf.a[0, block],
            shelf.a.stride(0),
            tokens,
            x.shape[1],
            capacity,
            sections,
            TILE=_LEAST,
            ROWS=_LEAST,
            INPUTS=_INPUTS,
            PRECISION=_precision(x),
        )
        stretches, aligned = self._split_tiles(shelf.ends)
        triton_kernels.expand[(tokens, len(stretches))](
            narrow,
            y,
            pointers.slots,
            pointers.ranks,
            shelf.b[0, block],
            shelf.b.stride(0),
            stretches,
            tokens,
            y.shape[1],
            capacity,
            sections,
            TILE=_LEAST,
            ROWS=_LEAST,
            OUTPUTS=_OUTPUTS,
            ALIGNED=aligned,
            PRECISION=_precision(x),
        )

    def write_kv(
        self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: AttentionMetadata
    ) -> None:
        tokens, heads, dim = k.shape
        put = min(_PUT, triton.next_power_of_2(heads * dim))
        grid = (tokens, triton.cdiv(heads * dim, put))
        triton_kernels.write_kv[grid](
            k, v, keys, values, places.write_slots, heads, dim, BLOCK=BLOCK, PUT=put
        )

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
        tokens, heads, dim = q.shape
        parts = triton.cdiv(places.block_table.shape[1], _PART)
        said = torch.empty_like(q)
        each = (
            said
            if parts == 1
            else torch.empty((tokens, heads, parts, dim), dtype=torch.float32, device=q.device)
        )
        tops = torch.empty((tokens, heads, parts), dtype=torch.float32, device=q.device)
        _attend(
            (tokens, keys.shape[1], parts),
            q,
            each,
            tops,
            keys,
            values,
            places.block_table,
            places.lengths,
            length=0,
            window=window,
            scaling=scaling,
            softcap=softcap,
            together=0,
        )
        if parts > 1:
            triton_kernels.merge_splits[(tokens, heads)](
                each,
                tops,
                said,
                places.lengths,
                window,
                parts,
                DIM=dim,
                WIDTH=_width(dim),
                SPAN=_PART * BLOCK,
            )
        return said

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
        said = torch.empty_like(q)
        together = max(1, _QUERIES // triton.next_power_of_2(q.shape[1] // keys.shape[1]))
        blocks = chunk.blocks.to(q.device)
        _attend(
            (triton.cdiv(len(q), together), keys.shape[1], 1),
            q,
            said,
            said,
            keys,
            values,
            blocks,
            blocks,
            length=chunk.length,
            window=window,
            scaling=scaling,
            softcap=softcap,
            together=together,
        )
        return said

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        y = torch.empty_like(x)
        size = x.shape[-1]
        width = triton.next_power_of_2(size)
        # A warp for every few hundred numbers.
        warps = min(8, max(1, width // 512))
        triton_kernels.rms_norm[(x.numel() // size,)](
            x, weight, y, size, epsilon, WIDTH=width, num_warps=warps
        )
        return y

    def _split_tiles(self, ends: tuple[int, ...]) -> tuple[Tensor, int]:
        """Stretches of outputs, none across two sections: begin, end and section of each; and a power of 2 that all
        begins and ends are multiples of.
        """
        known = self._stretches.get(ends)
        if known is None:
            sections = enumerate(zip((0, *ends), ends, strict=False))
            stretches = [
                (at, min(at + _OUTPUTS, end), section)
                for section, (begin, end) in sections
                for at in range(begin, end, _OUTPUTS)
            ]
            known = (
                torch.tensor(stretches, dtype=torch.int32, device=self._device),
                math.gcd(16, *ends),
            )
            self._stretches[ends] = known
        return known


def try_triton_ops(device: torch.device, dtype: torch.dtype) -> TritonOps:
    """The kernels, after those that ask most of a device gave what they should. Raises ``NoTriton``."""
    kernels = TritonOps(device)
    try:
        x, y = (torch.full((1, 16), fill, dtype=dtype, device=device) for fill in (1.0, 0.0))
        numbers = torch.ones((2, 1, 1, 16), dtype=dtype, device=device)
        one = torch.ones(2, dtype=torch.int32, device=device)
        kernels.apply_lora(x, y, LoRAMapping(one, one), StackedLoRAWeights(numbers, numbers, (16,)), 0)
        said = set(y[0].tolist())
    except Exception as why:  # A compiler, a linker, a driver: each fails in its own way.
        told = str(why).strip().splitlines() or [type(why).__name__]
        raise NoTriton(f"Triton kernels do not run here: {told[-1]}") from why
    if said != {16.0}:
        raise NoTriton(f"Triton kernels do not run here: sixteen ones add up to {said}")
    return kernels


def _attend(
    grid: tuple[int, int, int],
    q: Tensor,
    said: Tensor,
    tops: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    length: int,
    window: int,
    scaling: float,
    softcap: float,
    together: int,
) -> None:
    tokens, heads, dim = q.shape
    group = heads // keys.shape[1]
    # The device computes powers of 2, so scores are multiplied by this once more.
    base = math.log2(math.e)
    triton_kernels.paged_attention[grid](
        q,
        said,
        tops,
        keys,
        values,
        table,
        lengths,
        tokens,
        length,
        table.shape[-1],
        window,
        scaling / softcap if softcap else scaling * base,
        softcap * base,
        keys.shape[1],
        TOKENS=together,
        GROUP=group,
        HEADS=triton.next_power_of_2(group)
        if together
        else max(_LEAST, triton.next_power_of_2(group)),
        DIM=dim,
        WIDTH=_width(dim),
        BLOCK=BLOCK,
        PART=0 if together else _PART,
        CAPPED=softcap > 0,
        PRECISION=_precision(q),
    )


def _width(dim: int) -> int:
    return max(_LEAST, int(triton.next_power_of_2(dim)))


def _precision(numbers: Tensor) -> str:
    """How exact products are: float32 in full."""
    return "ieee" if numbers.dtype == torch.float32 else "tf32"
