"""The operations of a training step for CPUs, with their gradients, compiled from C++.

Invariants: each computes what autograd would, up to rounding. A token's results depend on its own
path alone. Shapes: T tokens. Tensors are in the base's dtype and contiguous, unless noted.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from personalpeft.backends.torch.ops.native_library import (
    SUFFIX,
    NoCompiler,
    bind_function,
    load_library,
)

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "attention": (_P, _P, _P, _P, _P, _P, _F, _P, _I, _P, _P, _P),
    "attention_backward": (_P, _P, _P, _P, _P, _P, _F, _P, _I, _P, _P, _P, _P, _I, _P, _P, _P),
    "rms_norm_backward": (_P, _P, _P, _P, _I, _I, _F),
    "silu_and_mul": (_P, _P, _I, _I),
    "silu_and_mul_backward": (_P, _P, _P, _I, _I),
    "logsumexp": (_P, _P, _I, _I),
    "token_logprob_backward": (_P, _P, _P, _P, _P, _I, _I),
    "kl_div": (_P, _P, _P, _P, _P, _I, _I),
    "kl_div_backward": (_P, _P, _P, _P, _P, _P, _I, _I),
}
# Heads are padded to a multiple of this. Must equal LANES in training.cpp.
_LANES = 16


@dataclass(frozen=True, slots=True)
class Segments:
    """A packed sequence as segments of tokens (``packing.py``).

    Attributes:
        table: int64 ``[n, 5]``: begin, end, number of ancestors, their offset in ``ancestors``,
            offset of the path among all paths.
        ancestors: The ancestors of all segments, int64.
        total: The number of tokens of all paths.
    """

    table: Tensor
    ancestors: Tensor
    total: int


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of grouped-query attention; ``window`` 0 means no sliding window."""

    heads: int
    kv_heads: int
    dim: int
    scaling: float
    window: int


class TrainingOps:
    """Call the C++ operations. Raise ``NoCompiler`` if this machine cannot compile or load them."""

    def __init__(self, cache: Path, dtype: torch.dtype) -> None:
        if dtype not in SUFFIX:
            raise NoCompiler(f"CPU operations need float32 or bfloat16, got {dtype}")
        library = load_library(cache, "training.cpp")
        self._functions = {
            name: bind_function(library, f"{name}_{SUFFIX[dtype]}", signature)
            for name, signature in _SIGNATURES.items()
        }

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        segments: Segments,
        heads: Heads,
    ) -> tuple[Tensor, Tensor]:
        """Return the attention of each token over its path, and each softmax's log-sum-exp.

        Args:
            q: ``[T, heads * dim]`` before the rotary embedding; only rows must be contiguous.
            k: ``[T, kv_heads * dim]``, like ``q``.
            v: ``[T, kv_heads * dim]``.
            cos: ``[T, dim]``.
            sin: ``[T, dim]``.
            segments: The paths.
            heads: The shape of attention.

        Returns:
            ``[T, heads * dim]``, and float32 ``[T, heads]``.
        """
        out = q.new_empty((len(q), heads.heads * heads.dim))
        lse = torch.empty((len(q), heads.heads), dtype=torch.float32)
        self._functions["attention"](
            *_addresses(q, k, v, cos, sin),
            _shape_array(q, k, v, heads),
            heads.scaling,
            *_pack_ancestors(segments),
            out.data_ptr(),
            lse.data_ptr(),
        )
        return out, lse

    def attention_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        segments: Segments,
        heads: Heads,
        grad: Tensor,
        lse: Tensor,
        outputs: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Write the gradients of ``q``, ``k`` and ``v`` to ``outputs``, with their strides."""
        padded_dim = -(-heads.dim // _LANES) * _LANES
        path_grads = torch.empty(
            (2, segments.total, heads.kv_heads, padded_dim), dtype=torch.float32
        )
        self._functions["attention_backward"](
            *_addresses(q, k, v, cos, sin),
            _shape_array(q, k, v, heads),
            heads.scaling,
            *_pack_ancestors(segments),
            *_addresses(grad, lse, path_grads),
            segments.total,
            *_addresses(*outputs),
        )

    def rms_norm_backward(self, x: Tensor, weight: Tensor, grad: Tensor, epsilon: float) -> Tensor:
        """Return the gradient of ``Ops.rms_norm`` with respect to ``x``."""
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._functions["rms_norm_backward"](
            *_addresses(x, weight, grad, out), x.numel() // size, size, epsilon
        )
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """Return ``silu(gate) * up`` (Shazeer 2020) of ``[..., 2 * size]``, gate first."""
        size = x.shape[-1] // 2
        out = x.new_empty((*x.shape[:-1], size))
        self._functions["silu_and_mul"](*_addresses(x, out), out.numel() // size, size)
        return out

    def silu_and_mul_backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of ``silu_and_mul`` with respect to ``x``."""
        out = torch.empty_like(x)
        size = x.shape[-1] // 2
        self._functions["silu_and_mul_backward"](
            *_addresses(x, grad, out), grad.numel() // size, size
        )
        return out

    def logsumexp(self, logits: Tensor) -> Tensor:
        """Return ``log(sum(exp(row)))`` of each row of ``[n, size]``, float32."""
        out = torch.empty(len(logits), dtype=torch.float32)
        self._functions["logsumexp"](*_addresses(logits, out), len(logits), logits.shape[1])
        return out

    def token_logprob_backward(
        self, logits: Tensor, lse: Tensor, tokens: Tensor, grad: Tensor
    ) -> Tensor:
        """Return the gradient of the tokens' log-probs with respect to the logits."""
        out = torch.empty_like(logits)
        self._functions["token_logprob_backward"](
            *_addresses(logits, lse, tokens, grad, out), *logits.shape
        )
        return out

    def kl_div(self, p: Tensor, p_lse: Tensor, q: Tensor, q_lse: Tensor) -> Tensor:
        """Return the KL divergence ``sum p (log p - log q)`` of each row of logits, float32
        ``[n]``.
        """
        out = torch.empty(len(p), dtype=torch.float32)
        self._functions["kl_div"](*_addresses(p, p_lse, q, q_lse, out), *p.shape)
        return out

    def kl_div_backward(
        self, p: Tensor, p_lse: Tensor, q: Tensor, q_lse: Tensor, grad: Tensor
    ) -> Tensor:
        """Return the gradient of ``kl_div`` with respect to the logits of ``q``."""
        out = torch.empty_like(q)
        self._functions["kl_div_backward"](*_addresses(p, p_lse, q, q_lse, grad, out), *q.shape)
        return out


def _addresses(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def _shape_array(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> ctypes.Array[ctypes.c_int64]:
    numbers = (
        len(q),
        heads.heads,
        heads.kv_heads,
        heads.dim,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        heads.window,
    )
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _pack_ancestors(segments: Segments) -> tuple[int, int, int]:
    return segments.table.data_ptr(), len(segments.table), segments.ancestors.data_ptr()
