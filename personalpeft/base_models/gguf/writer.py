"""Write a base's weights as a GGUF file.

Invariants: llama.cpp computes from the file what transformers computes from the folder. Every
difference is refused by name. One weight at a time is in memory.

It writes only byte-level BPE tokenizers with a pre-tokenizer that llama.cpp has exactly. With a
similar one llama.cpp would load the file and tokenize texts wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from personalpeft.base_models.cache import cached_entry
from personalpeft.base_models.files import head_sizes, read_json, weights_of
from personalpeft.base_models.gguf.file import CACHED_FILE, gguf_file
from personalpeft.base_models.gguf.tensor_names import GgufNames
from personalpeft.base_models.types import Base
from personalpeft.errors import WeightsError
from personalpeft.types import canonical_digest

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from torch import Tensor

# Raise it where a file that was written before must not be served any more.
FORMAT = 3

# The bits of a bfloat16. numpy has no such type.
_BFLOAT16 = np.dtype(np.uint16)

_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITTING_PATTERNS = {"llama-bpe": _WORDS % r"\p{N}{1,3}", "qwen2": _WORDS % r"\p{N}"}
"""Pre-tokenizers' patterns by llama.cpp's names for them."""
AS_SAFETENSORS = (
    "Export it with --form safetensors, and convert that with the model's own tools if needed."
)
"""What to do where a merged model cannot be written as GGUF."""
_NAMES = {pattern: name for name, pattern in SPLITTING_PATTERNS.items()}


def resolve_gguf_file(base: Base, names: GgufNames) -> Path:
    """Return a base as one GGUF file: its source, or a file of the cache.

    Args:
        base: The base.
        names: Its tensor names in GGUF files.

    Raises:
        WeightsError: llama.cpp cannot compute the base, or the file cannot be written.
    """
    if file := gguf_file(base.card, base.cache):
        return file
    entry = cached_entry(
        base.card,
        canonical_digest([base.digest, "gguf"]),
        f"{FORMAT}.0",
        base.cache,
        lambda into: write_gguf(base, names, into / CACHED_FILE),
    )
    return entry.folder / CACHED_FILE


def write_gguf(
    base: Base,
    names: GgufNames,
    path: Path,
    weights: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
    *,
    for_others: bool = False,
) -> None:
    """Write a GGUF file with the weights of a base, or with others under the same names.

    Args:
        base: The base.
        names: The base's tensor names in GGUF files.
        path: The new file.
        weights: Yields other weights by name. It is called twice and must yield the same: the header
            comes before the data.
        for_others: Whether other programs will tokenize texts by the file.

    Raises:
        WeightsError: llama.cpp would compute or tokenize something else, or has no such tokenizer.
    """
    from gguf import GGUFWriter

    _check(base, names, for_others=for_others)
    writer = GGUFWriter(path, names.architecture)
    try:
        writer.add_name(base.card.title)
        _write_shape_fields(writer, names)
        if for_others:
            _write_tokenizer(writer, base)
        else:
            # For serving, backends/tokenizer.py turns texts into tokens.
            writer.add_tokenizer_model("none")
        _write_weights(writer, names, weights or partial(weights_of, base.folder))
    finally:
        writer.close()


def _check(base: Base, names: GgufNames, *, for_others: bool) -> None:
    """Refuse a base that llama.cpp would compute differently."""
    config = names.config
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    # Older configurations have "type".
    kinds = {
        str(each.get("rope_type") or each.get("type") or "default")
        for each in (rope.values() if _by_layer(rope) else [rope])
    }
    gemma = names.architecture == "gemma3"
    slides = config.get("use_sliding_window", True) and not gemma
    window = config.get("sliding_window") if slides else None
    differences = {
        "scales its positions (RoPE scaling)": kinds != {"default"},
        "rotates a part of each head (partial RoPE)": config.get("partial_rotary_factor", 1)
        not in (None, 1),
        "has a sliding window": window is not None and window < base.card.context,
        "has another activation than llama.cpp": (
            config.get("hidden_act") or config.get("hidden_activation")
        )
        not in (("gelu_pytorch_tanh", None) if gemma else ("silu", None)),
        "caps its logits (soft-capping)": any(
            config.get(f"{what}_logit_softcapping") for what in ("attn", "final")
        ),
    }
    if gemma:
        pattern = [
            "full_attention" if (n + 1) % 6 == 0 else "sliding_attention"
            for n in range(names.blocks)
        ]
        differences["has global attention in other blocks than llama.cpp"] = (
            config.get("layer_types", pattern) != pattern
            or config.get("sliding_window_pattern", 6) != 6
        )
        size = config.get("head_dim")
        differences["scales its attention differently from llama.cpp"] = (
            config.get("query_pre_attn_scalar", size) != size
        )
    for what, differs in differences.items():
        if differs:
            raise WeightsError(
                f"{base.card.name} {what}, which is not written to GGUF here.",
                hint=AS_SAFETENSORS
                if for_others
                else "Get the model's own GGUF file, or open the base with torch.",
            )


def _by_layer(rope: Mapping[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in rope.values())


def _write_shape_fields(writer: GGUFWriter, names: GgufNames) -> None:
    config = names.config

    def required(key: str) -> Any:
        if key not in config:
            raise WeightsError(
                f"The base's config.json has no {key}.",
                hint="Save it with transformers, which writes all keys.",
            )
        return config[key]

    hidden = int(required("hidden_size"))
    required("num_attention_heads")
    heads, kv_heads, size = head_sizes(config)
    writer.add_block_count(names.blocks)
    writer.add_context_length(int(required("max_position_embeddings")))
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(int(required("intermediate_size")))
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_layer_norm_rms_eps(float(required("rms_norm_eps")))
    writer.add_vocab_size(int(required("vocab_size")))
    gemma = names.architecture == "gemma3"
    far, near = _rope_bases(config, far=1e6 if gemma else 1e4, near=1e4)
    writer.add_rope_freq_base(far)
    if gemma:
        writer.add_sliding_window(int(required("sliding_window")))
        writer.add_float32(f"{names.architecture}.rope.freq_base_swa", near)


def _rope_bases(config: Mapping[str, Any], *, far: float, near: float) -> tuple[float, float]:
    """Return RoPE's theta of global and of local attention; the arguments are the defaults."""
    rope = config.get("rope_parameters") or {}
    if _by_layer(rope):
        return float(rope["full_attention"]["rope_theta"]), float(
            rope["sliding_attention"]["rope_theta"]
        )
    return (
        float(rope.get("rope_theta") or config.get("rope_theta") or far),
        float(config.get("rope_local_base_freq") or near),
    )


def _write_weights(
    writer: GGUFWriter, names: GgufNames, weights: Callable[[], Iterable[tuple[str, Tensor]]]
) -> None:
    """Write the infos of all weights, then the weights."""
    from gguf import GGMLQuantizationType

    tied = bool(names.config.get("tie_word_embeddings"))
    kinds: dict[str, np.dtype[Any]] = {}
    for name, tensor in weights():
        # transformers ignores lm_head where it is tied.
        if tied and name == "lm_head.weight":
            continue
        kind = kinds[name] = _kind(tensor)
        raw = GGMLQuantizationType.BF16 if kind == _BFLOAT16 else None
        writer.add_tensor_info(
            names.tensor(name),
            tuple(tensor.shape),
            kind,
            tensor.numel() * kind.itemsize,
            raw_dtype=raw,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in weights():
        if name in kinds:
            # In the order of their infos.
            writer.write_tensor_data(_rows(names, name, tensor, kinds[name]))


def _kind(tensor: Tensor) -> np.dtype[Any]:
    """Return the dtype that a weight is written in."""
    import torch

    # llama.cpp takes vectors in float32.
    if tensor.ndim < 2 or tensor.dtype not in (torch.bfloat16, torch.float16):
        return np.dtype(np.float32)
    # llama.cpp rounds activations to the weights' type; float16 has three bits more than bfloat16.
    largest = float(np.finfo(np.float16).max)
    fits = all(abs(float(end)) <= largest for end in tensor.aminmax())
    return np.dtype(np.float16) if fits else _BFLOAT16


def _rows(names: GgufNames, name: str, tensor: Tensor, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a weight as the file has it."""
    import torch

    if names.architecture == "gemma3" and name.endswith("norm.weight"):
        # transformers adds one to a Gemma's norms in use, llama.cpp stores the sum.
        tensor = tensor.float() + 1
    rows = tensor.float().numpy()
    for projection in names.heads:
        if f".{projection}." in name:
            rows = names.to_gguf(projection, rows)
    if kind == _BFLOAT16:
        return torch.from_numpy(rows).bfloat16().view(torch.uint16).numpy()
    return rows.astype(kind, copy=False)


def _write_tokenizer(writer: GGUFWriter, base: Base) -> None:
    if file := gguf_file(base.card, base.cache):
        _copy_tokenizer(writer, base, file)
        return
    content = json.loads((base.folder / "tokenizer.json").read_text("utf-8"))
    pre_tokenizer = _pre_tokenizer(content)
    model = content["model"]
    # llama.cpp needs merges.
    if model.get("type") != "BPE" or pre_tokenizer is None or not model.get("merges"):
        raise WeightsError(
            f"The tokenizer of {base.card.name} cannot be written as GGUF, "
            "so other programs could not read a text with it.",
            hint=AS_SAFETENSORS,
        )
    added = {each["id"]: each for each in content.get("added_tokens", ())}
    vocabulary = {number: token for token, number in model["vocab"].items()}
    tokens = vocabulary | {number: each["content"] for number, each in added.items()}
    # One for each embedding; a model often has more than tokens.
    size = int(read_json(base.folder / "config.json")["vocab_size"])
    if max(tokens) >= size:
        raise WeightsError(
            f"The tokenizer of {base.card.name} has tokens without embeddings.",
            hint="Get a fresh copy of the model.",
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([tokens.get(number, f"[unused{number}]") for number in range(size)])

    def kind(number: int) -> int:
        if number in added:
            return _CONTROL if added[number]["special"] else _USER
        return _NORMAL if number in tokens else _UNUSED

    writer.add_token_types([kind(number) for number in range(size)])
    merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    writer.add_token_merges(list(merges))
    ids = {token: number for number, token in tokens.items()}
    if base.bos in ids:
        writer.add_bos_token_id(ids[base.bos])
    end = next((token for token in base.stop_tokens if token in ids), None)
    if end is not None:
        writer.add_eos_token_id(ids[end])
    writer.add_add_bos_token(False)
    writer.add_chat_template(base.template)


def _copy_tokenizer(writer: GGUFWriter, base: Base, file: Path) -> None:
    """Copy the fields of the GGUF file that the base comes from."""
    from gguf import GGUFReader, GGUFValueType

    for key, field in GGUFReader(file).fields.items():
        if key.startswith("tokenizer.") and key != "tokenizer.chat_template":
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    writer.add_chat_template(base.template)


def _pre_tokenizer(content: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of exactly this pre-tokenizer, if it has one."""
    # llama.cpp does not normalise. NFC leaves most texts unchanged, other normalizers do not.
    normalizer = content.get("normalizer")
    if normalizer and normalizer.get("type") != "NFC":
        return None
    first = content.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers", [first])
    if any(step.get("add_prefix_space") for step in steps):
        return None
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        return _NAMES.get(steps[0].get("pattern", {}).get("Regex"))
    return None
