"""The operations of a training step for processors, with their gradients, compiled like those of decoding.

Invariants: each computes what the model's own code computes under autograd, up to rounding; what is computed of one
token depends on its own path alone. Shapes: T tokens; numbers are in the base's own format and, where nothing else is
said, contiguous.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from personalpeft.backends.torch.ops.cpu_ops import SUFFIX, NoCompiler, bind_function, load_library

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "attend": (_P, _P, _P, _P, _P, _P, _F, _P, _I, _P, _P, _P),
    "attend_backward": (_P, _P, _P, _P, _P, _P, _F, _P, _I, _P, _P, _P, _P, _I, _P, _P, _P),
    "norm_backward": (_P, _P, _P, _P, _I, _I, _F),
    "gate": (_P, _P, _I, _I),
    "gate_backward": (_P, _P, _P, _I, _I),
    "totals": (_P, _P, _I, _I),
    "likelihood_backward": (_P, _P, _P, _P, _P, _I, _I),
    "divergence": (_P, _P, _P, _P, _P, _I, _I),
    "divergence_backward": (_P, _P, _P, _P, _P, _P, _I, _I),
}
# Floats to a padded head: the widest vectors that the compiled loops are written for.
_LANES = 16


@dataclass(frozen=True, slots=True)
class Segments:
    """A pack as chains of tokens (packing.py): int64 ``[n, 5]`` with the first token, the end, the number of ancestors,
    where these begin in ``ancestors``, and where the path begins among all paths, which have ``total`` tokens.
    """

    table: Tensor
    ancestors: Tensor
    total: int


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of attention: how many heads ask, how many keys and values they share, and how."""

    heads: int
    kv_heads: int
    dim: int
    scaling: float
    window: int


class TrainingOps:
    """Raises ``NoCompiler`` where this machine cannot build or load them."""

    def __init__(self, cache: Path, dtype: torch.dtype) -> None:
        if dtype not in SUFFIX:
            raise NoCompiler(f"there is none for {dtype}")
        library = load_library(cache, "training.cpp")
        self._call = {
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
        stretches: Segments,
        heads: Heads,
    ) -> tuple[Tensor, Tensor]:
        """Attention ``[T, heads * dim]`` of each token over its path, and the log of each softmax's sum.

        ``q`` is ``[T, heads * dim]``, ``k`` and ``v`` ``[T, kv_heads * dim]``, not yet turned to their positions, which
        ``cos`` and ``sin`` ``[T, dim]`` do; only their rows need be contiguous.
        """
        out = q.new_empty((len(q), heads.heads * heads.dim))
        sizes = torch.empty((len(q), heads.heads), dtype=torch.float32)
        self._call["attend"](
            *_addresses(q, k, v, cos, sin),
            _sizes(q, k, v, heads),
            heads.scaling,
            *_pack_ancestors(stretches),
            out.data_ptr(),
            sizes.data_ptr(),
        )
        return out, sizes

    def attention_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        stretches: Segments,
        heads: Heads,
        grad: Tensor,
        sizes: Tensor,
        into: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Writes the gradients to ``q``, ``k`` and ``v`` into tensors of the same strides."""
        wide = -(-heads.dim // _LANES) * _LANES
        paths = torch.empty((2, stretches.total, heads.kv_heads, wide), dtype=torch.float32)
        self._call["attend_backward"](
            *_addresses(q, k, v, cos, sin),
            _sizes(q, k, v, heads),
            heads.scaling,
            *_pack_ancestors(stretches),
            *_addresses(grad, sizes, paths),
            stretches.total,
            *_addresses(*into),
        )

    def norm_backward(self, x: Tensor, weight: Tensor, grad: Tensor, epsilon: float) -> Tensor:
        """The gradient of ``Kernels.norm`` to ``x``."""
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._call["norm_backward"](
            *_addresses(x, weight, grad, out), x.numel() // size, size, epsilon
        )
        return out

    def gate(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` (Shazeer 2020), of ``[..., 2 * size]`` that holds both side by side."""
        size = x.shape[-1] // 2
        out = x.new_empty((*x.shape[:-1], size))
        self._call["gate"](*_addresses(x, out), out.numel() // size, size)
        return out

    def gate_backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient of ``gate`` to ``x``."""
        out = torch.empty_like(x)
        size = x.shape[-1] // 2
        self._call["gate_backward"](*_addresses(x, grad, out), grad.numel() // size, size)
        return out

    def logsumexp(self, logits: Tensor) -> Tensor:
        """``log(sum(exp(row)))`` of each row of ``[n, size]``, float32."""
        out = torch.empty(len(logits), dtype=torch.float32)
        self._call["totals"](*_addresses(logits, out), len(logits), logits.shape[1])
        return out

    def token_logprob_backward(
        self, logits: Tensor, totals: Tensor, tokens: Tensor, slope: Tensor
    ) -> Tensor:
        """The gradient to the logits, where ``slope`` (float32 ``[n]``) is that of each row's log-prob of its token."""
        out = torch.empty_like(logits)
        self._call["likelihood_backward"](
            *_addresses(logits, totals, tokens, slope, out), *logits.shape
        )
        return out

    def kl_div(self, p: Tensor, p_totals: Tensor, q: Tensor, q_totals: Tensor) -> Tensor:
        """The sum of ``p (log p - log q)`` for each row of two sets of logits, float32 ``[n]``."""
        out = torch.empty(len(p), dtype=torch.float32)
        self._call["divergence"](*_addresses(p, p_totals, q, q_totals, out), *p.shape)
        return out

    def kl_div_backward(
        self, p: Tensor, p_totals: Tensor, q: Tensor, q_totals: Tensor, slope: Tensor
    ) -> Tensor:
        """The gradient of ``divergence`` to the logits of ``q``."""
        out = torch.empty_like(q)
        self._call["divergence_backward"](
            *_addresses(p, p_totals, q, q_totals, slope, out), *q.shape
        )
        return out


def _addresses(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def _sizes(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> ctypes.Array[ctypes.c_int64]:
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


def _pack_ancestors(stretches: Segments) -> tuple[int, int, int]:
    return stretches.table.data_ptr(), len(stretches.table), stretches.ancestors.data_ptr()
