"""The operations in torch calls alone, for any device. Faster ones are tested against them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from personalpeft.adapters.types import Matrix
from personalpeft.backends.torch.ops.base import (
    KV_BLOCK_SIZE,
    AttentionMetadata,
    LoRAMapping,
    PrefillChunk,
    StackedLoRAWeights,
)


class ReferenceOps:
    """See ``Ops``."""

    name = "plain"
    batch_invariant = False
    training = None

    def pack_weights(self, source: Matrix, target: Tensor, factor: float) -> bool:
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = torch.from_numpy(np.multiply(source, np.float32(factor), dtype=np.float32))
        target.copy_(scaled)
        return bool(torch.isfinite(scaled).all())

    def apply_lora(
        self, x: Tensor, y: Tensor, mapping: LoRAMapping, weights: StackedLoRAWeights, block: int
    ) -> None:
        slots = mapping.slots.long()
        a, b = weights.a[slots, block], weights.b[slots, block]
        shrunk = torch.bmm(a, x[:, :, None])[:, :, 0]
        begin = 0
        for section, end in enumerate(weights.ends):
            inputs = shrunk[:, None, section * weights.max_rank : (section + 1) * weights.max_rank]
            y[:, begin:end] += torch.bmm(inputs, b[:, :, begin:end])[:, 0]
            begin = end

    def write_kv(
        self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata
    ) -> None:
        block, offset = metadata.write_slots // KV_BLOCK_SIZE, metadata.write_slots % KV_BLOCK_SIZE
        keys[block, :, :, offset] = k
        values[block, :, offset] = v

    def paged_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        metadata: AttentionMetadata,
        *,
        scaling: float,
        softcap: float,
        window: int,
    ) -> Tensor:
        out = torch.empty_like(q)
        for row, length in enumerate(metadata.lengths.tolist()):
            k, v = gather_kv(keys, values, metadata.block_table[row], length)
            first = max(0, length - window) if window else 0
            out[row] = attention(
                q[row : row + 1], k[first:], v[first:], mask=None, scaling=scaling, softcap=softcap
            )[0]
        return out

    def prefill_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        chunk: PrefillChunk,
        *,
        scaling: float,
        softcap: float,
        window: int,
    ) -> Tensor:
        k, v = gather_kv(keys, values, chunk.blocks, chunk.length)
        query_positions = torch.arange(chunk.length - len(q), chunk.length, device=q.device)[
            :, None
        ]
        key_positions = torch.arange(chunk.length, device=q.device)[None]
        seen = key_positions <= query_positions
        if window:
            seen &= query_positions - key_positions < window
        return attention(q, k, v, mask=seen, scaling=scaling, softcap=softcap)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon)
        return weight * (x32 * scale).to(x.dtype)

    def argmax(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


def gather_kv(keys: Tensor, values: Tensor, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return copies of a row's first ``length`` keys and values, ``[length, heads, dim]`` each."""
    used = blocks[: -(-length // KV_BLOCK_SIZE)].long()
    k = keys[used].permute(0, 3, 1, 2).flatten(0, 1)
    v = values[used].permute(0, 2, 1, 3).flatten(0, 1)
    return k[:length], v[:length]


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scaling: float, softcap: float = 0.0
) -> Tensor:
    """Return the attention of queries ``[n, heads, dim]`` over keys ``[m, kv_heads, dim]``.

    ``mask`` is ``[n, m]``, True where visible. ``softcap`` limits the scores (Gemma 2, section 2).
    """
    group = q.shape[1] // k.shape[1]
    # Repeated by hand: torch's enable_gqa is slow on CPUs.
    q, k, v = (
        q.transpose(0, 1),
        *(t.transpose(0, 1).repeat_interleave(group, dim=0) for t in (k, v)),
    )
    if softcap:
        scores = softcap * torch.tanh((q.float() @ k.float().transpose(1, 2)) * scaling / softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ v.float()).to(q.dtype).transpose(0, 1)
    out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scaling)
    return out[0].transpose(0, 1)
