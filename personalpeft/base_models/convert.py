"""Make a folder with a model from a seed, or with the config and tokenizer of a GGUF file.

Invariant: the same source gives the same weights and tokens. ``RECIPE`` is a part of the digest of
every such base: a home refuses the adapters of another one. So raise it only if the weights or tokens
of usual files change. Raise ``inspect.FACTS`` for anything else, which makes the cache anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from personalpeft.base_models.gguf.config import correct_config
from personalpeft.base_models.gguf.describe import control_tokens
from personalpeft.base_models.gguf.header import read_header
from personalpeft.base_models.gguf.writer import SPLITTING_PATTERNS
from personalpeft.base_models.mapped_weights import map_gguf
from personalpeft.base_models.types import RandomShape
from personalpeft.types import Progress

RECIPE = 1

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


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
    correct_config(config, header.metadata, map_gguf(file))
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
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if splitting == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )


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
