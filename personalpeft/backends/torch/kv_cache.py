"""The memory for keys and values, taken once, and the attention that reads it.

Invariants: no key or value is ever moved; a token's place is written once, by the pass that computes it; a row reads
the blocks of its own table only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from personalpeft.backends.torch.lora_bank import lazy_zeros
from personalpeft.backends.torch.ops.base import BLOCK, AttentionMetadata, Ops, PrefillChunk


class PagedKVCache:
    """Keys and values of ``blocks`` blocks for every layer of a model."""

    def __init__(
        self,
        config: Any,
        blocks: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Ops,
    ) -> None:
        text = config.get_text_config()
        heads, dim = _heads(text)
        self.kernels = kernels
        self.layers = text.num_hidden_layers
        shape = (self.layers, blocks, heads)
        self.keys = lazy_zeros((*shape, dim, BLOCK), dtype, device)
        self.values = lazy_zeros((*shape, BLOCK, dim), dtype, device)


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """What a token's keys and values take in all layers."""
    text = config.get_text_config()
    heads, dim = _heads(text)
    return int(
        2 * text.num_hidden_layers * heads * dim * torch.empty((), dtype=dtype).element_size()
    )


def _heads(text: Any) -> tuple[int, int]:
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(text.num_key_value_heads), int(dim)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One pass over tokens of many rows: those that are decoded first, then ``chunks``."""

    pool: PagedKVCache
    places: AttentionMetadata
    chunks: Sequence[PrefillChunk]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        softcap: float,
        window: int,
    ) -> Tensor:
        """Attention of all tokens, ``[T, heads, dim]``, after their keys and values were put into the pool."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        self.pool.kernels.write_kv(k, v, keys, values, self.places)
        decoded = len(self.places.lengths)
        said = []
        if decoded:
            said.append(
                self.pool.kernels.paged_attention(
                    q[:decoded],
                    keys,
                    values,
                    self.places,
                    scaling=scaling,
                    softcap=softcap,
                    window=window,
                )
            )
        for chunk in self.chunks:
            own = q[chunk.begin : chunk.end]
            said.append(
                self.pool.kernels.prefill_attention(
                    own, keys, values, chunk, scaling=scaling, softcap=softcap, window=window
                )
            )
        return said[0] if len(said) == 1 else torch.cat(said)


def paged_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    batch: ForwardContext | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """What the model's layers call: over the pool where the pass brings one, else as transformers does it."""
    if batch is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # transformers' function is untyped for what follows the mask.
        said: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
        return said
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = batch.attend(
        module.layer_idx, q, k, v, scaling=scale, softcap=softcap or 0.0, window=sliding_window or 0
    )
    return out[None], None
