"""Stand-ins for the small parts of a model, whose gradients are written by hand: norms, gates, attention, likelihoods.

Under autograd each of them is a dozen operators that read and write all activations again, and attention over a pack
costs the square of its length. Here each is one loop forward and one back (ops/csrc/training.cpp).

Invariants: what a stand-in computes is what the module that it stands for computes, up to rounding; its weights are
frozen, so only what flows through has a gradient. Without training kernels nothing is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from personalpeft.backends.torch.lora_layers import LoRALinear
from personalpeft.backends.torch.openmp import limit_threads
from personalpeft.backends.torch.ops.base import Ops
from personalpeft.backends.torch.ops.training_ops import Heads, Segments, TrainingOps
from personalpeft.backends.torch.training.packing import PackedSequence

# Norms that are x / rms(x) * weight; Gemma's, for one, are not.
_RMS_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
# down(silu(gate) * up).
_GATED = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})
# Rotary positions over whole heads, scores without a cap, and norms of queries and keys where there are any.
_ATTENTION = frozenset(
    {"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "Gemma3Attention"}
)


# Positions that are added to a table at once.
_ROTARY_BLOCK = 512


def install_fused_modules(module: nn.Module, kernels: Ops) -> bool:
    """Replaces what can be replaced; whether all attention takes ``stretches`` in place of a mask."""
    training = kernels.training
    found = [(path, part, type(part).__name__) for path, part in module.named_modules()]
    attention = [part for _, part, kind in found if kind.endswith("Attention")]
    chains = training is not None and all(_is_plain(part) for part in attention) and bool(attention)
    # What lies inside first: afterwards the path to it leads through a stand-in.
    for path, part, kind in reversed(found):
        new: nn.Module | None = None
        if kind in _RMS_NORMS:
            new = _FusedRMSNorm(part, kernels)
        elif training is not None and kind in _GATED and _is_silu(part):
            new = _FusedGatedMLP(part, training)
        elif training is not None and chains and kind in _ATTENTION:
            new = _FusedAttention(part, training)
        elif kind.endswith("RotaryEmbedding") and _is_fixed(part):
            new = _RotaryTable(part)
        if new is not None:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, new)
    return chains


def to_segments(packed: PackedSequence) -> Segments:
    """A pack in the form that attention takes."""
    rows: list[tuple[int, ...]] = []
    ancestors: list[int] = []
    total = 0
    for stretch in packed.segments:
        rows.append((stretch.begin, stretch.end, len(stretch.ancestors), len(ancestors), total))
        ancestors.extend(stretch.ancestors)
        total += len(stretch.ancestors) + stretch.end - stretch.begin
    return Segments(
        torch.tensor(rows, dtype=torch.int64), torch.tensor(ancestors, dtype=torch.int64), total
    )


def token_logprob(logits: Tensor, tokens: Tensor, training: TrainingOps | None) -> Tensor:
    """The log-prob of one token for each row of ``[n, vocabulary]``, float32 ``[n]``."""
    if training is None:
        wide = logits.float()
        return wide.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(wide, dim=-1)
    said: Tensor = _TokenLogprobFunction.apply(logits, tokens, training)  # type: ignore[no-untyped-call]  # torch's own
    return said


def kl_div(p: Tensor, q: Tensor, training: TrainingOps | None) -> Tensor:
    """The sum of ``p (log p - log q)`` for each row of two sets of logits, float32 ``[n]``; no gradient flows to ``p``."""
    if training is None:
        known, said = (
            torch.log_softmax(logits, dim=-1, dtype=torch.float32) for logits in (p.detach(), q)
        )
        return (known.exp() * (known - said)).sum(-1)
    apart: Tensor = _KLDivFunction.apply(p.detach(), q, training)  # type: ignore[no-untyped-call]  # torch's own
    return apart


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
        result: Tensor = _NormFunction.apply(
            x.contiguous(), self.inner.weight, self._epsilon, self._kernels
        )  # type: ignore[no-untyped-call]  # torch's own
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
            ctx.kernels.norm_backward(x, weight, grads[0].contiguous(), ctx.epsilon),
            None,
            None,
            None,
        )


class _RotaryTable(nn.Module):
    """Read the cosines and sines of positions from tables.

    The framework computes them in pieces whose borders depend on the number of tokens and of threads, and at a border with
    other instructions. A table is filled in blocks of one size, by one thread, so that a position has the same bits in any pass.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._tables: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor, position_ids: Tensor, *layer_type: str) -> tuple[Tensor, Tensor]:
        key = (x.dtype, x.device, *layer_type)
        known = self._tables.get(key)
        # A table for all positions that a base can have may be large, so it grows with those that occur.
        filled = 0 if known is None else len(known[0])
        wanted = int(position_ids.max()) + 1
        if known is None or wanted > filled:
            known = self._tables[key] = self._extended(known, filled, wanted, x, layer_type)
        cos, sin = known
        return cos[position_ids], sin[position_ids]

    def _extended(
        self,
        known: tuple[Tensor, Tensor] | None,
        filled: int,
        wanted: int,
        x: Tensor,
        layer_type: tuple[str, ...],
    ) -> tuple[Tensor, Tensor]:
        parts = [] if known is None else [known]
        # Not in inference mode, whose tensors no gradient may pass by.
        with torch.inference_mode(mode=False), torch.no_grad(), limit_threads(1):
            example = torch.empty((1, 1, 1), dtype=x.dtype, device=x.device)
            for begin in range(filled, wanted, _ROTARY_BLOCK):
                positions = torch.arange(begin, begin + _ROTARY_BLOCK, device=x.device)[None]
                cos, sin = self.inner(example, positions, *layer_type)
                parts.append((cos[0], sin[0]))
            return torch.cat([cos for cos, _ in parts]), torch.cat([sin for _, sin in parts])


def _is_fixed(part: Any) -> bool:
    """Return whether a position's numbers are the same however long the text is."""
    kinds = part.rope_type.values() if isinstance(part.rope_type, dict) else [part.rope_type]
    return not {"dynamic", "longrope"} & set(kinds)


class _FusedGatedMLP(nn.Module):
    def __init__(self, inner: Any, kernels: TrainingOps) -> None:
        super().__init__()
        self.inner = inner
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        both = self.inner.gate_proj.together(x)
        if not torch.is_grad_enabled():
            y: Tensor = self.inner.down_proj(self._kernels.gate(both))
            return y
        between = _GateFunction.apply(both, self._kernels)  # type: ignore[no-untyped-call]  # torch's own
        result: Tensor = self.inner.down_proj(between)
        return result


def _is_silu(part: Any) -> bool:
    gate, up = part.gate_proj, part.up_proj
    together = isinstance(gate, LoRALinear) and isinstance(up, LoRALinear) and gate.shares_with(up)
    return together and type(part.act_fn).__name__ in {"SiLUActivation", "SiLU"}


class _GateFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: TrainingOps) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kernels = kernels
        return kernels.gate(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.kernels.gate_backward(x, grads[0].contiguous()), None


class _FusedAttention(nn.Module):
    """Attention over a pack where the pass brings its ``stretches``; every other pass goes through the model's own."""

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
        self._together = (
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
        stretches: Segments | None = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        inner = self.inner
        if stretches is None:
            said: tuple[Tensor, Tensor | None] = inner(
                hidden_states, position_embeddings=position_embeddings, **more
            )
            return said
        cos, sin = (t[0].contiguous() for t in position_embeddings)
        about = (cos, sin, stretches, self._heads, self._kernels)
        if self._together:
            out = _GroupedAttentionFunction.apply(inner.q_proj.together(hidden_states)[0], *about)  # type: ignore[no-untyped-call]  # torch's own
        else:
            tokens, dim = hidden_states.shape[1], self._heads.dim
            q, k, v = (
                project(hidden_states)[0] for project in (inner.q_proj, inner.k_proj, inner.v_proj)
            )
            if hasattr(inner, "q_norm"):
                q, k = inner.q_norm(q.view(tokens, -1, dim)), inner.k_norm(k.view(tokens, -1, dim))
            out = _AttentionFunction.apply(*(t.reshape(tokens, -1) for t in (q, k, v)), *about)  # type: ignore[no-untyped-call]  # torch's own
        return inner.o_proj(out[None]), None


def _is_plain(part: Any) -> bool:
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
        stretches: Segments,
        heads: Heads,
        kernels: TrainingOps,
    ) -> Tensor:
        out, sizes = kernels.attention(q, k, v, cos, sin, stretches, heads)
        ctx.save_for_backward(q, k, v, cos, sin, sizes)
        ctx.about = stretches, heads, kernels
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *given, sizes = ctx.saved_tensors
        stretches, heads, kernels = ctx.about
        # Of the strides that the kernel reads, which for a part of a whole are the whole's.
        into = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in given[:3]]
        kernels.attend_backward(*given, stretches, heads, grads[0].contiguous(), sizes, into)
        return *into, None, None, None, None, None


class _GroupedAttentionFunction(torch.autograd.Function):
    """Of queries, keys and values that lie side by side."""

    @staticmethod
    def forward(
        ctx: Any,
        whole: Tensor,
        cos: Tensor,
        sin: Tensor,
        stretches: Segments,
        heads: Heads,
        kernels: TrainingOps,
    ) -> Tensor:
        out, sizes = kernels.attention(*_split_heads(whole, heads), cos, sin, stretches, heads)
        ctx.save_for_backward(whole, cos, sin, sizes)
        ctx.about = stretches, heads, kernels
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole, cos, sin, sizes = ctx.saved_tensors
        stretches, heads, kernels = ctx.about
        into = torch.empty_like(whole)
        kernels.attend_backward(
            *_split_heads(whole, heads),
            cos,
            sin,
            stretches,
            heads,
            grads[0].contiguous(),
            sizes,
            _split_heads(into, heads),
        )
        return into, None, None, None, None, None


def _split_heads(whole: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    asking, shared = heads.heads * heads.dim, heads.kv_heads * heads.dim
    return whole[:, :asking], whole[:, asking : asking + shared], whole[:, asking + shared :]


class _TokenLogprobFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, kernels: TrainingOps) -> Tensor:
        logits = logits.contiguous()
        totals = kernels.logsumexp(logits)
        ctx.save_for_backward(logits, tokens, totals)
        ctx.kernels = kernels
        return logits.gather(1, tokens[:, None])[:, 0].float() - totals

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, tokens, totals = ctx.saved_tensors
        return (
            ctx.kernels.likelihood_backward(logits, totals, tokens, grads[0].float().contiguous()),
            None,
            None,
        )


class _KLDivFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, q: Tensor, kernels: TrainingOps) -> Tensor:
        p, q = p.contiguous(), q.contiguous()
        known = p, kernels.logsumexp(p), q, kernels.logsumexp(q)
        ctx.save_for_backward(*known)
        ctx.kernels = kernels
        return kernels.kl_div(*known)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        return (
            None,
            ctx.kernels.kl_div_backward(*ctx.saved_tensors, grads[0].float().contiguous()),
            None,
        )
