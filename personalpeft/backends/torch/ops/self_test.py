"""Compare compiled kernels with torch's own operations on small shapes, before they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from personalpeft.backends.torch.ops.base import (
    KV_BLOCK_SIZE,
    AttentionMetadata,
    LoRAMapping,
    Ops,
    PrefillChunk,
    StackedLoRAWeights,
)
from personalpeft.backends.torch.ops.reference_ops import ReferenceOps, attention
from personalpeft.backends.torch.ops.training_ops import Heads, Segments, TrainingOps

# Largest difference from torch, relative to its largest value: rounding and our own exp.
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.02}


def find_wrong_kernel(kernels: Ops, dtype: torch.dtype) -> str | None:
    """Return the first operation that differs by more than rounding; None if there is none."""
    tolerance = _TOLERANCE[dtype]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, actual, expected in _check_serving(kernels, dtype):
            if not _is_close(actual, expected, tolerance):
                return name
        if kernels.training is not None:
            for name, actual, expected in _check_training(kernels.training, dtype):
                if not _is_close(actual, expected, tolerance):
                    return name
    return None


def _is_close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    difference = (actual.float() - expected.float()).abs().max()
    # Written so that NaN is wrong too.
    return bool(difference <= tolerance * expected.float().abs().max().clamp(min=1.0))


def _check_serving(kernels: Ops, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    reference = ReferenceOps()
    x = torch.randn(5, 48, dtype=dtype)
    weight = torch.randn(48, dtype=dtype)
    yield "rms_norm", kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)
    yield "argmax", kernels.argmax(x), reference.argmax(x)

    source = np.random.default_rng(0).standard_normal((2, 3, 40)).astype(np.float16)
    packed = [torch.zeros((2, 40, 3), dtype=dtype).transpose(1, 2) for _ in range(2)]
    for each, target in zip((kernels, reference), packed, strict=True):
        each.pack_weights(source, target, 0.5)
    yield "pack_weights", packed[0], packed[1]

    weights = StackedLoRAWeights(
        torch.randn(3, 1, 16, 48, dtype=dtype) / 7,
        torch.randn(3, 1, 8, 40, dtype=dtype) / 7,
        (24, 40),
    )
    mapping = LoRAMapping(
        torch.tensor([0, 1, 2, 1, 0], dtype=torch.int32), torch.tensor([0, 8, 8], dtype=torch.int32)
    )
    outputs = [torch.zeros(5, 40, dtype=dtype) for _ in range(2)]
    for each, y in zip((kernels, reference), outputs, strict=True):
        each.apply_lora(x, y, mapping, weights, 0)
    # Slot 0 is zero in a bank. Here it is not, and only the reference adds it.
    adapted = mapping.slots > 0
    yield "apply_lora", outputs[0][adapted], outputs[1][adapted]

    count, heads, kv_heads, dim = KV_BLOCK_SIZE + 9, 4, 2, 16
    q, k, v = (torch.randn(count, n, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    blocks = torch.tensor([2, 1], dtype=torch.int32)
    slots = torch.tensor(
        [int(blocks[t // KV_BLOCK_SIZE]) * KV_BLOCK_SIZE + t % KV_BLOCK_SIZE for t in range(count)]
    )
    metadata = AttentionMetadata(slots, blocks[None], torch.tensor([count], dtype=torch.int32))
    caches = []
    for each in (kernels, reference):
        keys, values = (
            torch.zeros(3, kv_heads, dim, KV_BLOCK_SIZE, dtype=dtype),
            torch.zeros(3, kv_heads, KV_BLOCK_SIZE, dim, dtype=dtype),
        )
        each.write_kv(k, v, keys, values, metadata)
        caches.append((keys, values))
    yield (
        "write_kv",
        torch.cat([t.flatten() for t in caches[0]]),
        torch.cat([t.flatten() for t in caches[1]]),
    )
    for window, softcap in ((0, 0.0), (7, 0.0), (0, 5.0)):
        decode_outputs, chunk_outputs = [], []
        for each in (kernels, reference):
            keys, values = caches[1]
            decode_outputs.append(
                each.paged_attention(
                    q[-1:], keys, values, metadata, scaling=0.25, softcap=softcap, window=window
                )
            )
            chunk = PrefillChunk(0, 11, count, blocks)
            chunk_outputs.append(
                each.prefill_attention(
                    q[-11:], keys, values, chunk, scaling=0.25, softcap=softcap, window=window
                )
            )
        yield "paged_attention", decode_outputs[0], decode_outputs[1]
        yield "prefill_attention", chunk_outputs[0], chunk_outputs[1]


def _check_training(
    kernels: TrainingOps, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, weight, out_grad = (torch.randn(*shape, dtype=dtype) for shape in ((6, 48), (48,), (6, 48)))

    def rms_norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.float()

    yield (
        "rms_norm_backward",
        kernels.rms_norm_backward(x, weight, out_grad, 1e-5),
        _autograd(rms_norm, x, out_grad),
    )

    def silu_and_mul(x: Tensor) -> Tensor:
        return silu(x[:, :24]) * x[:, 24:]

    yield "silu_and_mul", kernels.silu_and_mul(x), silu_and_mul(x.float())
    yield (
        "silu_and_mul_backward",
        kernels.silu_and_mul_backward(x, out_grad[:, :24].contiguous()),
        _autograd(silu_and_mul, x, out_grad[:, :24]),
    )

    lse = kernels.logsumexp(x)
    yield "logsumexp", lse, x.float().logsumexp(-1)
    tokens, each = torch.arange(6), torch.randn(6)

    def token_logprob(x: Tensor) -> Tensor:
        return x.log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    yield (
        "token_logprob_backward",
        kernels.token_logprob_backward(x, lse, tokens, each),
        _autograd(token_logprob, x, each),
    )
    other = torch.randn(6, 48, dtype=dtype)
    log_p = other.float().log_softmax(-1)

    def kl_div(x: Tensor) -> Tensor:
        return (log_p.exp() * (log_p - x.log_softmax(-1))).sum(-1)

    pair = other, kernels.logsumexp(other), x, lse
    yield "kl_div", kernels.kl_div(*pair), kl_div(x.float())
    yield (
        "kl_div_backward",
        kernels.kl_div_backward(*pair, each),
        _autograd(kl_div, x, each),
    )

    heads = Heads(4, 2, 16, 0.25, 0)
    q, k, v = (torch.randn(6, n * 16, dtype=dtype) for n in (4, 2, 2))
    no_rotation = torch.ones(6, 16, dtype=dtype), torch.zeros(6, 16, dtype=dtype)
    segment = Segments(torch.tensor([[0, 6, 0, 0, 0]]), torch.empty(0, dtype=torch.int64), 6)
    actual, attention_lse = kernels.attention(q, k, v, *no_rotation, segment, heads)
    leaves = [_leaf(t.view(6, -1, 16)) for t in (q, k, v)]
    expected = attention(
        *leaves, mask=torch.ones(6, 6, dtype=torch.bool).tril(), scaling=0.25
    ).reshape(6, -1)
    yield "attention", actual, expected.detach()
    outputs = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    grad = torch.randn(6, 64, dtype=dtype)
    kernels.attention_backward(q, k, v, *no_rotation, segment, heads, grad, attention_lse, outputs)
    grads = torch.autograd.grad(expected, leaves, grad.float())
    for name, own, out_grad in zip("qkv", outputs, grads, strict=True):
        yield f"attention_backward ({name})", own, out_grad.flatten(1)


def _autograd(function: Callable[[Tensor], Tensor], x: Tensor, out_grad: Tensor) -> Tensor:
    leaf = _leaf(x)
    return torch.autograd.grad(function(leaf), leaf, out_grad.float())[0]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32, copy=True).requires_grad_()
