"""The paged key-value cache (PagedAttention, Kwon et al. 2023) and attention over it.

Invariants: keys and values are never moved. The pass that computes a token writes it once. A row
reads only the blocks of its own table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from personalpeft.backends.torch.lora_bank import lazy_zeros
from personalpeft.backends.torch.ops.base import KV_BLOCK_SIZE, AttentionMetadata, Ops, PrefillChunk


class PagedKVCache:
    """Keys and values of ``blocks`` blocks for each layer of a model."""

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
        self.keys = lazy_zeros((*shape, dim, KV_BLOCK_SIZE), dtype, device)
        self.values = lazy_zeros((*shape, KV_BLOCK_SIZE, dim), dtype, device)


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers."""
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
    """One pass over tokens of many rows: decoded tokens first, then ``chunks``."""

    cache: PagedKVCache
    metadata: AttentionMetadata
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
        """Write keys and values, and return the attention of all tokens, ``[T, heads, dim]``."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        self.cache.kernels.write_kv(k, v, keys, values, self.metadata)
        decoded = len(self.metadata.lengths)
        outputs = []
        if decoded:
            outputs.append(
                self.cache.kernels.paged_attention(
                    q[:decoded],
                    keys,
                    values,
                    self.metadata,
                    scaling=scaling,
                    softcap=softcap,
                    window=window,
                )
            )
        for chunk in self.chunks:
            queries = q[chunk.begin : chunk.end]
            outputs.append(
                self.cache.kernels.prefill_attention(
                    queries, keys, values, chunk, scaling=scaling, softcap=softcap, window=window
                )
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


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
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention over the cache if the pass has a ``batch``, else as transformers does."""
    if batch is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # The function is untyped after the mask.
        outputs: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return outputs
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = batch.attend(
        module.layer_idx, q, k, v, scaling=scale, softcap=softcap or 0.0, window=sliding_window or 0
    )
    return out[None], None
