"""The operations as Triton kernels for NVIDIA GPUs, compiled by Triton when a shape is first met and kept in its cache.

The functions down to ``TritonKernels`` run on the device, once for each point of a grid. Each follows its namesake in
plain.py; all sums are in float32.

Invariants: nothing waits for the device, and how work is shared out is decided from shapes alone, so that a whole step
can be queued, or captured as a graph, before its first kernel has run; nothing is added up in an order that chance
decides, so the same pass gives the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from personalpeft.backends.torch.kernels.base import BLOCK, Places, Pointers, Shelf
from personalpeft.backends.torch.kernels.plain import PlainKernels

# Tokens that are multiplied together where all of them point to one slot; the least that tensor cores take.
_TILE = 16
# Rows of A, or of B, that are read together.
_ROWS = 16
# Inputs of a token on its own, and of a tile, that are read together; outputs of either.
_INPUTS, _TILE_INPUTS, _OUTPUTS = 512, 128, 256
# Numbers that are put into the pool together.
_PUT = 1024
# Blocks of the cache that are worth a part of their own when a row is split.
_WORTH_A_PART = 2


class NoTriton(RuntimeError):
    """Why the kernels could not be compiled or run here; a reason for ``doctor``, not an error for a user."""


# The interpreter multiplies the bits of bfloat16 numbers as if they were integers, so there they are widened first, which
# changes no product.
_WIDEN = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _product(left: Any, right: Any, sums: Any, PRECISION: tl.constexpr) -> Any:  # noqa: N803
    if _WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision=PRECISION)


@triton.jit
def _alike(slots: Any, token: Any, tokens: Any, TILE: tl.constexpr) -> Any:  # noqa: N803
    """Whether all tokens of this one's tile point to the same slot."""
    own = tl.load(slots + token)
    others = token // TILE * TILE + tl.arange(0, TILE)
    differ = tl.load(slots + others, mask=others < tokens, other=own) != own
    return tl.sum(differ.to(tl.int32)) == 0


@triton.jit
def _shrink(
    x: Any,
    narrow: Any,
    slots: Any,
    ranks: Any,
    a: Any,
    a_stride: Any,
    tokens: Any,
    inputs: Any,
    capacity: Any,
    sections: Any,
    TILE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    INPUTS: tl.constexpr,  # noqa: N803
    TILE_INPUTS: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
) -> None:
    """``narrow[t, section] = A x[t]`` for one token, or for its whole tile if that is of one slot."""
    token = tl.program_id(0)
    section = tl.program_id(2)
    slot = tl.load(slots + token)
    rank = tl.load(ranks + slot)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(1) * ROWS < rank:
        # 64 bits, here as elsewhere: all slots together can have more numbers than 32 bits count.
        matrix = a + slot.to(tl.int64) * a_stride + section * capacity * inputs
        together = False
        if TILE > 1:
            together = _alike(slots, token, tokens, TILE)
        if together:
            if token % TILE == 0:
                mates = token + tl.arange(0, TILE)
                sums = tl.zeros([TILE, ROWS], tl.float32)
                for begin in range(0, inputs, TILE_INPUTS):
                    i = begin + tl.arange(0, TILE_INPUTS)
                    given = tl.load(
                        x + mates[:, None] * inputs + i[None, :],
                        mask=(mates < tokens)[:, None] & (i < inputs)[None, :],
                        other=0.0,
                    )
                    weights = tl.load(
                        matrix + rows[None, :] * inputs + i[:, None],
                        mask=(rows < rank)[None, :] & (i < inputs)[:, None],
                        other=0.0,
                    )
                    sums = _product(given, weights, sums, PRECISION)
                tl.store(
                    narrow + (mates[:, None] * sections + section) * capacity + rows[None, :],
                    sums,
                    mask=(mates < tokens)[:, None] & (rows < rank)[None, :],
                )
        else:
            parts = tl.zeros([ROWS, INPUTS], tl.float32)
            for begin in range(0, inputs, INPUTS):
                i = begin + tl.arange(0, INPUTS)
                given = tl.load(x + token * inputs + i, mask=i < inputs, other=0.0).to(tl.float32)
                weights = tl.load(
                    matrix + rows[:, None] * inputs + i[None, :],
                    mask=(rows < rank)[:, None] & (i < inputs)[None, :],
                    other=0.0,
                )
                parts += weights.to(tl.float32) * given[None, :]
            tl.store(narrow + (token * sections + section) * capacity + rows, tl.sum(parts, 1), mask=rows < rank)


@triton.jit
def _expand(
    narrow: Any,
    y: Any,
    slots: Any,
    ranks: Any,
    b: Any,
    b_stride: Any,
    stretches: Any,
    tokens: Any,
    outputs: Any,
    capacity: Any,
    sections: Any,
    TILE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    OUTPUTS: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
) -> None:
    """``y[t] += B narrow[t]`` in one stretch of the outputs, for one token or for its whole tile."""
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    rank = tl.load(ranks + slot)
    if rank > 0:
        stretch = stretches + tl.program_id(1) * 3
        o = tl.load(stretch) + tl.arange(0, OUTPUTS)
        inside = o < tl.load(stretch + 1)
        section = tl.load(stretch + 2)
        matrix = b + slot.to(tl.int64) * b_stride
        together = False
        if TILE > 1:
            together = _alike(slots, token, tokens, TILE)
        if together:
            if token % TILE == 0:
                mates = token + tl.arange(0, TILE)
                sums = tl.zeros([TILE, OUTPUTS], tl.float32)
                for begin in range(0, rank, ROWS):
                    rows = begin + tl.arange(0, ROWS)
                    given = tl.load(
                        narrow + (mates[:, None] * sections + section) * capacity + rows[None, :],
                        mask=(mates < tokens)[:, None] & (rows < rank)[None, :],
                        other=0.0,
                    )
                    weights = tl.load(
                        matrix + rows[:, None] * outputs + o[None, :],
                        mask=(rows < rank)[:, None] & inside[None, :],
                        other=0.0,
                    )
                    # Half precision is exact in tf32, so only what is narrow is rounded, and less than to its own format.
                    sums = _product(given, weights.to(tl.float32), sums, PRECISION)
                own = y + mates[:, None] * outputs + o[None, :]
                real = (mates < tokens)[:, None] & inside[None, :]
                tl.store(own, (tl.load(own, mask=real, other=0.0).to(tl.float32) + sums).to(own.dtype.element_ty), real)
        else:
            sum_ = tl.zeros([OUTPUTS], tl.float32)
            for begin in range(0, rank, ROWS):
                rows = begin + tl.arange(0, ROWS)
                given = tl.load(
                    narrow + (token * sections + section) * capacity + rows, mask=rows < rank, other=0.0
                )
                weights = tl.load(
                    matrix + rows[:, None] * outputs + o[None, :],
                    mask=(rows < rank)[:, None] & inside[None, :],
                    other=0.0,
                )
                sum_ += tl.sum(weights.to(tl.float32) * given[:, None], 0)
            own = y + token * outputs + o
            tl.store(own, (tl.load(own, mask=inside, other=0.0).to(tl.float32) + sum_).to(own.dtype.element_ty), inside)


@triton.jit
def _remember(
    k: Any,
    v: Any,
    keys: Any,
    values: Any,
    places: Any,
    heads: Any,
    dim: Any,
    BLOCK: tl.constexpr,  # noqa: N803
    PUT: tl.constexpr,  # noqa: N803
) -> None:
    """Puts one token's keys and values, or a part of them, into its place."""
    token = tl.program_id(0)
    place = tl.load(places + token)
    block, at = place // BLOCK, place % BLOCK
    i = tl.program_id(1) * PUT + tl.arange(0, PUT)
    real = i < heads * dim
    start = block * heads * dim * BLOCK
    from_ = token * heads * dim + i
    tl.store(keys + start + i * BLOCK + at, tl.load(k + from_, mask=real), mask=real)
    tl.store(values + start + (i // dim * BLOCK + at) * dim + i % dim, tl.load(v + from_, mask=real), mask=real)


@triton.jit
def _attend(
    q: Any,
    said: Any,
    tops: Any,
    keys: Any,
    values: Any,
    table: Any,
    lengths: Any,
    longest: Any,
    window: Any,
    scaling: Any,
    cap: Any,
    kv_heads: Any,
    GROUP: tl.constexpr,  # noqa: N803
    QUERIES: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    CAPPED: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
) -> None:
    """The heads that share one head of keys, over one part of a row, with the softmax found as it goes (Milakov &
    Gimelshein 2018). Of several parts each leaves its own result, and in ``tops`` how much it weighs, as a power of 2.
    """
    row, kv, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    end = tl.cdiv(length, BLOCK)
    share = tl.cdiv(end - first // BLOCK, PARTS)
    begin = first // BLOCK + part * share
    end = tl.minimum(end, begin + share)
    g, d, j = tl.arange(0, QUERIES), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    heads = kv * GROUP + g
    asked = (g < GROUP)[:, None] & (d < DIM)[None, :]
    query = tl.load(q + (row * kv_heads * GROUP + heads)[:, None] * DIM + d[None, :], mask=asked, other=0.0)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32)
    for at in range(begin, end):
        place = (tl.load(table + row * longest + at).to(tl.int64) * kv_heads + kv) * DIM * BLOCK
        key = tl.load(keys + place + d[:, None] * BLOCK + j[None, :], mask=(d < DIM)[:, None], other=0.0)
        scores = _product(query, key, tl.zeros([QUERIES, BLOCK], tl.float32), PRECISION) * scaling
        if CAPPED:
            # The hyperbolic tangent, which is 1 and -1 where the power overflows and vanishes.
            scores = cap * (1 - 2 / (tl.exp(2 * scores) + 1))
        spot = at * BLOCK + j
        seen = (spot >= first) & (spot < length)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        # What others left in the block is not read: a weight of 0 does not undo what is not a number.
        value = tl.load(
            values + place + j[:, None] * DIM + d[None, :], mask=seen[:, None] & (d < DIM)[None, :], other=0.0
        )
        sums = _product(weights.to(value.dtype), value, sums * fade[:, None], PRECISION)
        total = total * fade + tl.sum(weights, 1)
        top = higher
    # A part can be empty; it then weighs nothing.
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    own = (row * kv_heads * GROUP + heads) * PARTS + part
    tl.store(said + own[:, None] * DIM + d[None, :], sums.to(said.dtype.element_ty), mask=asked)
    if PARTS > 1:
        tl.store(tops + own, top + tl.log2(total), mask=g < GROUP)


@triton.jit
def _join(
    parts: Any,
    tops: Any,
    said: Any,
    DIM: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
) -> None:
    """One head's result from those of its parts."""
    head = tl.program_id(0)
    p, d = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    tops_ = tl.load(tops + head * PARTS + p)
    weights = tl.exp2(tops_ - tl.max(tops_, 0))
    each = tl.load(parts + (head * PARTS + p)[:, None] * DIM + d[None, :], mask=(d < DIM)[None, :], other=0.0)
    sums = tl.sum(each * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(said + head * DIM + d, sums.to(said.dtype.element_ty), mask=d < DIM)


@triton.jit
def _norm(x: Any, weight: Any, y: Any, size: Any, epsilon: Any, WIDTH: tl.constexpr) -> None:  # noqa: N803
    start = tl.program_id(0) * size
    i = tl.arange(0, WIDTH)
    wide = tl.load(x + start + i, mask=i < size, other=0.0).to(tl.float32)
    scaled = (wide / tl.sqrt(tl.sum(wide * wide, 0) / size + epsilon)).to(y.dtype.element_ty)
    tl.store(y + start + i, tl.load(weight + i, mask=i < size, other=0.0) * scaled, mask=i < size)


class TritonKernels(PlainKernels):
    """See ``Kernels``. What is laid is laid in host memory, and so as the plain version does it.

    Raises ``NoTriton`` where nothing can be compiled for the device or run on it.
    """

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self._stretches: dict[tuple[int, ...], tuple[Tensor, int]] = {}
        self._device = device
        try:
            # Enough programs to keep all of the device busy; a processor only interprets, for tests.
            self._programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
            said = self.norm(torch.ones(1, 2, device=device), torch.ones(2, device=device), 0.0).tolist()
        except Exception as why:  # noqa: BLE001 - a compiler, a linker, a driver: each fails in its own way
            told = str(why).strip().splitlines() or ["nothing"]
            raise NoTriton(f"{type(why).__name__} says: {told[-1]}") from why
        if said != [[1.0, 1.0]]:
            raise NoTriton(f"a small test gave {said}")

    def lora(self, x: Tensor, y: Tensor, pointers: Pointers, shelf: Shelf, block: int) -> None:
        a, b = shelf.a[0, block], shelf.b[0, block]
        tokens, sections, capacity = len(x), len(shelf.ends), shelf.capacity
        narrow = torch.empty((tokens, sections, capacity), dtype=torch.float32, device=x.device)
        stretches, count = self._stretches_of(shelf.ends)
        tile = _TILE if tokens >= _TILE else 1
        _shrink[(tokens, triton.cdiv(capacity, _ROWS), sections)](
            x,
            narrow,
            pointers.slots,
            pointers.ranks,
            a,
            shelf.a.stride(0),
            tokens,
            x.shape[1],
            capacity,
            sections,
            TILE=tile,
            ROWS=_ROWS,
            INPUTS=_INPUTS,
            TILE_INPUTS=_TILE_INPUTS,
            PRECISION=_precision(x.dtype),
        )
        _expand[(tokens, count)](
            narrow,
            y,
            pointers.slots,
            pointers.ranks,
            b,
            shelf.b.stride(0),
            stretches,
            tokens,
            y.shape[1],
            capacity,
            sections,
            TILE=tile,
            ROWS=_ROWS,
            OUTPUTS=_OUTPUTS,
            PRECISION=_precision(x.dtype),
        )

    def remember(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: Places) -> None:
        tokens, heads, dim = k.shape
        put = min(_PUT, triton.next_power_of_2(heads * dim))
        _remember[(tokens, triton.cdiv(heads * dim, put))](
            k, v, keys, values, places.writes, heads, dim, BLOCK=BLOCK, PUT=put
        )

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, places: Places, *, scaling: float, softcap: float, window: int
    ) -> Tensor:
        tokens, heads, dim = q.shape
        kv_heads, longest = keys.shape[1], places.table.shape[1]
        group, width = heads // kv_heads, max(16, triton.next_power_of_2(dim))
        parts = self._parts(tokens * kv_heads, longest)
        said = torch.empty_like(q)
        each, tops = said, said
        if parts > 1:
            each = torch.empty((tokens, heads, parts, dim), dtype=torch.float32, device=q.device)
            tops = torch.empty((tokens, heads, parts), dtype=torch.float32, device=q.device)
        # Powers of 2 are what the device computes; so scores are multiplied by this once more.
        base = math.log2(math.e)
        _attend[(tokens, kv_heads, parts)](
            q,
            each,
            tops,
            keys,
            values,
            places.table,
            places.lengths,
            longest,
            window,
            scaling / softcap if softcap else scaling * base,
            softcap * base,
            kv_heads,
            GROUP=group,
            QUERIES=max(16, triton.next_power_of_2(group)),
            DIM=dim,
            WIDTH=width,
            BLOCK=BLOCK,
            CAPPED=softcap > 0,
            PARTS=parts,
            PRECISION=_precision(q.dtype),
        )
        if parts > 1:
            _join[(tokens * heads,)](each, tops, said, DIM=dim, WIDTH=width, PARTS=parts)
        return said

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        y = torch.empty_like(x)
        size = x.shape[-1]
        width = triton.next_power_of_2(size)
        warps = min(8, max(1, width // 512))
        _norm[(x.numel() // size,)](x, weight, y, size, epsilon, WIDTH=width, num_warps=warps)
        return y

    def _parts(self, programs: int, longest: int) -> int:
        """Into how many parts rows are split: more only where there are too few rows to keep the device busy. A power of
        2, since each number of parts is compiled on its own.
        """
        most = min(self._programs // programs, longest // _WORTH_A_PART, 64)
        return 1 << (max(most, 1).bit_length() - 1)

    def _stretches_of(self, ends: tuple[int, ...]) -> tuple[Tensor, int]:
        """Stretches of outputs, none across two sections: begin, end and section of each."""
        known = self._stretches.get(ends)
        if known is None:
            stretches = [
                (at, end, section)
                for section, (begin, end) in enumerate(zip((0, *ends), ends, strict=False))
                for at in range(begin, end, _OUTPUTS)
            ]
            known = torch.tensor(stretches, dtype=torch.int32, device=self._device), len(stretches)
            self._stretches[ends] = known
        return known


def _precision(dtype: torch.dtype) -> str:
    """How exact products are: float32 in full."""
    return "ieee" if dtype == torch.float32 else "tf32"
