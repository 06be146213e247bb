"""The functions that run on an NVIDIA GPU, in Triton's language: once for each point of a grid.

Arguments in lower case are pointers and numbers of a call; for each choice of those in capitals a function is compiled
anew. The language has no types to write beside them. All sums are in float32.

Invariants: each follows its namesake in plain.py. What is done for one token, and in which order, depends on its own
row alone and on whether it belongs to a prompt; nothing is added up in an order that chance decides.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def multiply(left, right, sums, PRECISION: tl.constexpr):
    """``sums + left @ right``, each row of it the same bits wherever in its tile it stands.

    The interpreter would not keep to that: it asks NumPy's BLAS, which on some processors adds up the rows at a tile's
    edge otherwise than those within. It would also multiply the bits of bfloat16 numbers as if they were integers.
    """
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
        return sums + tl.sum(left[:, :, None] * right[None, :, :], 1)
    return tl.dot(left, right, sums, input_precision=PRECISION)


@triton.jit
def tile_leader(slots, token, tokens, TILE: tl.constexpr):
    """How many tokens from this one on it multiplies for: where a whole tile points to one slot, its first token does so
    for all of them and the others for none; else each for itself. The sums are the same.
    """
    own = tl.load(slots + token)
    mates = token // TILE * TILE + tl.arange(0, TILE)
    strangers = tl.sum((tl.load(slots + mates, mask=mates < tokens, other=own) != own).to(tl.int32))
    return tl.where(
        strangers > 0, 1, tl.where(token % TILE > 0, 0, tl.minimum(tokens - token, TILE))
    )


@triton.jit
def shrink(
    x,
    narrow,
    slots,
    ranks,
    a,
    a_stride,
    tokens,
    inputs,
    capacity,
    sections,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``narrow[t, section] = A x[t]``, for some rows of A."""
    token, section = tl.program_id(0), tl.program_id(2)
    slot = tl.load(slots + token)
    rank = tl.load(ranks + slot)
    count = tile_leader(slots, token, tokens, TILE)
    if count == 0 or tl.program_id(1) * ROWS >= rank:
        return
    mates, mine = token + tl.arange(0, TILE), tl.arange(0, TILE) < count
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # 64 bits, here as elsewhere: all slots together can hold more numbers than 32 bits count.
    matrix = a + slot.to(tl.int64) * a_stride + section * capacity * inputs
    sums = tl.zeros([TILE, ROWS], tl.float32)
    for begin in range(0, inputs, INPUTS):
        i = begin + tl.arange(0, INPUTS)
        given = tl.load(
            x + mates[:, None] * inputs + i[None, :],
            mask=mine[:, None] & (i < inputs)[None, :],
            other=0.0,
        )
        weights = tl.load(
            matrix + r[None, :] * inputs + i[:, None],
            mask=(r < rank)[None, :] & (i < inputs)[:, None],
            other=0.0,
        )
        sums = multiply(given, weights, sums, PRECISION)
    place = narrow + (mates[:, None] * sections + section) * capacity + r[None, :]
    tl.store(place, sums, mask=mine[:, None] & (r < rank)[None, :])


@triton.jit
def expand(
    narrow,
    y,
    slots,
    ranks,
    b,
    b_stride,
    stretches,
    tokens,
    outputs,
    capacity,
    sections,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``y[t] += B narrow[t]``, in one stretch of the outputs. Stretches begin and end at multiples of ``ALIGNED``."""
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    rank = tl.load(ranks + slot)
    count = tile_leader(slots, token, tokens, TILE)
    if count == 0 or rank == 0:
        return
    mates, mine = token + tl.arange(0, TILE), tl.arange(0, TILE) < count
    stretch = stretches + tl.program_id(1) * 3
    begin, end = (
        tl.multiple_of(tl.load(stretch), ALIGNED),
        tl.multiple_of(tl.load(stretch + 1), ALIGNED),
    )
    section = tl.load(stretch + 2)
    o = begin + tl.arange(0, OUTPUTS)
    matrix = b + slot.to(tl.int64) * b_stride
    sums = tl.zeros([TILE, OUTPUTS], tl.float32)
    for first in range(0, rank, ROWS):
        r = first + tl.arange(0, ROWS)
        given = tl.load(
            narrow + (mates[:, None] * sections + section) * capacity + r[None, :],
            mask=mine[:, None] & (r < rank)[None, :],
            other=0.0,
        )
        weights = tl.load(
            matrix + r[:, None] * outputs + o[None, :],
            mask=(r < rank)[:, None] & (o < end)[None, :],
            other=0.0,
        )
        # 16 bits are exact in tf32, so only what is narrow is rounded, and less than to the base's own format.
        sums = multiply(given, weights.to(tl.float32), sums, PRECISION)
    place = y + mates[:, None] * outputs + o[None, :]
    mask = mine[:, None] & (o < end)[None, :]
    tl.store(
        place,
        (tl.load(place, mask=mask, other=0.0).to(tl.float32) + sums).to(y.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def write_kv(k, v, keys, values, places, heads, dim, BLOCK: tl.constexpr, PUT: tl.constexpr):
    """Puts one token's keys and values, or a part of them, into its place."""
    token = tl.program_id(0)
    place = tl.load(places + token)
    block, at = place // BLOCK, place % BLOCK
    i = tl.program_id(1) * PUT + tl.arange(0, PUT)
    mask = i < heads * dim
    start = block * heads * dim * BLOCK
    given = token * heads * dim + i
    tl.store(keys + start + i * BLOCK + at, tl.load(k + given, mask=mask), mask=mask)
    tl.store(
        values + start + (i // dim * BLOCK + at) * dim + i % dim,
        tl.load(v + given, mask=mask),
        mask=mask,
    )


@triton.jit
def paged_attention(
    q,
    said,
    tops,
    keys,
    values,
    table,
    lengths,
    tokens,
    length,
    longest,
    window,
    scaling,
    cap,
    kv_heads,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The queries that share one head of keys, with a softmax that is found on the way (Milakov & Gimelshein 2018).

    ``TOKENS`` 0: those of one decoded token, over one part, of ``PART`` blocks, of its row; with several parts each
    leaves its own result, and in ``tops`` its weight as a power of 2. Else those of so many tokens of a prompt, whose
    last one sees ``length`` tokens. ``HEADS`` is what ``GROUP`` heads take up.
    """
    kv, part = tl.program_id(1), tl.program_id(2)
    if TOKENS:
        token = tl.program_id(0) * TOKENS
        nearest = length - tokens + token + 1
        farthest = tl.minimum(nearest + TOKENS - 1, length)
        m = tl.arange(0, TOKENS * HEADS)
        blocks = table
    else:
        token = tl.program_id(0)
        nearest = tl.load(lengths + token)
        farthest = nearest
        m = tl.arange(0, HEADS)
        blocks = table + token * longest
    first = tl.where(window > 0, tl.maximum(nearest - window, 0), 0)
    begin, end = first // BLOCK, tl.cdiv(farthest, BLOCK)
    if PART:
        begin, end = tl.maximum(begin, part * PART), tl.minimum(end, part * PART + PART)
    if begin >= end:
        return
    d, j = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    sees = nearest + m // HEADS
    mask = ((token + m // HEADS < tokens) & (m % HEADS < GROUP))[:, None] & (d < DIM)[None, :]
    heads = (token + m // HEADS) * kv_heads * GROUP + kv * GROUP + m % HEADS
    query = tl.load(q + heads[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    top = tl.full([m.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([m.shape[0]], tl.float32)
    sums = tl.zeros([m.shape[0], WIDTH], tl.float32)
    for at in range(begin, end):
        place = (tl.load(blocks + at).to(tl.int64) * kv_heads + kv) * DIM * BLOCK
        key = tl.load(
            keys + place + d[:, None] * BLOCK + j[None, :], mask=(d < DIM)[:, None], other=0.0
        )
        scores = (
            multiply(query, key, tl.zeros([m.shape[0], BLOCK], tl.float32), PRECISION) * scaling
        )
        if CAPPED:
            # The hyperbolic tangent; past 20 it is 1 in float32.
            scores = cap * (1 - 2 / (tl.exp(2 * tl.minimum(scores, 20.0)) + 1))
        spot = at * BLOCK + j
        seen = spot[None, :] < sees[:, None]
        if window > 0:
            seen = seen & (spot[None, :] >= sees[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # Until a query has seen something, any number will do; infinity less infinity would be none.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(top - level)
        # What others left in the block is not read: a weight of 0 does not undo what is not a number.
        own = (spot >= first) & (spot < farthest)
        value = tl.load(
            values + place + j[:, None] * DIM + d[None, :],
            mask=own[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        sums = multiply(weights.to(value.dtype), value, sums * fade[:, None], PRECISION)
        total = total * fade + tl.sum(weights, 1)
        top = higher
    # Those that only fill up the tile may have seen nothing.
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    if PART:
        heads = heads * tl.num_programs(2) + part
        tl.store(tops + heads, top + tl.log2(total), mask=m < GROUP)
    tl.store(said + heads[:, None] * DIM + d[None, :], sums.to(said.dtype.element_ty), mask=mask)


@triton.jit
def merge_splits(
    each,
    tops,
    said,
    lengths,
    window,
    parts,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    """One head's result from those of its parts, of ``SPAN`` tokens each, in their order."""
    token, head = tl.program_id(0), tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(lengths + token)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    d = tl.arange(0, WIDTH)
    top = tl.load(tops + head * parts + first // SPAN)
    total = 0.0
    sums = tl.zeros([WIDTH], tl.float32)
    for part in range(first // SPAN, tl.cdiv(length, SPAN)):
        own = head * parts + part
        weighs = tl.load(tops + own)
        higher = tl.maximum(top, weighs)
        fade, weight = tl.exp2(top - higher), tl.exp2(weighs - higher)
        sums = sums * fade + weight * tl.load(each + own * DIM + d, mask=d < DIM, other=0.0)
        total = total * fade + weight
        top = higher
    tl.store(said + head * DIM + d, (sums / total).to(said.dtype.element_ty), mask=d < DIM)


@triton.jit
def rms_norm(x, weight, y, size, epsilon, WIDTH: tl.constexpr):
    """One row."""
    start = tl.program_id(0) * size
    i = tl.arange(0, WIDTH)
    wide = tl.load(x + start + i, mask=i < size, other=0.0).to(tl.float32)
    scaled = (wide / tl.sqrt(tl.sum(wide * wide, 0) / size + epsilon)).to(y.dtype.element_ty)
    said = tl.load(weight + i, mask=i < size, other=0.0).to(tl.float32) * scaled.to(tl.float32)
    tl.store(y + start + i, said.to(y.dtype.element_ty), mask=i < size)
