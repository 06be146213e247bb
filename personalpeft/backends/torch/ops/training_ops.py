"""The operations of a training step for CPUs, with their gradients, compiled from C++.

Invariants: each computes what autograd would, up to rounding. A token's results depend on its own
path alone. Shapes: T tokens. Tensors are in the base's dtype and contiguous, unless noted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What attention over a packed sequence is computed from.

    Attributes:
        qkv: Queries ``[T, heads * dim]``, and keys and values ``[T, kv_heads * dim]``, before the
            rotary embedding; only rows must be contiguous.
        cos: ``[T, dim]``.
        sin: ``[T, dim]``.
        segments: The paths.
        heads: The shape of attention.
    """

    qkv: tuple[Tensor, Tensor, Tensor]
    cos: Tensor
    sin: Tensor
    segments: Segments
    heads: Heads

    def packed(self) -> tuple[Any, ...]:
        """Return the inputs as arguments of the C++ operations."""
        heads, segments = self.heads, self.segments
        sizes = (len(self.qkv[0]), heads.heads, heads.kv_heads, heads.dim)
        numbers = (*sizes, *(tensor.stride(0) for tensor in self.qkv), heads.window)
        return (
            *self.qkv,
            self.cos,
            self.sin,
            (ctypes.c_int64 * len(numbers))(*numbers),
            heads.scaling,
            segments.table,
            len(segments.table),
            segments.ancestors,
        )


class TrainingOps:
    """Call the C++ operations of a library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def attention(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Return the attention of each token over its path, and each softmax's log-sum-exp.

        The first is ``[T, heads * dim]``, the second float32 ``[T, heads]``.
        """
        q, heads = inputs.qkv[0], inputs.heads
        out = q.new_empty((len(q), heads.heads * heads.dim))
        lse = torch.empty((len(q), heads.heads), dtype=torch.float32)
        self._library.attention(*inputs.packed(), out, lse)
        return out, lse

    def attention_backward(
        self, inputs: AttentionInputs, grad: Tensor, lse: Tensor, outputs: Sequence[Tensor]
    ) -> None:
        """Write the gradients of ``q``, ``k`` and ``v``.

        Args:
            inputs: Those of ``attention``.
            grad: Gradient of its result, ``[T, heads * dim]``.
            lse: Its log-sum-exp, ``[T, heads]``.
            outputs: The three gradients, with the strides of ``q``, ``k`` and ``v``.
        """
        heads, total = inputs.heads, inputs.segments.total
        padded_dim = -(-heads.dim // _LANES) * _LANES
        path_grads = torch.empty((2, total, heads.kv_heads, padded_dim), dtype=torch.float32)
        self._library.attention_backward(*inputs.packed(), grad, lse, path_grads, total, *outputs)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """Return ``silu(gate) * up`` (Shazeer 2020) of ``[..., 2 * size]``, gate first."""
        size = x.shape[-1] // 2
        out = x.new_empty((*x.shape[:-1], size))
        self._library.silu_and_mul(x, out, out.numel() // size, size)
        return out

    def silu_and_mul_backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of ``silu_and_mul`` with respect to ``x``."""
        out = torch.empty_like(x)
        size = x.shape[-1] // 2
        self._library.silu_and_mul_backward(x, grad, out, grad.numel() // size, size)
        return out

    def logsumexp(self, logits: Tensor) -> Tensor:
        """Return ``log(sum(exp(row)))`` of each row of ``[n, size]``, float32."""
        out = torch.empty(len(logits), dtype=torch.float32)
        self._library.logsumexp(logits, out, len(logits), logits.shape[1])
        return out

    def token_logprob_backward(
        self, logits: Tensor, lse: Tensor, tokens: Tensor, grad: Tensor
    ) -> Tensor:
        """Return the gradient of the tokens' log-probs with respect to the logits.

        Args:
            logits: ``[n, vocabulary]``.
            lse: Their log-sum-exp, ``[n]``.
            tokens: One token of each row, int64 ``[n]``.
            grad: Gradient of each log-prob, ``[n]``.
        """
        out = torch.empty_like(logits)
        self._library.token_logprob_backward(logits, lse, tokens, grad, out, *logits.shape)
        return out

    def kl_div(self, p: Tensor, p_lse: Tensor, q: Tensor, q_lse: Tensor) -> Tensor:
        """Return the KL divergence ``sum p (log p - log q)`` of each row, float32 ``[n]``.

        Args:
            p: Logits of the reference, ``[n, vocabulary]``.
            p_lse: Their log-sum-exp, ``[n]``.
            q: Logits of the policy, ``[n, vocabulary]``.
            q_lse: Their log-sum-exp, ``[n]``.
        """
        out = torch.empty(len(p), dtype=torch.float32)
        self._library.kl_div(p, p_lse, q, q_lse, out, *p.shape)
        return out

    def kl_div_backward(
        self, p: Tensor, p_lse: Tensor, q: Tensor, q_lse: Tensor, grad: Tensor
    ) -> Tensor:
        """Return the gradient of ``kl_div`` with respect to ``q``.

        Args:
            p: Logits of the reference, ``[n, vocabulary]``.
            p_lse: Their log-sum-exp, ``[n]``.
            q: Logits of the policy, ``[n, vocabulary]``.
            q_lse: Their log-sum-exp, ``[n]``.
            grad: Gradient of each row's divergence, ``[n]``.
        """
        out = torch.empty_like(q)
        self._library.kl_div_backward(p, p_lse, q, q_lse, grad, out, *q.shape)
        return out
