"""Tiny GGUF files of the architectures that are read, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from personalpeft.base_models.types import Base

TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma3_text": {
        "num_hidden_layers": 6,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 40,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}
_GGUF_NAMES = {"gemma3_text": "gemma3"}
_SPLITTING = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2", "gemma3_text": "qwen2"}


def make_model(kind: str, vocabulary: int) -> Any:
    """Return a random model of transformers in float32, of a kind of ``CONFIGS``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**_SIZES, **CONFIGS[kind], "vocab_size": vocabulary}
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **fields), dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        spread = 0.3 if parameter.ndim > 1 else 0.1
        torch.nn.init.normal_(
            parameter, std=spread, mean=1.0 if name.endswith("norm.weight") else 0
        )
        # The file's conversion keeps bfloat16.
        parameter.data = parameter.data.bfloat16().float()
    return model.eval()


def write_model(
    kind: str,
    tokenizer: Base,
    path: Path,
    *,
    change: Callable[[Any], None] = lambda writer: None,
    template: str | None = TEMPLATE,
    leave_out: str = "",
    store: Callable[[str, Any], Any] = lambda name, rows: rows,
) -> Any:
    """Write a random model as a GGUF file, and return it.

    Args:
        kind: A key of ``CONFIGS``.
        tokenizer: The base whose tokens the file has.
        path: The new file.
        change: Adds or overwrites fields of the writer.
        template: The chat template, if any.
        leave_out: The name of a tensor that the file lacks.
        store: Returns how the file stores a tensor, from its name and its rows in float32.
    """
    import gguf
    from tokenizers import Tokenizer

    read = Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    tokens = [read.id_to_token(number) for number in range(read.get_vocab_size())] + ["Ġ1"]
    model = make_model(kind, len(tokens))
    config, architecture = model.config, _GGUF_NAMES.get(kind, kind)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"Tiny {kind}")
    writer.add_license("apache-2.0")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if kind == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_SPLITTING[kind])
    writer.add_token_list(tokens)
    kinds = (gguf.TokenType.CONTROL, gguf.TokenType.NORMAL)
    writer.add_token_types([kinds[token not in tokenizer.control] for token in tokens])
    writer.add_token_merges(["Ġ 1"])
    writer.add_bos_token_id(read.token_to_id("<|im_start|>"))
    writer.add_eos_token_id(read.token_to_id("<|im_end|>"))
    if template is not None:
        writer.add_chat_template(template)
    change(writer)
    _add_tensors(writer, model, architecture, leave_out, store)
    write_out(writer)
    return model


def write_out(writer: Any) -> None:
    """Write what was added to a ``GGUFWriter``."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copy_fields(reader: Any, writer: Any) -> None:
    """Copy the metadata of a file."""
    import gguf

    for key, field in reader.fields.items():
        # The reader lists format fields as keys, and the writer adds the architecture itself.
        if not key.startswith("GGUF.") and key != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)


def _add_tensors(
    writer: Any,
    model: Any,
    architecture: str,
    leave_out: str,
    store: Callable[[str, Any], Any],
) -> None:
    import gguf

    config = model.config
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = parameter.float().numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            rows = rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            rows = rows + 1
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found != leave_out:
            stored = store(found, rows.astype(np.float32))
            writer.add_tensor(found, np.ascontiguousarray(stored))
    if architecture == "llama":
        half = np.arange(0, config.head_dim, 2) / config.head_dim
        lengths = 2 * np.pi * LLAMA3_ROPE["rope_theta"] ** half
        smooth = np.clip((8192 / lengths - 1) / 3, 0, 1)
        divisors = 1 / ((1 - smooth) / LLAMA3_ROPE["factor"] + smooth)
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
