"""Compare compiled kernels with torch's own operations on small shapes, before they are used.

It takes some 20 ms at each start. Gradients are written out, because the first use of autograd
imports modules for most of a second. Serving does not need them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from personalpeft.backends.torch.ops.base import (
    KV_BLOCK_SIZE,
    AttentionMetadata,
    AttentionParams,
    KVLayer,
    LoRAMapping,
    Ops,
    PrefillChunk,
    StackedLoRAWeights,
)
from personalpeft.backends.torch.ops.packed_matmul import PackedMatmul
from personalpeft.backends.torch.ops.training_ops import (
    AttentionInputs,
    Heads,
    Segments,
    TrainingOps,
)

# Largest difference from torch, relative to its largest value: rounding and our own exp.
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.02}


def find_wrong_kernel(ops: Ops) -> str | None:
    """Return the first operation that differs by more than rounding; None if there is none.

    It runs on the device of the operations.
    """
    with torch.random.fork_rng(devices=[]):
        own, reference = (list(_serve(each)) for each in (ops, Ops(ops.device, ops.dtype)))
        checks = [
            (name, actual, expected)
            for (name, actual), (_, expected) in zip(own, reference, strict=True)
        ]
        if ops.training is not None:
            checks += _check_training(ops.training, ops.dtype)
        if ops.matmul is not None:
            checks += _check_matmul(ops.matmul, ops.dtype)
    for name, actual, expected in checks:
        largest = expected.float().abs().max().clamp(min=1.0)
        # Written so that NaN is wrong too.
        if not (actual.float() - expected.float()).abs().max() <= _TOLERANCE[ops.dtype] * largest:
            return name
    return None


def depends_on_batch(ops: Ops) -> bool:
    """Return whether bits of a token depend on other rows, or on where its prompt was cut.

    It runs on the device of the operations, and tries each that adds.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return not all(torch.equal(*pair) for pair in _compute_twice(ops))


def _compute_twice(ops: Ops) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield results for the same tokens, among others and alone."""
    dtype, device = ops.dtype, ops.device

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype).to(device)

    if ops.matmul is not None:
        # Rows and inputs of several chunks.
        x, packed = random(600, 1632), ops.matmul.pack(random(80, 1632))
        alone = [ops.matmul(each, packed, None, 80) for each in x.split([1, 40, 16, 543])]
        yield ops.matmul(x, packed, None, 80), torch.cat(alone)

    x, weight = random(40, 96), random(96)
    alone = [ops.rms_norm(each, weight, 1e-5) for each in x.split(1)]
    yield ops.rms_norm(x, weight, 1e-5), torch.cat(alone)

    weights = StackedLoRAWeights(random(3, 1, 8, 96), random(3, 1, 8, 64), (64,))
    slots = torch.tensor([1] * 20 + [1, 2] * 10, dtype=torch.int32, device=device)
    ranks = torch.tensor([0, 8, 8], dtype=torch.int32, device=device)
    y = random(40, 64)
    among, each = y.clone(), y.clone()
    ops.apply_lora(x, among, LoRAMapping(slots, ranks), weights, 0)
    for row, out, slot in zip(x.split(1), each.split(1), slots.split(1), strict=True):
        ops.apply_lora(row, out, LoRAMapping(slot, ranks), weights, 0)
    yield among, each

    # A row so long that a GPU reads it in parts, and a short one.
    long, short, blocks = 9 * KV_BLOCK_SIZE + 11, 5, 12
    kv = KVLayer(random(blocks, 2, 64, KV_BLOCK_SIZE), random(blocks, 2, KV_BLOCK_SIZE, 64))
    table = torch.arange(blocks - 2, dtype=torch.int32, device=device).expand(2, -1).contiguous()
    lengths = torch.tensor([long, short], dtype=torch.int32, device=device)
    q = random(30, 4, 64)
    for window in (0, KV_BLOCK_SIZE + 3):
        params = AttentionParams(0.125, window=window)
        parts = [
            ops.prefill_attention(part, kv, PrefillChunk(0, len(part), end, table[0]), params)
            for part, end in ((q[:11], long - 19), (q[11:], long))
        ]
        whole = ops.prefill_attention(q, kv, PrefillChunk(0, len(q), long, table[0]), params)
        yield whole, torch.cat(parts)
        rows = torch.cat([q[-1:], q[:1]])
        both = ops.paged_attention(rows, kv, AttentionMetadata(lengths, table, lengths), params)
        yield both[:1], whole[-1:]


def _serve(ops: Ops) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and a result of each operation of serving, the same each time."""
    torch.manual_seed(0)
    dtype, device = ops.dtype, ops.device

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype).to(device)

    x, weight = random(5, 48), random(48)
    yield "rms_norm", ops.rms_norm(x, weight, 1e-5)
    yield "rms_norm_backward", ops.rms_norm_backward(x, weight, x.flip(0), 1e-5)
    yield "argmax", ops.argmax(x)

    source = np.random.default_rng(0).standard_normal((2, 3, 40)).astype(np.float16)
    packed = torch.zeros((2, 40, 3), dtype=dtype).transpose(1, 2)
    ops.pack_weights(source, packed, 0.5)
    yield "pack_weights", packed

    weights = StackedLoRAWeights(random(3, 1, 16, 48) / 7, random(3, 1, 8, 40) / 7, (24, 40))
    slots = torch.tensor([0, 1, 2, 1, 0], dtype=torch.int32, device=device)
    ranks = torch.tensor([0, 8, 8], dtype=torch.int32, device=device)
    y = torch.zeros(5, 40, dtype=dtype, device=device)
    ops.apply_lora(x, y, LoRAMapping(slots, ranks), weights, 0)
    # Slot 0 is zero in a bank. Here it is not, and only the reference adds it.
    yield "apply_lora", y[slots > 0]

    count, heads, kv_heads, dim = KV_BLOCK_SIZE + 9, 4, 2, 16
    q, k, v = (random(count, n, dim) for n in (heads, kv_heads, kv_heads))
    # The row's first block is block 2 of the cache, its second one block 1.
    blocks = torch.tensor([2, 1], dtype=torch.int32, device=device)
    places = torch.arange(3 * KV_BLOCK_SIZE, device=device).view(3, -1)
    kv_indices = places[blocks].flatten()[:count]
    lengths = torch.tensor([count], dtype=torch.int32, device=device)
    metadata = AttentionMetadata(kv_indices, blocks[None], lengths)
    kv = KVLayer(
        ops.zeros(3, kv_heads, dim, KV_BLOCK_SIZE), ops.zeros(3, kv_heads, KV_BLOCK_SIZE, dim)
    )
    ops.write_kv(k, v, kv, metadata)
    yield "write_kv", kv.keys.clone()
    yield "write_kv", kv.values.clone()
    qkv, shape = torch.cat([q, k, v], dim=1).flatten(1), Heads(heads, kv_heads, dim, 0.25, 0)
    cos, sin = random(count, dim), random(count, dim)
    yield "rotate_and_write_kv", ops.rotate_and_write_kv(qkv, cos, sin, shape, kv, metadata)
    yield "rotate_and_write_kv", kv.keys
    chunk = PrefillChunk(0, 11, count, blocks)
    for softcap, window in ((0.0, 0), (0.0, 7), (5.0, 0)):
        params = AttentionParams(0.25, softcap, window)
        yield "paged_attention", ops.paged_attention(q[-1:], kv, metadata, params)
        yield "prefill_attention", ops.prefill_attention(q[-11:], kv, chunk, params)


def _check_training(ops: TrainingOps, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, grad, other = (torch.randn(6, 48, dtype=dtype) for _ in range(3))
    x32, grad32, other32 = x.float(), grad.float(), other.float()

    (gate, up), out_grad = x32.chunk(2, -1), grad32[:, :24]
    sigmoid = gate.sigmoid()
    yield "silu_and_mul", ops.silu_and_mul(x), gate * sigmoid * up
    gate_grad = out_grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    yield (
        "silu_and_mul_backward",
        ops.silu_and_mul_backward(x, grad[:, :24].contiguous()),
        torch.cat([gate_grad, out_grad * gate * sigmoid], -1),
    )

    lse, other_lse = ops.logsumexp(x), ops.logsumexp(other)
    yield "logsumexp", lse, x32.logsumexp(-1)
    tokens, each = torch.arange(6), torch.randn(6)
    q, p = x32.softmax(-1), other32.softmax(-1)
    yield (
        "token_logprob_backward",
        ops.token_logprob_backward(x, lse, tokens, each),
        each[:, None] * (torch.eye(6, 48) - q),
    )
    yield (
        "kl_div",
        ops.kl_div(other, other_lse, x, lse),
        (p * (other32.log_softmax(-1) - x32.log_softmax(-1))).sum(-1),
    )
    yield (
        "kl_div_backward",
        ops.kl_div_backward(other, other_lse, x, lse, each),
        each[:, None] * (q - p),
    )
    yield from _check_training_attention(ops, dtype)


def _check_matmul(ops: PackedMatmul, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Check rows and inputs of several blocks, and outputs that fill no panel."""
    x, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((39, 384), (50, 384), (50,)))
    packed = ops.pack(weight)
    expected = x.float() @ weight.float().t()
    yield "matmul", ops(x, packed, None, 50), expected
    yield "matmul", ops(x[:3], packed, bias, 50), expected[:3] + bias
    yield "weights of matmul", ops.unpack(packed, 50), weight


def _check_training_attention(
    ops: TrainingOps, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Check causal attention of 4 heads over 2 heads of keys and values."""
    q, k, v = (torch.randn(6, n * 16, dtype=dtype) for n in (4, 2, 2))
    no_rotation = torch.ones(6, 16, dtype=dtype), torch.zeros(6, 16, dtype=dtype)
    segment = Segments(torch.tensor([[0, 6, 0, 0, 0]]), torch.empty(0, dtype=torch.int64), 6)
    inputs = AttentionInputs((q, k, v), *no_rotation, segment, Heads(4, 2, 16, 0.25, 0))
    out, lse = ops.attention(inputs)
    # [kv_heads, heads of each, tokens, dim]
    q32, k32, v32 = (t.float().view(6, 2, -1, 16).permute(1, 2, 0, 3) for t in (q, k, v))
    scores = q32 @ k32.mT * 0.25
    weights = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    yield "attention", out, _side_by_side(weights @ v32)

    grad = torch.randn(6, 64, dtype=dtype)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    ops.attention_backward(inputs, grad, lse, grads)
    grad32 = grad.float().view(6, 2, -1, 16).permute(1, 2, 0, 3)
    weights_grad = grad32 @ v32.mT
    scores_grad = 0.25 * weights * (weights_grad - (weights * weights_grad).sum(-1, keepdim=True))
    expected = (
        scores_grad @ k32,
        (scores_grad.mT @ q32).sum(1, keepdim=True),
        (weights.mT @ grad32).sum(1, keepdim=True),
    )
    for name, own, wanted in zip("qkv", grads, expected, strict=True):
        yield f"attention_backward ({name})", own, _side_by_side(wanted)


def _side_by_side(x: Tensor) -> Tensor:
    """Return ``[tokens, heads * dim]``."""
    return x.permute(2, 0, 1, 3).flatten(1)
