"""Modules with hand-written gradients for norms, gated MLPs and attention.

Under autograd each is a dozen operators that read and write all activations. Attention over a
packed sequence is quadratic there. Here each is one C++ loop forward and one backward
(ops/csrc/training.cpp).

Invariants: a fused module computes what the original does, up to rounding. Its weights are frozen.
Without training operations only inference is fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from personalpeft.backends.openmp import limit_threads
from personalpeft.backends.torch.autograd import apply_function, differentiable
from personalpeft.backends.torch.kv_cache import ForwardContext
from personalpeft.backends.torch.lora_layers import LoRALinear
from personalpeft.backends.torch.ops.base import AttentionParams, Ops
from personalpeft.backends.torch.ops.training_ops import (
    AttentionInputs,
    Heads,
    Segments,
    TrainingOps,
)

# Norms that are x / rms(x) * weight. Gemma's are not.
_RMS_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
# down(silu(gate) * up).
_GATED = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})
# Attention with rotary embeddings over whole heads and optional norms of q and k.
_ATTENTION = frozenset(
    {"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "Gemma3Attention"}
)
# Positions that are added to a table at a time.
_ROTARY_BLOCK = 512

_TableKey: TypeAlias = tuple[torch.dtype, torch.device, tuple[str, ...]]
"""Dtype, device and the model's kind of layer, if it has several."""


def install_fused_modules(module: nn.Module, ops: Ops) -> bool:
    """Replace supported modules. Return whether all attention takes ``segments`` for a mask."""
    training = ops.training
    modules = [(path, part, type(part).__name__) for path, part in module.named_modules()]
    attention = [part for _, part, kind in modules if kind.endswith("Attention")]
    fused_attention = training is not None and bool(attention)
    fused_attention &= all(map(_supports_fusion, attention))
    # Inner modules first: replacing the outer one changes the path to them.
    for path, part, kind in reversed(modules):
        replacement: nn.Module | None = None
        if kind in _RMS_NORMS:
            replacement = _FusedRMSNorm(part, ops)
        elif training is not None and kind in _GATED and _is_silu(part):
            replacement = _FusedGatedMLP(part, training)
        elif training is not None and fused_attention and kind in _ATTENTION:
            replacement = _FusedAttention(part, training)
        elif kind.endswith("RotaryEmbedding") and _is_fixed(part):
            replacement = RotaryTable(part)
        if replacement is not None:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, replacement)
    return fused_attention


class _FusedRMSNorm(nn.Module):
    def __init__(self, inner: Any, ops: Ops) -> None:
        super().__init__()
        self.inner = inner
        self._ops = ops
        self._epsilon = float(inner.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        ops, epsilon = self._ops, self._epsilon
        # The same operation with a gradient and without: checkpoints compute blocks both ways.
        return differentiable(
            lambda x, weight: ops.rms_norm(x, weight, epsilon),
            lambda x, weight, grad: ops.rms_norm_backward(x, weight, grad, epsilon),
            x.contiguous(),
            self.inner.weight,
        )


class RotaryTable(nn.Module):
    """Read the cosines and sines of positions from tables (RoFormer, Su et al. 2021).

    Torch computes them in pieces. The pieces' borders depend on the numbers of tokens and threads,
    and a border uses other instructions. One thread fills a table here, in blocks of one size. So a
    position has the same bits in any pass.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._tables: dict[_TableKey, tuple[Tensor, Tensor]] = {}
        self._length = 1

    def reserve(self, length: int) -> None:
        """Promise that later passes have no positions beyond these many.

        Reading the largest one from a GPU would wait for all that is queued there. Tables grow here
        and not in a pass, which may be recorded.
        """
        self._length = max(self._length, length)
        for key, (cos, _) in self._tables.items():
            if len(cos) < self._length:
                self._extend(key)

    def tensors(self) -> list[Tensor]:
        """Return the tables. ``reserve`` replaces those that become too short."""
        return [tensor for table in self._tables.values() for tensor in table]

    def forward(self, x: Tensor, position_ids: Tensor, *layer_type: str) -> tuple[Tensor, Tensor]:
        key = x.dtype, x.device, layer_type
        if key not in self._tables:
            self._extend(key)
        cos, sin = self._tables[key]
        return cos[position_ids], sin[position_ids]

    def _extend(self, key: _TableKey) -> None:
        """Add blocks to a table, or begin it. It grows on demand: all positions may be many."""
        dtype, device, layer_type = key
        parts = [self._tables[key]] if key in self._tables else []
        begin = sum(len(cos) for cos, _ in parts)
        # Not in inference mode: autograd rejects its tensors.
        with torch.inference_mode(mode=False), torch.no_grad(), limit_threads(1):
            example = torch.empty((1, 1, 1), dtype=dtype, device=device)
            for first in range(begin, self._length, _ROTARY_BLOCK):
                positions = torch.arange(first, first + _ROTARY_BLOCK, device=device)[None]
                cos, sin = (values[0] for values in self.inner(example, positions, *layer_type))
                parts.append((cos, sin))
            cos, sin = (torch.cat(each) for each in zip(*parts, strict=True))
        self._tables[key] = cos, sin


def _is_fixed(part: Any) -> bool:
    """Return whether a position's values do not depend on the text's length."""
    kinds = part.rope_type.values() if isinstance(part.rope_type, dict) else [part.rope_type]
    return not {"dynamic", "longrope"} & set(kinds)


class _FusedGatedMLP(nn.Module):
    def __init__(self, inner: Any, ops: TrainingOps) -> None:
        super().__init__()
        self.inner = inner
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        ops = self._ops
        activated = differentiable(
            ops.silu_and_mul, ops.silu_and_mul_backward, self.inner.gate_proj.grouped.all_outputs(x)
        )
        result: Tensor = self.inner.down_proj(activated)
        return result


def _is_silu(part: Any) -> bool:
    is_grouped = _are_grouped(part.gate_proj, part.up_proj)
    return is_grouped and type(part.act_fn).__name__ in {"SiLUActivation", "SiLU"}


def _are_grouped(*layers: object) -> bool:
    """Return whether one product computes all layers."""
    groups = {layer.grouped if isinstance(layer, LoRALinear) else None for layer in layers}
    return len(groups) == 1 and None not in groups


class _FusedAttention(nn.Module):
    """Compute attention over ``segments`` or the cache of a ``batch``.

    The original module computes a pass without either, and a batch's pass where queries or keys
    have a norm.
    """

    def __init__(self, inner: Any, ops: TrainingOps) -> None:
        super().__init__()
        self.inner = inner
        self._ops = ops
        config = inner.config
        has_window = config if type(inner).__name__ == "MistralAttention" else inner
        self._heads = Heads(
            config.num_attention_heads,
            config.num_key_value_heads,
            inner.head_dim,
            inner.scaling,
            getattr(has_window, "sliding_window", None) or 0,
        )
        self._fused_qkv = _are_grouped(inner.q_proj, inner.k_proj, inner.v_proj) and not (
            hasattr(inner, "q_norm") or hasattr(inner, "k_norm")
        )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        segments: Segments | None = None,
        batch: ForwardContext | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        inner = self.inner
        if segments is None and batch is not None and self._fused_qkv:
            return self._attend_cache(hidden_states, position_embeddings, batch), None
        if segments is None:
            output: tuple[Tensor, Tensor | None] = inner(
                hidden_states, position_embeddings=position_embeddings, batch=batch, **kwargs
            )
            return output
        if self._fused_qkv:
            inputs = (inner.q_proj.grouped.all_outputs(hidden_states)[0],)
        else:
            tokens, dim = hidden_states.shape[1], self._heads.dim
            q, k, v = (
                project(hidden_states)[0] for project in (inner.q_proj, inner.k_proj, inner.v_proj)
            )
            if hasattr(inner, "q_norm"):
                q, k = inner.q_norm(q.view(tokens, -1, dim)), inner.k_norm(k.view(tokens, -1, dim))
            inputs = tuple(t.reshape(tokens, -1) for t in (q, k, v))
        cos, sin = (t[0].contiguous() for t in position_embeddings)
        shared = (cos, sin, segments, self._heads)
        out = apply_function(_AttentionFunction, self._ops, shared, *inputs)
        return inner.o_proj(out[None]), None

    def _attend_cache(
        self, hidden: Tensor, embeddings: tuple[Tensor, Tensor], batch: ForwardContext
    ) -> Tensor:
        inner, heads = self.inner, self._heads
        qkv = inner.q_proj.grouped.all_outputs(hidden)[0]
        cos, sin = (t[0].contiguous() for t in embeddings)
        kv = batch.layer(inner.layer_idx)
        q = batch.cache.ops.rotate_and_write_kv(qkv, cos, sin, heads, kv, batch.metadata)
        out = batch.attend(q, kv, AttentionParams(heads.scaling, window=heads.window))
        result: Tensor = inner.o_proj(out.flatten(1)[None])
        return result


def _supports_fusion(part: Any) -> bool:
    return type(part).__name__ in _ATTENTION and not getattr(part, "attn_logit_softcapping", None)


class _AttentionFunction(torch.autograd.Function):
    """Attention of queries, keys and values, separate or concatenated."""

    @staticmethod
    def forward(
        ctx: Any, ops: TrainingOps, shared: tuple[Tensor, Tensor, Segments, Heads], *qkv: Tensor
    ) -> Tensor:
        out, lse = ops.attention(AttentionInputs(_split_heads(qkv, shared[-1]), *shared))
        ctx.save_for_backward(lse, *qkv)
        ctx.args = ops, shared
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        lse, *qkv = ctx.saved_tensors
        ops, shared = ctx.args
        # With the inputs' strides: the kernel uses the same for both.
        qkv_grads = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in qkv]
        ops.attention_backward(
            AttentionInputs(_split_heads(qkv, shared[-1]), *shared),
            grads[0].contiguous(),
            lse,
            _split_heads(qkv_grads, shared[-1]),
        )
        return None, None, *qkv_grads


def _split_heads(inputs: Sequence[Tensor], heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values."""
    q_size, kv_size = heads.heads * heads.dim, heads.kv_heads * heads.dim
    q, k, v = inputs if len(inputs) == 3 else inputs[0].split([q_size, kv_size, kv_size], dim=1)
    return q, k, v
