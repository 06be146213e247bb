"""The operations in framework calls alone: right on every device, and what the faster ones are tested against."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from personalpeft.adapters.types import Matrix
from personalpeft.backends.torch.ops.base import (
    BLOCK,
    AttentionMetadata,
    LoRAMapping,
    PrefillChunk,
    StackedLoRAWeights,
)


class ReferenceOps:
    """See ``Kernels``."""

    name = "plain"
    batch_invariant = False
    training = None

    def pack_weights(self, source: Matrix, place: Tensor, factor: float) -> bool:
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = torch.from_numpy(np.multiply(source, np.float32(factor), dtype=np.float32))
        place.copy_(scaled)
        return bool(torch.isfinite(scaled).all())

    def apply_lora(
        self, x: Tensor, y: Tensor, pointers: LoRAMapping, shelf: StackedLoRAWeights, block: int
    ) -> None:
        slots = pointers.slots.long()
        a, b = shelf.a[slots, block], shelf.b[slots, block]
        narrow = torch.bmm(a, x[:, :, None])[:, :, 0]
        begin = 0
        for section, end in enumerate(shelf.ends):
            own = narrow[:, None, section * shelf.max_rank : (section + 1) * shelf.max_rank]
            y[:, begin:end] += torch.bmm(own, b[:, :, begin:end])[:, 0]
            begin = end

    def write_kv(
        self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: AttentionMetadata
    ) -> None:
        block, offset = places.write_slots // BLOCK, places.write_slots % BLOCK
        keys[block, :, :, offset] = k
        values[block, :, offset] = v

    def paged_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        places: AttentionMetadata,
        *,
        scaling: float,
        softcap: float,
        window: int,
    ) -> Tensor:
        said = torch.empty_like(q)
        for row, length in enumerate(places.lengths.tolist()):
            k, v = gather_kv(keys, values, places.block_table[row], length)
            first = max(0, length - window) if window else 0
            said[row] = attention(
                q[row : row + 1], k[first:], v[first:], mask=None, scaling=scaling, softcap=softcap
            )[0]
        return said

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
        own = torch.arange(chunk.length - len(q), chunk.length, device=q.device)[:, None]
        other = torch.arange(chunk.length, device=q.device)[None]
        seen = other <= own
        if window:
            seen &= own - other < window
        return attention(q, k, v, mask=seen, scaling=scaling, softcap=softcap)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        return weight * (wide * scale).to(x.dtype)

    def argmax(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


def gather_kv(keys: Tensor, values: Tensor, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The first ``length`` keys and values of a row, ``[length, heads, dim]`` each, copied out of its blocks."""
    used = blocks[: -(-length // BLOCK)].long()
    k = keys[used].permute(0, 3, 1, 2).flatten(0, 1)
    v = values[used].permute(0, 2, 1, 3).flatten(0, 1)
    return k[:length], v[:length]


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scaling: float, softcap: float = 0.0
) -> Tensor:
    """Attention of queries ``[n, heads, dim]`` over ``[m, fewer heads, dim]``; ``mask`` is ``[n, m]``, True where seen.

    Softcap is that of Gemma 2 (2024, section 2): scores are squashed before the softmax.
    """
    group = q.shape[1] // k.shape[1]
    # Repeated by hand: told to share heads, the framework takes a slow way on processors.
    q, k, v = (
        q.transpose(0, 1),
        *(t.transpose(0, 1).repeat_interleave(group, dim=0) for t in (k, v)),
    )
    if softcap:
        scores = softcap * torch.tanh((q.float() @ k.float().transpose(1, 2)) * scaling / softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ v.float()).to(q.dtype).transpose(0, 1)
    said = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scaling)
    return said[0].transpose(0, 1)
