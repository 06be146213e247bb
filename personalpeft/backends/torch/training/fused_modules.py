"""Modules with hand-written gradients for norms, gated MLPs and attention, and fused losses.

Under autograd each is a dozen operators that read and write all activations, and attention over a
packed sequence is quadratic. Here each is one C++ loop forward and one backward
(ops/csrc/training.cpp).

Invariants: a fused module computes what the original does, up to rounding. Its weights are frozen.
Without training operations only inference is fused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from personalpeft.backends.torch.lora_layers import LoRALinear, apply_function
from personalpeft.backends.torch.openmp import limit_threads
from personalpeft.backends.torch.ops.base import Ops
from personalpeft.backends.torch.ops.training_ops import Heads, Segments, TrainingOps
from personalpeft.backends.torch.training.packing import PackedSequence

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


def install_fused_modules(module: nn.Module, kernels: Ops) -> bool:
    """Replace supported modules. Return whether all attention takes ``segments`` for a mask."""
    training = kernels.training
    modules = [(path, part, type(part).__name__) for path, part in module.named_modules()]
    attention = [part for _, part, kind in modules if kind.endswith("Attention")]
    fused_attention = (
        training is not None
        and all(_supports_fusion(part) for part in attention)
        and bool(attention)
    )
    # Inner modules first: replacing the outer one changes the path to them.
    for path, part, kind in reversed(modules):
        replacement: nn.Module | None = None
        if kind in _RMS_NORMS:
            replacement = _FusedRMSNorm(part, kernels)
        elif training is not None and kind in _GATED and _is_silu(part):
            replacement = _FusedGatedMLP(part, training)
        elif training is not None and fused_attention and kind in _ATTENTION:
            replacement = _FusedAttention(part, training)
        elif kind.endswith("RotaryEmbedding") and _is_fixed(part):
            replacement = _RotaryTable(part)
        if replacement is not None:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, replacement)
    return fused_attention


def to_segments(packed: PackedSequence) -> Segments:
    """Return a packed sequence's segments as tensors."""
    rows: list[tuple[int, ...]] = []
    ancestors: list[int] = []
    total = 0
    for segment in packed.segments:
        rows.append((segment.begin, segment.end, len(segment.ancestors), len(ancestors), total))
        ancestors.extend(segment.ancestors)
        total += len(segment.ancestors) + segment.end - segment.begin
    return Segments(
        torch.tensor(rows, dtype=torch.int64), torch.tensor(ancestors, dtype=torch.int64), total
    )


def token_logprob(logits: Tensor, tokens: Tensor, training: TrainingOps | None) -> Tensor:
    """Return one token's log-prob for each row of ``[n, vocabulary]``, float32 ``[n]``."""
    if training is None:
        logits32 = logits.float()
        return logits32.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(logits32, dim=-1)
    output: Tensor = apply_function(_TokenLogprobFunction, logits, tokens, training)
    return output


def kl_div(p: Tensor, q: Tensor, training: TrainingOps | None) -> Tensor:
    """Return ``sum p (log p - log q)`` for each row of two sets of logits, float32 ``[n]``.

    No gradient flows to ``p``.
    """
    if training is None:
        log_p, log_q = (
            torch.log_softmax(logits, dim=-1, dtype=torch.float32) for logits in (p.detach(), q)
        )
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    divergence: Tensor = apply_function(_KLDivFunction, p.detach(), q, training)
    return divergence


class _FusedRMSNorm(nn.Module):
    def __init__(self, inner: Any, kernels: Ops) -> None:
        super().__init__()
        self.inner = inner
        self._kernels = kernels
        self._epsilon = float(inner.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._kernels.rms_norm(x.contiguous(), self.inner.weight, self._epsilon)
        if self._kernels.training is None:
            y: Tensor = self.inner(x)
            return y
        result: Tensor = apply_function(
            _NormFunction, x.contiguous(), self.inner.weight, self._epsilon, self._kernels
        )
        return result


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, kernels: Ops) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon, ctx.kernels = epsilon, kernels.training
        return kernels.rms_norm(x, weight, epsilon)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        return (
            ctx.kernels.rms_norm_backward(x, weight, grads[0].contiguous(), ctx.epsilon),
            None,
            None,
            None,
        )


class _RotaryTable(nn.Module):
    """Read the cosines and sines of positions from tables (RoFormer, Su et al. 2021).

    Torch computes them in pieces whose borders depend on the number of tokens and threads, with
    other instructions at a border. A table is filled in blocks of one size by one thread, so a
    position has the same bits in any pass.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._tables: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor, position_ids: Tensor, *layer_type: str) -> tuple[Tensor, Tensor]:
        key = (x.dtype, x.device, *layer_type)
        table = self._tables.get(key)
        # It grows on demand: a table of all positions may be large.
        filled = 0 if table is None else len(table[0])
        wanted = int(position_ids.max()) + 1
        if table is None or wanted > filled:
            table = self._tables[key] = self._extend(table, filled, wanted, x, layer_type)
        cos, sin = table
        return cos[position_ids], sin[position_ids]

    def _extend(
        self,
        table: tuple[Tensor, Tensor] | None,
        filled: int,
        wanted: int,
        x: Tensor,
        layer_type: tuple[str, ...],
    ) -> tuple[Tensor, Tensor]:
        parts = [] if table is None else [table]
        # Not in inference mode, whose tensors autograd rejects.
        with torch.inference_mode(mode=False), torch.no_grad(), limit_threads(1):
            example = torch.empty((1, 1, 1), dtype=x.dtype, device=x.device)
            for begin in range(filled, wanted, _ROTARY_BLOCK):
                positions = torch.arange(begin, begin + _ROTARY_BLOCK, device=x.device)[None]
                cos, sin = self.inner(example, positions, *layer_type)
                parts.append((cos[0], sin[0]))
            return torch.cat([cos for cos, _ in parts]), torch.cat([sin for _, sin in parts])


def _is_fixed(part: Any) -> bool:
    """Return whether a position's values do not depend on the text's length."""
    kinds = part.rope_type.values() if isinstance(part.rope_type, dict) else [part.rope_type]
    return not {"dynamic", "longrope"} & set(kinds)


class _FusedGatedMLP(nn.Module):
    def __init__(self, inner: Any, kernels: TrainingOps) -> None:
        super().__init__()
        self.inner = inner
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        gate_and_up = self.inner.gate_proj.all_outputs(x)
        if not torch.is_grad_enabled():
            y: Tensor = self.inner.down_proj(self._kernels.silu_and_mul(gate_and_up))
            return y
        activated = apply_function(_GateFunction, gate_and_up, self._kernels)
        result: Tensor = self.inner.down_proj(activated)
        return result


def _is_silu(part: Any) -> bool:
    gate, up = part.gate_proj, part.up_proj
    all_outputs = (
        isinstance(gate, LoRALinear) and isinstance(up, LoRALinear) and gate.shares_with(up)
    )
    return all_outputs and type(part.act_fn).__name__ in {"SiLUActivation", "SiLU"}


class _GateFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: TrainingOps) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kernels = kernels
        return kernels.silu_and_mul(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.kernels.silu_and_mul_backward(x, grads[0].contiguous()), None


class _FusedAttention(nn.Module):
    """Compute attention over ``segments``; a pass without them uses the original module."""

    def __init__(self, inner: Any, kernels: TrainingOps) -> None:
        super().__init__()
        self.inner = inner
        self._kernels = kernels
        config, dim = inner.config, int(inner.head_dim)
        window = getattr(inner, "sliding_window", None)
        if type(inner).__name__ == "MistralAttention":
            window = getattr(config, "sliding_window", None)
        self._heads = Heads(
            int(config.num_attention_heads),
            int(config.num_key_value_heads),
            dim,
            float(inner.scaling),
            window or 0,
        )
        q, k, v = inner.q_proj, inner.k_proj, inner.v_proj
        self._fused_qkv = (
            isinstance(q, LoRALinear)
            and q.shares_with(k)
            and q.shares_with(v)
            and not hasattr(inner, "q_norm")
            and not hasattr(inner, "k_norm")
        )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        segments: Segments | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        inner = self.inner
        if segments is None:
            output: tuple[Tensor, Tensor | None] = inner(
                hidden_states, position_embeddings=position_embeddings, **kwargs
            )
            return output
        cos, sin = (t[0].contiguous() for t in position_embeddings)
        args = (cos, sin, segments, self._heads, self._kernels)
        if self._fused_qkv:
            out = apply_function(
                _GroupedAttentionFunction, inner.q_proj.all_outputs(hidden_states)[0], *args
            )
        else:
            tokens, dim = hidden_states.shape[1], self._heads.dim
            q, k, v = (
                project(hidden_states)[0] for project in (inner.q_proj, inner.k_proj, inner.v_proj)
            )
            if hasattr(inner, "q_norm"):
                q, k = inner.q_norm(q.view(tokens, -1, dim)), inner.k_norm(k.view(tokens, -1, dim))
            out = apply_function(
                _AttentionFunction, *(t.reshape(tokens, -1) for t in (q, k, v)), *args
            )
        return inner.o_proj(out[None]), None


def _supports_fusion(part: Any) -> bool:
    return type(part).__name__ in _ATTENTION and not getattr(part, "attn_logit_softcapping", None)


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        segments: Segments,
        heads: Heads,
        kernels: TrainingOps,
    ) -> Tensor:
        out, lse = kernels.attention(q, k, v, cos, sin, segments, heads)
        ctx.save_for_backward(q, k, v, cos, sin, lse)
        ctx.args = segments, heads, kernels
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *saved, lse = ctx.saved_tensors
        segments, heads, kernels = ctx.args
        # With the inputs' strides, which the kernel uses for both.
        input_grads = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in saved[:3]]
        kernels.attention_backward(*saved, segments, heads, grads[0].contiguous(), lse, input_grads)
        return *input_grads, None, None, None, None, None


class _GroupedAttentionFunction(torch.autograd.Function):
    """Attention of concatenated queries, keys and values."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        segments: Segments,
        heads: Heads,
        kernels: TrainingOps,
    ) -> Tensor:
        out, lse = kernels.attention(*_split_heads(qkv, heads), cos, sin, segments, heads)
        ctx.save_for_backward(qkv, cos, sin, lse)
        ctx.args = segments, heads, kernels
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin, lse = ctx.saved_tensors
        segments, heads, kernels = ctx.args
        input_grads = torch.empty_like(qkv)
        kernels.attention_backward(
            *_split_heads(qkv, heads),
            cos,
            sin,
            segments,
            heads,
            grads[0].contiguous(),
            lse,
            _split_heads(input_grads, heads),
        )
        return input_grads, None, None, None, None, None


def _split_heads(qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    q_size, kv_size = heads.heads * heads.dim, heads.kv_heads * heads.dim
    return qkv[:, :q_size], qkv[:, q_size : q_size + kv_size], qkv[:, q_size + kv_size :]


class _TokenLogprobFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, kernels: TrainingOps) -> Tensor:
        logits = logits.contiguous()
        lse = kernels.logsumexp(logits)
        ctx.save_for_backward(logits, tokens, lse)
        ctx.kernels = kernels
        return logits.gather(1, tokens[:, None])[:, 0].float() - lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, tokens, lse = ctx.saved_tensors
        return (
            ctx.kernels.token_logprob_backward(logits, lse, tokens, grads[0].float().contiguous()),
            None,
            None,
        )


class _KLDivFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, q: Tensor, kernels: TrainingOps) -> Tensor:
        p, q = p.contiguous(), q.contiguous()
        args = p, kernels.logsumexp(p), q, kernels.logsumexp(q)
        ctx.save_for_backward(*args)
        ctx.kernels = kernels
        return kernels.kl_div(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        return (
            None,
            ctx.kernels.kl_div_backward(*ctx.saved_tensors, grads[0].float().contiguous()),
            None,
        )
