"""The memory of the key-value cache."""

from __future__ import annotations

import psutil
import torch
from transformers import LlamaConfig

from personalpeft.backends.torch.kv_cache import PagedKVCache
from personalpeft.backends.torch.ops import choose_ops


def test_released_cache_takes_no_memory_and_holds_nothing() -> None:
    ops, _ = choose_ops(torch.device("cpu"), torch.float32, None)
    config = LlamaConfig(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, hidden_size=256
    )
    cache = PagedKVCache(config, 1024, ops)
    size = 2 * cache.keys.nbytes
    process = psutil.Process()
    cache.keys.fill_(1)
    cache.values.fill_(1)
    full = process.memory_info().rss
    cache.release()
    assert full - process.memory_info().rss > 0.9 * size
    assert not cache.keys.any()
    assert not cache.values.any()
