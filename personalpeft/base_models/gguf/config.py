"""Complete the configuration that transformers makes from a GGUF file.

transformers ignores the size of a head, how positions are scaled, and how many tokens there are.
Nothing fails, but the model computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from personalpeft.base_models.gguf.describe import rope_factor
from personalpeft.base_models.gguf.header import Value
from personalpeft.base_models.mapped_weights import MappedTensor, Numbers
from personalpeft.errors import WeightsError

# Llama 3.1 and 3.2: https://arxiv.org/abs/2407.21783. The file holds only the resulting factors.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GEMMA_27B_BLOCKS = 62
_ROPE_BASE = 10_000.0  # of a file that names none
_LLAMA3_FACTORS = (8.0, 16.0, 32.0)


def correct_config(
    config: Any, metadata: Mapping[str, Value], tensors: Mapping[str, MappedTensor]
) -> None:
    """Set what transformers left out, and change nothing else.

    Args:
        config: The configuration of transformers.
        metadata: The file's metadata.
        tensors: Its tensors.

    Raises:
        WeightsError: The file scales positions in an unknown way.
    """
    architecture = metadata.get("general.architecture")
    # A file may name another number: that before tokens were added.
    config.vocab_size = tensors["token_embd.weight"].shape[0]
    head_dim = metadata.get(f"{architecture}.attention.key_length")
    if head_dim is not None and getattr(config, "head_dim", head_dim) != head_dim:
        config.head_dim = head_dim
    if architecture == "gemma3":
        # The 27B model scales queries by the average head, smaller ones by their own.
        large = config.num_hidden_layers == _GEMMA_27B_BLOCKS
        average = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = average if large else config.head_dim
        rope = config.rope_parameters
        bases = {"full_attention": "rope.freq_base", "sliding_attention": "rope.freq_base_swa"}
        thetas = {
            kind: {**rope[kind], "rope_theta": metadata.get(f"gemma3.{key}", _ROPE_BASE)}
            for kind, key in bases.items()
        }
        factor = rope_factor(metadata, "gemma3")
        if factor != 1.0:
            # Local attention is never scaled.
            thetas["full_attention"] |= {"rope_type": "linear", "factor": factor}
        config.rope_parameters = {**rope, **thetas}
    if scales := tensors.get("rope_freqs.weight"):
        config.rope_parameters = _llama3_rope(config, scales.numbers(slice(None), slice(None))[0])


def _llama3_rope(config: Any, divisors: Numbers) -> dict[str, Any]:
    """Return the scaling with these divisors of the frequencies."""
    theta = float(config.rope_parameters["rope_theta"])
    for factor in _LLAMA3_FACTORS:
        rope = {**_LLAMA3, "rope_theta": theta, "factor": factor}
        expected = _divisors(rope, 2 * divisors.size)
        if np.allclose(divisors, expected, rtol=1e-3):
            return rope
    raise WeightsError(
        "The file scales its positions in a way that is not read from GGUF.",
        hint="Give a folder in Hugging Face format instead.",
    )


def _divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the divisor of each frequency, as Llama 3 defines it."""
    lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((original / lengths - low) / (high - low), 0.0, 1.0)
    divisors: np.ndarray[Any, np.dtype[np.float64]] = 1 / ((1 - smooth) / factor + smooth)
    return divisors
