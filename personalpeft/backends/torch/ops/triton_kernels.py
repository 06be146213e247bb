"""Kernels for NVIDIA GPUs in Triton's language.

``triton_ops`` calls them. Arguments in lower case are pointers and numbers of a call; tensors have
the shapes that ``Ops`` documents. A kernel is compiled for each choice of those in capitals. Sums
are in float32. Products of float32 numbers round their factors to tf32 unless the base is float32.

Arguments of several kernels:
    slots, ranks: The slot of each token, and the rank in each slot.
    tokens, inputs, outputs, max_rank, sections, heads, kv_heads, dim: Sizes of the tensors.
    keys, values: The cache, ``[blocks, heads, dim, BLOCK]`` and ``[blocks, heads, BLOCK, dim]``.
    window: How many positions back a token sees; 0 for all.
    scaling, softcap: Factor and limit of the scores. SOFTCAP: Whether they are limited.
    DIM, WIDTH: Size of a head, and that size padded to a power of 2.

Invariants: each kernel computes what its namesake in ``Ops`` does. The operations for one
token and their order depend on its row alone. No order of adding is left to scheduling.
"""

from __future__ import annotations

import triton
import triton.language as tl

from personalpeft.backends.torch.ops.base import KV_BLOCK_SIZE

# Tokens of a LoRA tile, and ranks that are multiplied at once: the smallest tile of tensor cores.
TILE = tl.constexpr(16)
# Inputs that are multiplied at once, and the most outputs of a LoRA tile.
INPUTS, OUTPUTS = tl.constexpr(256), tl.constexpr(256)
# Tokens of a block of the cache, and blocks of a split of attention.
BLOCK, SPLIT_BLOCKS = tl.constexpr(KV_BLOCK_SIZE), tl.constexpr(8)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def multiply(left, right, sums, dtype: tl.constexpr):
    """Return ``sums + left @ right``; a row's bits do not depend on its position in the tile.

    The interpreter needs its own path. On some CPUs NumPy's BLAS adds rows at a tile's edge in
    another order. It would also multiply the bits of bfloat16 as integers.

    Args:
        left: ``[rows, inner]``.
        right: ``[inner, columns]``.
        sums: float32 ``[rows, columns]``.
        dtype: Of the base.
    """
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
        return sums + tl.sum(left[:, :, None] * right[None, :, :], 1)
    return tl.dot(left, right, sums, input_precision="ieee" if dtype == tl.float32 else "tf32")


@triton.jit
def tile_leader(slots, token, tokens):
    """Return for how many tokens this one multiplies.

    If all tokens of a tile have one slot, the first multiplies for all of them. Otherwise each does
    for itself. The sums are the same.

    Args:
        slots: The slot of each token.
        token: This one.
        tokens: How many there are.
    """
    slot = tl.load(slots + token)
    tile_tokens = token // TILE * TILE + tl.arange(0, TILE)
    others = tl.sum(
        (tl.load(slots + tile_tokens, mask=tile_tokens < tokens, other=slot) != slot).to(tl.int32)
    )
    return tl.where(others > 0, 1, tl.where(token % TILE > 0, 0, tl.minimum(tokens - token, TILE)))


@triton.jit
def shrink(x, shrunk, slots, ranks, a, a_stride, tokens, inputs, max_rank, sections):
    """Compute ``shrunk[t, section] = A x[t]`` for some rows of A (Punica, Chen et al. 2023).

    Grid: tokens, tiles of ``TILE`` rows of A, sections.

    Args:
        x: ``[tokens, inputs]``.
        shrunk: float32 ``[tokens, sections, max_rank]``, the result.
        a: A of the layer in slot 0, ``[sections, max_rank, inputs]``.
        a_stride: Values from one slot to the next.
    """
    token, section = tl.program_id(0), tl.program_id(2)
    slot = tl.load(slots + token)
    rank = tl.load(ranks + slot)
    count = tile_leader(slots, token, tokens)
    if count == 0 or tl.program_id(1) * TILE >= rank:
        return
    tile_tokens, in_group = token + tl.arange(0, TILE), tl.arange(0, TILE) < count
    r = tl.program_id(1) * TILE + tl.arange(0, TILE)
    # 64 bits: all slots together may exceed 2^31 values.
    matrix = a + slot.to(tl.int64) * a_stride + section * max_rank * inputs
    sums = tl.zeros([TILE, TILE], tl.float32)
    for begin in range(0, inputs, INPUTS):
        i = begin + tl.arange(0, INPUTS)
        operand = tl.load(
            x + tile_tokens[:, None] * inputs + i[None, :],
            mask=in_group[:, None] & (i < inputs)[None, :],
            other=0.0,
        )
        weights = tl.load(
            matrix + r[None, :] * inputs + i[:, None],
            mask=(r < rank)[None, :] & (i < inputs)[:, None],
            other=0.0,
        )
        sums = multiply(operand, weights, sums, x.dtype.element_ty)
    target = shrunk + (tile_tokens[:, None] * sections + section) * max_rank + r[None, :]
    tl.store(target, sums, mask=in_group[:, None] & (r < rank)[None, :])


@triton.jit
def expand(
    shrunk,
    y,
    slots,
    ranks,
    b,
    b_stride,
    tiles,
    tokens,
    outputs,
    max_rank,
    sections,
    ALIGNED: tl.constexpr,
):
    """Compute ``y[t] += B shrunk[t]`` in one tile of outputs.

    Grid: tokens, tiles of outputs.

    Args:
        shrunk: float32 ``[tokens, sections, max_rank]``, as ``shrink`` computes it.
        y: ``[tokens, outputs]``, changed in place.
        b: Transposed B of the layer in slot 0, ``[max_rank, outputs]``.
        b_stride: Values from one slot to the next.
        tiles: ``[tiles, 3]``: first output, the one after the last, section.
        ALIGNED: A number that divides the first and last outputs of all tiles.
    """
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    rank = tl.load(ranks + slot)
    count = tile_leader(slots, token, tokens)
    if count == 0 or rank == 0:
        return
    tile_tokens, in_group = token + tl.arange(0, TILE), tl.arange(0, TILE) < count
    tile = tiles + tl.program_id(1) * 3
    begin, end = (
        tl.multiple_of(tl.load(tile), ALIGNED),
        tl.multiple_of(tl.load(tile + 1), ALIGNED),
    )
    section = tl.load(tile + 2)
    o = begin + tl.arange(0, OUTPUTS)
    matrix = b + slot.to(tl.int64) * b_stride
    sums = tl.zeros([TILE, OUTPUTS], tl.float32)
    for first in range(0, rank, TILE):
        r = first + tl.arange(0, TILE)
        operand = tl.load(
            shrunk + (tile_tokens[:, None] * sections + section) * max_rank + r[None, :],
            mask=in_group[:, None] & (r < rank)[None, :],
            other=0.0,
        )
        weights = tl.load(
            matrix + r[:, None] * outputs + o[None, :],
            mask=(r < rank)[:, None] & (o < end)[None, :],
            other=0.0,
        )
        # 16-bit weights are exact in tf32, so only `shrunk` is rounded.
        sums = multiply(operand, weights.to(tl.float32), sums, y.dtype.element_ty)
    target = y + tile_tokens[:, None] * outputs + o[None, :]
    mask = in_group[:, None] & (o < end)[None, :]
    tl.store(
        target,
        (tl.load(target, mask=mask, other=0.0).to(tl.float32) + sums).to(y.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def write_kv(k, v, keys, values, kv_indices, heads, dim, WRITE_SIZE: tl.constexpr):
    """Write one token's keys and values, or a part of them, to its place.

    Grid: tokens, parts of ``WRITE_SIZE`` values.

    Args:
        k, v: ``[tokens, heads, dim]``.
        kv_indices: Where each token goes: its block times ``BLOCK``, plus the place in it.
        WRITE_SIZE: Values of one program, a power of 2.
    """
    token = tl.program_id(0)
    target = tl.load(kv_indices + token)
    block, offset = target // BLOCK, target % BLOCK
    i = tl.program_id(1) * WRITE_SIZE + tl.arange(0, WRITE_SIZE)
    mask = i < heads * dim
    start = block * heads * dim * BLOCK
    operand = token * heads * dim + i
    tl.store(keys + start + i * BLOCK + offset, tl.load(k + operand, mask=mask), mask=mask)
    tl.store(
        values + start + (i // dim * BLOCK + offset) * dim + i % dim,
        tl.load(v + operand, mask=mask),
        mask=mask,
    )


@triton.jit
def merge(sums, total, lse_max, part, part_lse):
    """Return attention that was merged so far with one more part, by their log-sum-exp.

    Args:
        sums, total: ``sums / total`` is the attention so far.
        lse_max: The largest log-sum-exp of its parts.
        part: The attention of one more part.
        part_lse: Its log-sum-exp.

    Returns:
        The next ``sums``, ``total`` and ``lse_max``.
    """
    new_max = tl.maximum(lse_max, part_lse)
    # A query may see nothing of the first parts, and -inf - -inf would be NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale, weight = tl.exp2(lse_max - shift), tl.exp2(part_lse - shift)
    # Fused by hand: two compilations that fuse otherwise would round otherwise.
    sums = tl.fma(sums, rescale[:, None], weight[:, None] * part)
    return sums, tl.fma(total, rescale, weight), new_max


@triton.jit
def paged_attention(
    q,
    out,
    lse,
    keys,
    values,
    table,
    lengths,
    tokens,
    length,
    table_stride,
    window,
    scaling,
    softcap,
    kv_heads,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attention of the queries that share one head of keys, with an online softmax.

    Online softmax: Milakov & Gimelshein 2018. Splits of ``SPLIT_BLOCKS`` blocks: Flash-Decoding
    (Dao et al. 2023). A prompt's token adds in the order of a decoded one, and its tile has as many
    rows. So its bits are the same.

    Grid: tokens (or tiles of ``TOKENS``), heads of keys, splits.

    Args:
        q: ``[tokens, heads, dim]``.
        out: The result: like ``q``, or float32 ``[tokens, heads, splits, dim]``.
        lse: The log-sum-exp of each split of decoded tokens, ``[tokens, heads, splits]``.
        table: The blocks of each decoded token, ``[tokens, table_stride]``, or of the prompt.
        lengths: How many positions each decoded token sees.
        length: How many positions the last token of a prompt sees.
        table_stride: The width of ``table``.
        TOKENS: 0 for one decoded token over one split. Otherwise that many tokens of a prompt over
            all splits.
        GROUP: Heads of queries that share one of keys.
        HEADS: ``GROUP``, padded.
    """
    kv = tl.program_id(1)
    if TOKENS:
        token = tl.program_id(0) * TOKENS
        first_visible = length - tokens + token + 1
        last_visible = tl.minimum(first_visible + TOKENS - 1, length)
        m = tl.arange(0, TOKENS * HEADS)
        blocks = table
    else:
        token = tl.program_id(0)
        first_visible = tl.load(lengths + token)
        last_visible = first_visible
        m = tl.arange(0, HEADS)
        blocks = table + token * table_stride
    first = tl.where(window > 0, tl.maximum(first_visible - window, 0), 0)
    begin, end = first // BLOCK, tl.cdiv(last_visible, BLOCK)
    if TOKENS:
        first_split, end_split = begin // SPLIT_BLOCKS, tl.cdiv(end, SPLIT_BLOCKS)
    else:
        first_split, end_split = tl.program_id(2), tl.program_id(2) + 1
        begin, end = (
            tl.maximum(begin, first_split * SPLIT_BLOCKS),
            tl.minimum(end, end_split * SPLIT_BLOCKS),
        )
        if begin >= end:
            return
    d = tl.arange(0, WIDTH)
    num_visible = first_visible + m // HEADS
    mask = ((token + m // HEADS < tokens) & (m % HEADS < GROUP))[:, None] & (d < DIM)[None, :]
    heads = (token + m // HEADS) * kv_heads * GROUP + kv * GROUP + m % HEADS
    query = tl.load(q + heads[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    lse_max = tl.full([m.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([m.shape[0]], tl.float32)
    sums = tl.zeros([m.shape[0], WIDTH], tl.float32)
    for split in range(first_split, end_split):
        j = tl.arange(0, BLOCK)
        part_max = tl.full([m.shape[0]], float("-inf"), tl.float32)
        part_total = tl.zeros([m.shape[0]], tl.float32)
        part = tl.zeros([m.shape[0], WIDTH], tl.float32)
        for offset in range(
            tl.maximum(begin, split * SPLIT_BLOCKS),
            tl.minimum(end, split * SPLIT_BLOCKS + SPLIT_BLOCKS),
        ):
            target = (tl.load(blocks + offset).to(tl.int64) * kv_heads + kv) * DIM * BLOCK
            key = tl.load(
                keys + target + d[:, None] * BLOCK + j[None, :], mask=(d < DIM)[:, None], other=0.0
            )
            no_scores = tl.zeros([m.shape[0], BLOCK], tl.float32)
            scores = multiply(query, key, no_scores, query.dtype) * scaling
            if SOFTCAP:
                # tanh; beyond 20 it is 1 in float32.
                scores = softcap * (1 - 2 / (tl.exp(2 * tl.minimum(scores, 20.0)) + 1))
            position = offset * BLOCK + j
            seen = position[None, :] < num_visible[:, None]
            if window > 0:
                seen = seen & (position[None, :] >= num_visible[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            new_max = tl.maximum(part_max, tl.max(scores, 1))
            # Before a query has seen a key, its maximum is -inf, and -inf - -inf would be NaN.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(scores - shift[:, None])
            rescale = tl.exp2(part_max - shift)
            # Masked, because former rows may have left NaN, and 0 * NaN is NaN.
            valid = (position >= first) & (position < last_visible)
            value = tl.load(
                values + target + j[:, None] * DIM + d[None, :],
                mask=valid[:, None] & (d < DIM)[None, :],
                other=0.0,
            )
            part = multiply(weights.to(value.dtype), value, part * rescale[:, None], value.dtype)
            part_total = part_total * rescale + tl.sum(weights, 1)
            part_max = new_max
        part_total = tl.where(part_total > 0, part_total, 1.0)
        part, part_lse = part / part_total[:, None], part_max + tl.log2(part_total)
        if TOKENS:
            sums, total, lse_max = merge(sums, total, lse_max, part, part_lse)
        else:
            sums = part
            heads = heads * tl.num_programs(2) + split
            tl.store(lse + heads, part_lse, mask=m < GROUP)
    if TOKENS:
        # Padding rows have seen nothing.
        sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + heads[:, None] * DIM + d[None, :], sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def merge_splits(
    partial,
    lse,
    out,
    lengths,
    window,
    splits,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Merge one head's splits by their log-sum-exp, in order.

    Grid: tokens, heads.

    Args:
        partial: The attention of each split, float32 ``[tokens, heads, splits, DIM]``.
        lse: Its log-sum-exp, ``[tokens, heads, splits]``.
        out: The result, ``[tokens, heads, DIM]``.
        lengths: How many positions each token sees.
        splits: How many there are.
    """
    token, head = tl.program_id(0), tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(lengths + token)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    d, row = tl.arange(0, WIDTH)[None, :], tl.arange(0, 1)
    lse_max = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([1, WIDTH], tl.float32)
    span: tl.constexpr = SPLIT_BLOCKS * BLOCK
    for split in range(first // span, tl.cdiv(length, span)):
        index = head * splits + split
        part = tl.load(partial + index * DIM + d, mask=d < DIM, other=0.0)
        sums, total, lse_max = merge(sums, total, lse_max, part, tl.load(lse + index + row))
    merged = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + head * DIM + d, merged, mask=d < DIM)


@triton.jit
def rms_norm(x, weight, y, size, epsilon, WIDTH: tl.constexpr):
    """Compute one row of RMSNorm (Zhang & Sennrich 2019, eq. 4).

    Args:
        x: ``[rows, size]``.
        weight: ``[size]``.
        y: The result, like ``x``.
        size: Values of a row.
        epsilon: Added to the mean square.
        WIDTH: ``size``, padded to a power of 2.
    """
    start = tl.program_id(0) * size
    i = tl.arange(0, WIDTH)
    x32 = tl.load(x + start + i, mask=i < size, other=0.0).to(tl.float32)
    scaled = (x32 / tl.sqrt(tl.sum(x32 * x32, 0) / size + epsilon)).to(y.dtype.element_ty)
    out = tl.load(weight + i, mask=i < size, other=0.0).to(tl.float32) * scaled.to(tl.float32)
    tl.store(y + start + i, out.to(y.dtype.element_ty), mask=i < size)
