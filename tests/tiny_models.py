"""Tiny random models of architectures that cards name, made from transformers' configurations.

Each has what sets its architecture apart: scaled rotary embeddings, layers without positions, fused
projections, sliding attention in all layers, or a vision part. Qwen 3 and Gemma 3 are among the kinds of ``fast/backends``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.types import Base, ModelCard, Source
from personalpeft.types import Sampling

_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": None,
}
_GEMMA: dict[str, Any] = {
    **_SIZES,
    "head_dim": 16,
    "num_hidden_layers": 6,
    "max_position_embeddings": 512,
    "query_pre_attn_scalar": 16,
    "sliding_window": 40,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3.2": (
        "llama",
        {
            "num_hidden_layers": 3,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "smollm3": (
        "smollm3",
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "tie_word_embeddings": True,
            "max_position_embeddings": 512,
        },
    ),
    "phi4-mini": (
        "phi3",
        {
            "num_hidden_layers": 3,
            "max_position_embeddings": 2048,
            "original_max_position_embeddings": 512,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "original_max_position_embeddings": 512,
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [1.0, 4.0, 32.0],
            },
        },
    ),
    "gemma3-4b": ("gemma3", {}),
    # All of their layers slide, and the configuration names no kinds of layers.
    "mistral-7b": (
        "mistral",
        {"num_hidden_layers": 3, "max_position_embeddings": 512, "sliding_window": 16},
    ),
    "phi3-mini": (
        "phi3",
        {"num_hidden_layers": 3, "max_position_embeddings": 512, "sliding_window": 16},
    ),
}
"""By name: the model type, and the configuration's fields besides the sizes."""

_FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_SPLIT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_model(name: str, tokenizer: Base, folder: Path) -> Any:
    """Write a model of a shape of ``SHAPES`` with the tokenizer of another base, and return it."""
    from tokenizers import Tokenizer
    from transformers import AutoConfig

    kind, fields = SHAPES[name]
    vocabulary = Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json")).get_vocab_size()
    if kind == "gemma3":
        config = AutoConfig.for_model(
            "gemma3",
            text_config={**_GEMMA, "vocab_size": vocabulary},
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            mm_tokens_per_image=4,
        )
    else:
        config = AutoConfig.for_model(kind, **{**_SIZES, "vocab_size": vocabulary, **fields})
    return save_random_model(config, tokenizer, folder)


def save_random_model(config: Any, tokenizer: Base, folder: Path) -> Any:
    """Write a random model of a configuration with the tokenizer of a base, and return it."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            # At their initial scale the weights make every token equally likely.
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer.folder / file).exists():
            shutil.copy(tokenizer.folder / file, folder / file)
    return model.eval()


def card_of(name: str, tokenizer: Base, folder: Path) -> ModelCard:
    """Return a card for a folder that ``make_model`` wrote."""
    return ModelCard(
        name=name,
        title="A tiny one",
        licence="Apache-2.0",
        source=Source("folder", path=folder),
        targets=_FUSED if SHAPES[name][0] == "phi3" else _SPLIT,
        context=512,
        template=tokenizer.template,
        stop_tokens=tokenizer.stop_tokens,
        sampling=Sampling(),
    )


def make_base(name: str, tokenizer: Base, folder: Path) -> Base:
    """Make and open a model of a shape of ``SHAPES``."""
    make_model(name, tokenizer, folder / "weights")
    card = card_of(name, tokenizer, folder / "weights")
    return resolve_base(card, cache=folder / "cache")
