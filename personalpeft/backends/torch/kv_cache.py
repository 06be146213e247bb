"""The paged key-value cache (PagedAttention, Kwon et al. 2023) and attention over it.

Invariants: keys and values are never moved. The pass that computes a token writes it once. They
are copied only to a row that begins with the same tokens. A row reads only the blocks of its own
table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from personalpeft.backends.torch.ops.base import (
    KV_BLOCK_SIZE,
    AttentionMetadata,
    AttentionParams,
    KVLayer,
    Ops,
    PrefillChunk,
)


class PagedKVCache:
    """Keys and values of ``num_blocks`` blocks for each layer of a model.

    Beside them is ``spare_block``, which belongs to no row.
    """

    def __init__(self, config: Any, num_blocks: int, ops: Ops) -> None:
        layers, heads, dim = _shape(config)
        self.ops = ops
        self.num_blocks = self.spare_block = num_blocks
        self._shapes = (
            (layers, num_blocks + 1, heads, dim, KV_BLOCK_SIZE),
            (layers, num_blocks + 1, heads, KV_BLOCK_SIZE, dim),
        )
        self.keys, self.values = (ops.zeros(*shape) for shape in self._shapes)

    def clear(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with zeros."""
        indices = torch.tensor(blocks, dtype=torch.long, device=self.keys.device)
        self.keys[:, indices] = 0
        self.values[:, indices] = 0

    def release(self) -> None:
        """Give the memory of a CPU's blocks back to the system. No block may be in use."""
        if self.keys.device.type == "cpu":
            self.keys, self.values = (self.ops.zeros(*shape) for shape in self._shapes)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first ``count`` tokens of a block to another block."""
        self.keys[:, target, :, :, :count] = self.keys[:, source, :, :, :count]
        self.values[:, target, :, :count] = self.values[:, source, :, :count]


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return 2 * math.prod(_shape(config)) * dtype.itemsize


def _shape(config: Any) -> tuple[int, int, int]:
    """Return the numbers of layers and of heads of keys, and the size of a head."""
    text = config.get_text_config()
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(text.num_hidden_layers), int(text.num_key_value_heads), int(dim)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One pass over tokens of many rows: decoded tokens first, then ``chunks``."""

    cache: PagedKVCache
    metadata: AttentionMetadata
    chunks: Sequence[PrefillChunk]

    def layer(self, layer: int) -> KVLayer:
        """Return the keys and values of one of the model's layers."""
        return KVLayer(self.cache.keys[layer], self.cache.values[layer])

    def attend(self, q: Tensor, kv: KVLayer, params: AttentionParams) -> Tensor:
        """Return the attention of T tokens, ``[T, heads, dim]``.

        Args:
            q: Queries, ``[T, heads, dim]``.
            kv: The cache of the layer, which has the tokens' keys and values.
            params: Scaling, window and soft cap.
        """
        ops, outputs = self.cache.ops, []
        if decoded := len(self.metadata.lengths):
            outputs.append(ops.paged_attention(q[:decoded], kv, self.metadata, params))
        for chunk in self.chunks:
            queries = q[chunk.begin : chunk.end]
            outputs.append(ops.prefill_attention(queries, kv, chunk, params))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def paged_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    batch: ForwardContext | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention over the cache if the pass has a ``batch``, else as transformers does.

    The signature is that of transformers' attention functions. T tokens are read.

    Args:
        module: The attention layer; its ``layer_idx`` names the layer of the cache.
        query: ``[1, heads, T, dim]``.
        key: ``[1, kv_heads, T, dim]``.
        value: ``[1, kv_heads, T, dim]``.
        attention_mask: Unused with a ``batch``.
        scaling: Factor of the scores; None for ``dim ** -0.5``.
        batch: The pass, with its cache.
        sliding_window: How many tokens back each one sees; None for all.
        softcap: Limit of the scores; None for none.
        **kwargs: Go to transformers.

    Returns:
        The attention, ``[1, T, heads, dim]``, and no weights.
    """
    if batch is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # With a mask torch's fused attention is slow on CPUs. On GPUs it adds gradients in any
        # order, so that a revision could not be built again.
        with sdpa_kernel(SDPBackend.MATH):
            # The function is untyped after the mask.
            outputs: tuple[Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **kwargs
            )
        return outputs
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    params = AttentionParams(scale, softcap or 0.0, sliding_window or 0)
    kv = batch.layer(module.layer_idx)
    batch.cache.ops.write_kv(k, v, kv, batch.metadata)
    return batch.attend(q, kv, params)[None], None
