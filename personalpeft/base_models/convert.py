"""Make a folder with a model from a seed, or with the config and tokenizer of a GGUF file.

Invariant: the same source gives the same weights and tokens. ``RECIPE`` is a part of the digest of
every such base: a home refuses the adapters of another one. So raise it only if the weights or tokens
of usual files change. Raise ``inspect.FACTS`` for anything else, which makes the cache anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from personalpeft.base_models.gguf.describe import control_tokens, rope_factor
from personalpeft.base_models.gguf.header import Value, read_header
from personalpeft.base_models.gguf.writer import SPLITTING_PATTERNS
from personalpeft.base_models.mapped_weights import MappedTensor, Numbers, map_gguf
from personalpeft.base_models.types import RandomShape
from personalpeft.errors import WeightsError
from personalpeft.types import Progress

RECIPE = 1

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

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


def write_gguf_config(file: Path, into: Path, report: Progress) -> Path:
    """Write config, tokenizer and template of a GGUF file as transformers reads them.

    Args:
        file: The file.
        into: An empty folder.
        report: Called with the stage and its progress, 0 to 1.

    Returns:
        The folder.

    Raises:
        WeightsError: The file scales positions in an unknown way.
    """
    import torch
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoTokenizer,
        GenerationConfig,
    )

    folder, name = str(file.parent), file.name
    header = read_header(file)
    report("Reading the tokenizer", 0.0)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
    _set_pre_tokenizer(tokenizer.backend_tokenizer, header.metadata.get("tokenizer.ggml.pre"))
    _set_control_tokens(tokenizer.backend_tokenizer, control_tokens(header.metadata))
    tokenizer.save_pretrained(str(into))
    config = AutoConfig.from_pretrained(folder, gguf_file=name, local_files_only=True)
    _correct_config(config, header.metadata, map_gguf(file))
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config.architectures = [model_class.__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(str(into))
    GenerationConfig.from_model_config(config).save_pretrained(str(into))
    return into


def _set_control_tokens(tokenizer: Any, control: Sequence[str]) -> None:
    """Have the tokenizer read each of these as one token."""
    from tokenizers import AddedToken

    known = tokenizer.get_added_tokens_decoder().values()
    special = {each.content for each in known if each.special}
    tokenizer.add_special_tokens(
        [
            AddedToken(each, special=True, normalized=False)
            for each in control
            if each not in special
        ]
    )


def _set_pre_tokenizer(tokenizer: Any, splitting: object) -> None:
    # transformers ignores this field. It then splits numbers and spaces of the SmolLM family in
    # another way than training and llama.cpp do. Nothing fails, but answers get worse.
    from tokenizers import Regex, pre_tokenizers

    if pattern := SPLITTING_PATTERNS.get(str(splitting)):
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    if splitting == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        last = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, last])


def _correct_config(
    config: Any, metadata: Mapping[str, Value], tensors: Mapping[str, MappedTensor]
) -> None:
    """Set what transformers left out, and change nothing else.

    It ignores the size of a head, how positions are scaled, and how many tokens there are. Nothing
    fails, but the model computes something else.
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
        "The file scales its positions in a way that is not supported in GGUF files.",
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


def make_random_model(seed: int, shape: RandomShape, context: int, into: Path) -> Path:
    """Make a tiny fp32 Llama. Its tokens are bytes and ``CONTROL_TOKENS``.

    Args:
        seed: The seed of the weights. One generator draws them in the order of names.
        shape: The sizes of the model.
        context: Its positions.
        into: An empty folder.

    Returns:
        The folder.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _byte_tokenizer()
    tokenizer.save(str(into / "tokenizer.json"))
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.token_to_id("<|im_start|>"),
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(str(into))
    with torch.device("meta"):
        sizes = {
            name: weight.shape for name, weight in LlamaForCausalLM(config).state_dict().items()
        }
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(size)
        if len(size) == 1
        else torch.randn(size, generator=generator) / size[-1] ** 0.5
        for name, size in sorted(sizes.items())
    }
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    return into


def _byte_tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    )
    return tokenizer
