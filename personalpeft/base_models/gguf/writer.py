"""Writes a base's weights as a GGUF file, for those whose source is none.

Invariants: llama.cpp computes from the file what transformers computes from the folder; what it would compute otherwise, or
not at all, is refused by name. However large the base, weights are in memory one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from personalpeft.base_models.gguf.tensor_names import GgufNames
from personalpeft.base_models.gguf.tokenizer import tokenizer_writer
from personalpeft.base_models.types import Base
from personalpeft.errors import WeightsError

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from torch import Tensor

# Names what is written; raise it with every change of that.
FORMAT = 3

# numpy has no bfloat16: its bits.
_BFLOAT16 = np.dtype(np.uint16)


def write_gguf(
    base: Base,
    names: GgufNames,
    path: Path,
    weights: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
    *,
    for_others: bool = False,
) -> None:
    """Writes the base's own weights, or others by the same names. ``weights`` is asked for them twice, and gives the same: a
    file says first what is in it. ``for_others``: for programs that turn text into tokens by the file. Raises ``WeightsError``,
    ``OSError``.
    """
    from gguf import GGUFWriter

    _check(base, names)
    tokenizer = tokenizer_writer(base)
    if for_others and tokenizer is None:
        raise WeightsError(
            f"The tokenizer of {base.card.name} has no form in GGUF that is known here, so other programs could not read a text with it.",
            hint="Write it as safetensors, and convert that with the model's own tools.",
        )
    writer = GGUFWriter(path, names.architecture)
    try:
        writer.add_name(base.card.title)
        _write_shape_fields(writer, names)
        if tokenizer is None:
            # To serve, tokens are all that llama.cpp needs: text is turned into them here (backends/tokenizer.py).
            writer.add_tokenizer_model("none")
        else:
            tokenizer(writer)
        _write_weights(writer, names, weights or partial(weights_of, base))
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
    """That llama.cpp assumes of this base what its configuration says."""
    config = names.config
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    # Older configurations call it "type".
    kinds = {
        str(each.get("rope_type") or each.get("type") or "default")
        for each in (rope.values() if _by_layer(rope) else [rope])
    }
    gemma = names.architecture == "gemma3"
    slides = config.get("use_sliding_window", True) and not gemma
    window = config.get("sliding_window") if slides else None
    says = {
        "stretches its positions": kinds != {"default"},
        "turns a part of each head alone": config.get("partial_rotary_factor", 1) not in (None, 1),
        "looks back a part of its context alone": window is not None and window < base.card.context,
        "has another activation than llama.cpp": (
            config.get("hidden_act") or config.get("hidden_activation")
        )
        not in (("gelu_pytorch_tanh", None) if gemma else ("silu", None)),
        "caps its numbers": any(
            config.get(f"{what}_logit_softcapping") for what in ("attn", "final")
        ),
    }
    if gemma:
        pattern = [
            "full_attention" if (n + 1) % 6 == 0 else "sliding_attention"
            for n in range(names.blocks)
        ]
        says["looks far in other blocks than llama.cpp expects"] = (
            config.get("layer_types", pattern) != pattern
            or config.get("sliding_window_pattern", 6) != 6
        )
        size = config.get("head_dim")
        says["scales its attention by another number"] = (
            config.get("query_pre_attn_scalar", size) != size
        )
    for what, is_so in says.items():
        if is_so:
            raise WeightsError(
                f"{base.card.name} {what}, which is not written to GGUF here.",
                hint="Get the model's own GGUF file, or open the base with torch.",
            )


def _by_layer(rope: Mapping[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in rope.values())


def _write_shape_fields(writer: GGUFWriter, names: GgufNames) -> None:
    config = names.config

    def said(key: str) -> Any:
        if key not in config:
            raise WeightsError(
                f"The base's config.json does not say its {key}.",
                hint="Save it with transformers, which writes all of it.",
            )
        return config[key]

    heads = int(said("num_attention_heads"))
    size = int(config.get("head_dim") or int(said("hidden_size")) // heads)
    writer.add_block_count(names.blocks)
    writer.add_context_length(int(said("max_position_embeddings")))
    writer.add_embedding_length(int(said("hidden_size")))
    writer.add_feed_forward_length(int(said("intermediate_size")))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_layer_norm_rms_eps(float(said("rms_norm_eps")))
    writer.add_vocab_size(int(said("vocab_size")))
    gemma = names.architecture == "gemma3"
    far, near = _row_permutation(config, far=1e6 if gemma else 1e4, near=1e4)
    writer.add_rope_freq_base(far)
    if gemma:
        writer.add_sliding_window(int(said("sliding_window")))
        writer.add_float32(f"{names.architecture}.rope.freq_base_swa", near)


def _row_permutation(config: Mapping[str, Any], *, far: float, near: float) -> tuple[float, float]:
    """The base of the frequencies by which positions turn: of blocks that look far, and of those that look near; with what
    transformers takes where nothing is said.
    """
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
    """The rest of a file of which all else was said: what its weights are, then the weights, one by one."""
    from gguf import GGMLQuantizationType

    tied = bool(names.config.get("tie_word_embeddings"))
    kinds: dict[str, np.dtype[Any]] = {}
    for name, tensor in weights():
        # Where they are tied transformers does not look at what else may lie there.
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
            # In the order in which they were told of.
            writer.write_tensor_data(_rows(names, name, tensor, kinds[name]))


def _kind(tensor: Tensor) -> np.dtype[Any]:
    """What a weight is written as."""
    import torch

    # Vectors are wanted in full precision.
    if tensor.ndim < 2 or tensor.dtype not in (torch.bfloat16, torch.float16):
        return np.dtype(np.float32)
    # llama.cpp rounds what it multiplies to the weights' type, and float16 has three bits more for it than bfloat16.
    largest = float(np.finfo(np.float16).max)
    fits = all(abs(float(end)) <= largest for end in tensor.aminmax())
    return np.dtype(np.float16) if fits else _BFLOAT16


def _rows(names: GgufNames, name: str, tensor: Tensor, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """A weight as it lies in the file."""
    import torch

    if names.architecture == "gemma3" and name.endswith("norm.weight"):
        # transformers adds one to a Gemma's norms where it uses them, llama.cpp has them with it.
        tensor = tensor.float() + 1
    rows = tensor.float().numpy()
    for projection in names.heads:
        if f".{projection}." in name:
            rows = names.to_gguf(projection, rows)
    if kind == _BFLOAT16:
        return torch.from_numpy(rows).bfloat16().view(torch.uint16).numpy()
    return rows.astype(kind, copy=False)
