"""Writes a base's weights as a GGUF file, for those whose source is none.

Invariant: llama.cpp computes from the file what transformers computes from the folder. What it would compute otherwise, or
not at all, is refused by name.

The tokenizer is written where llama.cpp has its kind (byte-level BPE); where it has not, the file says that it has none: to
serve, tokens are all that llama.cpp needs, since text is turned into them here (``backends/text.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from personalpeft.bases.base import Base
from personalpeft.bases.files import own_gguf
from personalpeft.bases.gguf_names import GgufNames
from personalpeft.errors import WeightsError

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from torch import Tensor

# Names what is written; raise it with every change of that.
FORMAT = 1

_NORMAL, _CONTROL, _USER = 1, 3, 4


def write_gguf(base: Base, names: GgufNames, path: Path, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
    """Writes the base's own weights, or others by the same names. Raises ``WeightsError``, ``OSError``."""
    from gguf import GGUFWriter

    _check(base, names)
    writer = GGUFWriter(path, names.architecture)
    try:
        writer.add_name(base.card.title)
        _say_shape(writer, names)
        _say_tokenizer(writer, base)
        for name, tensor in weights_of(base) if weights is None else weights:
            _add(writer, names, name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def weights_of(base: Base) -> Iterator[tuple[str, Tensor]]:
    """All weights by transformers' names, one at a time."""
    from safetensors import safe_open

    for file in sorted(base.folder.glob("*.safetensors")):
        # By torch, since numpy has no bfloat16.
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                yield name, tensors.get_tensor(name)


def _check(base: Base, names: GgufNames) -> None:
    config = names.config
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kinds = {each.get("rope_type", "default") for each in (rope.values() if _by_layer(rope) else [rope])}
    if kinds - {"default", None}:
        raise WeightsError(
            f"{base.card.name} stretches its positions ({', '.join(sorted(map(str, kinds)))}), which is not written to GGUF here.",
            hint="Get the model's own GGUF file, or open the base with torch.",
        )
    if names.architecture == "gemma3":
        pattern = ["full_attention" if (n + 1) % 6 == 0 else "sliding_attention" for n in range(names.blocks)]
        if config.get("layer_types", pattern) != pattern:
            raise WeightsError(
                f"{base.card.name} looks far in other blocks than llama.cpp expects of a Gemma 3.",
                hint="Open the base with torch.",
            )


def _by_layer(rope: Mapping[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in rope.values())


def _say_shape(writer: GGUFWriter, names: GgufNames) -> None:
    config = names.config
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    writer.add_block_count(names.blocks)
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_vocab_size(int(config["vocab_size"]))
    far, near = _turning(config)
    writer.add_rope_freq_base(far)
    if names.architecture == "gemma3":
        writer.add_sliding_window(int(config["sliding_window"]))
        writer.add_float32(f"{names.architecture}.rope.freq_base_swa", near)


def _turning(config: Mapping[str, Any]) -> tuple[float, float]:
    """The base of the frequencies by which positions turn: of blocks that look far, and of those that look near."""
    rope = config.get("rope_parameters") or {}
    if _by_layer(rope):
        return float(rope["full_attention"]["rope_theta"]), float(rope["sliding_attention"]["rope_theta"])
    far = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    return far, float(config.get("rope_local_base_freq") or far)


def _add(writer: GGUFWriter, names: GgufNames, name: str, tensor: Tensor) -> None:
    import torch
    from gguf import GGMLQuantizationType

    # Vectors are wanted in full precision.
    half = tensor.dtype is torch.bfloat16 and tensor.ndim > 1
    if names.architecture == "gemma3" and name.endswith("norm.weight"):
        # transformers adds one to a Gemma's norms where it uses them, llama.cpp has them with it.
        tensor = tensor.float() + 1
    rows = tensor.float().numpy()
    for projection in names.heads:
        if f".{projection}." in name:
            rows = names.to_gguf(projection, rows)
    if not half:
        writer.add_tensor(names.tensor(name), rows)
    elif np.abs(rows).max() <= np.finfo(np.float16).max:
        # llama.cpp rounds what it multiplies to the weights' type, and float16 has three bits more for it than bfloat16.
        writer.add_tensor(names.tensor(name), rows.astype(np.float16))
    else:
        plain = torch.from_numpy(rows).bfloat16().view(torch.uint8).numpy()
        writer.add_tensor(names.tensor(name), plain, raw_dtype=GGMLQuantizationType.BF16)


def _say_tokenizer(writer: GGUFWriter, base: Base) -> None:
    if base.card.source.kind == "package":
        # It came out of a GGUF file, which says best how llama.cpp is to read its texts.
        with own_gguf(base.card) as file:
            _copy_tokenizer(writer, file)
        writer.add_chat_template(base.template)
        return
    tokenizer = json.loads((base.folder / "tokenizer.json").read_text("utf-8"))
    model, splitting = tokenizer["model"], _splitting(tokenizer)
    # It takes no vocabulary without merges either.
    if model.get("type") != "BPE" or splitting is None or not model.get("merges"):
        writer.add_tokenizer_model("none")
        return
    added = {each["id"]: each for each in tokenizer.get("added_tokens", ())}
    spelled = {number: token for token, number in model["vocab"].items()}
    tokens = spelled | {number: each["content"] for number, each in added.items()}
    size = max(tokens) + 1
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list([tokens.get(number, f"[unused{number}]") for number in range(size)])
    kinds = [(_CONTROL if added[n]["special"] else _USER) if n in added else _NORMAL for n in range(size)]
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    ids = {token: number for number, token in tokens.items()}
    if base.bos in ids:
        writer.add_bos_token_id(ids[base.bos])
    end = next((token for token in base.stop_tokens if token in ids), None)
    if end is not None:
        writer.add_eos_token_id(ids[end])
    writer.add_add_bos_token(False)
    writer.add_chat_template(base.template)


def _copy_tokenizer(writer: GGUFWriter, file: Path) -> None:
    from gguf import GGUFReader, GGUFValueType

    for key, field in GGUFReader(file).fields.items():
        if key.startswith("tokenizer.") and key != "tokenizer.chat_template":
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)


# Which of llama.cpp's ways to split a text before merging is this one's, by what its tokenizer does.
_LLAMA3 = r"\p{N}{1,3}"
_QWEN2 = r"\p{N}|"


def _splitting(tokenizer: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for how a text is split before it is merged; None for what it does not have."""
    told = json.dumps(tokenizer.get("pre_tokenizer"), ensure_ascii=False)
    if '"ByteLevel"' not in told:
        return None
    if '"Digits"' in told:
        return "smollm"
    if _LLAMA3 in told.replace("\\\\", "\\"):
        return "llama-bpe"
    if _QWEN2 in told.replace("\\\\", "\\"):
        return "qwen2"
    return "gpt-2"
