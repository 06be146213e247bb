"""Try our compiled kernels on small shapes against the framework's own operations, before they serve anybody.

A compiler, a library or a processor that does something else than where the kernels were written shows here, and not in a
reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from personalpeft.backends.torch.ops.base import (
    BLOCK,
    AttentionMetadata,
    LoRAMapping,
    Ops,
    PrefillChunk,
    StackedLoRAWeights,
)
from personalpeft.backends.torch.ops.reference_ops import ReferenceOps, attention
from personalpeft.backends.torch.ops.training_ops import Heads, Segments, TrainingOps

# Largest difference from the framework, as a share of its largest number: a few roundings, and our own exponential function.
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.02}


def find_wrong_kernel(kernels: Ops, dtype: torch.dtype) -> str | None:
    """Return the name of the first operation whose result is not the framework's up to rounding; None if all are right."""
    tolerance = _TOLERANCE[dtype]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, found, wanted in _serving(kernels, dtype):
            if not _is_close(found, wanted, tolerance):
                return name
        if kernels.training is not None:
            for name, found, wanted in _training(kernels.training, dtype):
                if not _is_close(found, wanted, tolerance):
                    return name
    return None


def _is_close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    apart = (found.float() - wanted.float()).abs().max()
    # Written so that a result that is no number is wrong too.
    return bool(apart <= tolerance * wanted.float().abs().max().clamp(min=1.0))


def _serving(kernels: Ops, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    plain = ReferenceOps()
    x = torch.randn(5, 48, dtype=dtype)
    weight = torch.randn(48, dtype=dtype)
    yield "norm", kernels.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5)
    yield "largest", kernels.argmax(x), plain.argmax(x)

    source = np.random.default_rng(0).standard_normal((2, 3, 40)).astype(np.float16)
    places = [torch.zeros((2, 40, 3), dtype=dtype).transpose(1, 2) for _ in range(2)]
    for each, place in zip((kernels, plain), places, strict=True):
        each.pack_weights(source, place, 0.5)
    yield "lay", places[0], places[1]

    shelf = StackedLoRAWeights(
        torch.randn(3, 1, 16, 48, dtype=dtype) / 7,
        torch.randn(3, 1, 8, 40, dtype=dtype) / 7,
        (24, 40),
    )
    pointers = LoRAMapping(
        torch.tensor([0, 1, 2, 1, 0], dtype=torch.int32), torch.tensor([0, 8, 8], dtype=torch.int32)
    )
    outputs = [torch.zeros(5, 40, dtype=dtype) for _ in range(2)]
    for each, y in zip((kernels, plain), outputs, strict=True):
        each.apply_lora(x, y, pointers, shelf, 0)
    # Slot 0 is all zeros in a bank; here it is not, and adds something in the plain version alone.
    adapted = pointers.slots > 0
    yield "lora", outputs[0][adapted], outputs[1][adapted]

    count, heads, kv_heads, dim = BLOCK + 9, 4, 2, 16
    q, k, v = (torch.randn(count, n, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    blocks = torch.tensor([2, 1], dtype=torch.int32)
    at = torch.tensor([int(blocks[t // BLOCK]) * BLOCK + t % BLOCK for t in range(count)])
    written = AttentionMetadata(at, blocks[None], torch.tensor([count], dtype=torch.int32))
    pools = []
    for each in (kernels, plain):
        keys, values = (
            torch.zeros(3, kv_heads, dim, BLOCK, dtype=dtype),
            torch.zeros(3, kv_heads, BLOCK, dim, dtype=dtype),
        )
        each.write_kv(k, v, keys, values, written)
        pools.append((keys, values))
    yield (
        "remember",
        torch.cat([t.flatten() for t in pools[0]]),
        torch.cat([t.flatten() for t in pools[1]]),
    )
    for window, softcap in ((0, 0.0), (7, 0.0), (0, 5.0)):
        last, some = [], []
        for each in (kernels, plain):
            keys, values = pools[1]
            last.append(
                each.paged_attention(
                    q[-1:], keys, values, written, scaling=0.25, softcap=softcap, window=window
                )
            )
            chunk = PrefillChunk(0, 11, count, blocks)
            some.append(
                each.prefill_attention(
                    q[-11:], keys, values, chunk, scaling=0.25, softcap=softcap, window=window
                )
            )
        yield "attend", last[0], last[1]
        yield "prefill", some[0], some[1]


def _training(kernels: TrainingOps, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, weight, slope = (torch.randn(*shape, dtype=dtype) for shape in ((6, 48), (48,), (6, 48)))

    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.float()

    yield "norm_backward", kernels.norm_backward(x, weight, slope, 1e-5), _gradient(norm, x, slope)

    def gate(x: Tensor) -> Tensor:
        return silu(x[:, :24]) * x[:, 24:]

    yield "gate", kernels.gate(x), gate(x.float())
    yield (
        "gate_backward",
        kernels.gate_backward(x, slope[:, :24].contiguous()),
        _gradient(gate, x, slope[:, :24]),
    )

    totals = kernels.logsumexp(x)
    yield "totals", totals, x.float().logsumexp(-1)
    tokens, each = torch.arange(6), torch.randn(6)

    def likelihood(x: Tensor) -> Tensor:
        return x.log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    yield (
        "likelihood",
        kernels.token_logprob_backward(x, totals, tokens, each),
        _gradient(likelihood, x, each),
    )
    other = torch.randn(6, 48, dtype=dtype)
    known = other.float().log_softmax(-1)

    def kl_div(x: Tensor) -> Tensor:
        return (known.exp() * (known - x.log_softmax(-1))).sum(-1)

    pair = other, kernels.logsumexp(other), x, totals
    yield "divergence", kernels.kl_div(*pair), kl_div(x.float())
    yield (
        "divergence_backward",
        kernels.kl_div_backward(*pair, each),
        _gradient(kl_div, x, each),
    )

    heads = Heads(4, 2, 16, 0.25, 0)
    q, k, v = (torch.randn(6, n * 16, dtype=dtype) for n in (4, 2, 2))
    still = torch.ones(6, 16, dtype=dtype), torch.zeros(6, 16, dtype=dtype)
    whole = Segments(torch.tensor([[0, 6, 0, 0, 0]]), torch.empty(0, dtype=torch.int64), 6)
    found, sizes = kernels.attention(q, k, v, *still, whole, heads)
    wide = [_leaf(t.view(6, -1, 16)) for t in (q, k, v)]
    wanted = attention(*wide, mask=torch.ones(6, 6, dtype=torch.bool).tril(), scaling=0.25).reshape(
        6, -1
    )
    yield "attend (training)", found, wanted.detach()
    into = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    grad = torch.randn(6, 64, dtype=dtype)
    kernels.attention_backward(q, k, v, *still, whole, heads, grad, sizes, into)
    slopes = torch.autograd.grad(wanted, wide, grad.float())
    for name, own, slope in zip("qkv", into, slopes, strict=True):
        yield f"attend_backward ({name})", own, slope.flatten(1)


def _gradient(function: Callable[[Tensor], Tensor], x: Tensor, slope: Tensor) -> Tensor:
    leaf = _leaf(x)
    return torch.autograd.grad(function(leaf), leaf, slope.float())[0]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32, copy=True).requires_grad_()
