"""Unpack the weights of a GGUF file to bf16 safetensors, a few rows at a time.

Invariants: the numbers are those that transformers unpacks, bit by bit. Memory holds a few rows, not
the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from personalpeft.base_models.gguf.tensor_names import ARCHITECTURES, ROTATED_BY_PAIRS, table
from personalpeft.errors import WeightsError

if TYPE_CHECKING:
    from gguf import GGUFReader

# Numbers that are unpacked at a time.
_NUMBERS = 1 << 22
_BFLOAT16_BYTES = 2


def unpack_weights(
    config: Any, reader: GGUFReader, file: Path, report: Callable[[float], None]
) -> None:
    """Write a file's weights under transformers' names.

    Args:
        config: The configuration of transformers, as the file's model has it.
        reader: The GGUF file.
        file: The new safetensors file.
        report: Called with the share that is done, 0 to 1.

    Raises:
        WeightsError: The architecture is not supported, or a weight is missing or has another shape.
    """
    if config.model_type not in ARCHITECTURES:
        raise WeightsError(
            f"A GGUF file must be of {', '.join(ARCHITECTURES)} to be a base; this one is of "
            f"{config.model_type}.",
            hint="Give a folder in Hugging Face format instead.",
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    sources = _sources(config, tensors)
    sizes = {name: shape for name, (_, shape) in sources.items()}
    total = sum(_count(shape) for shape in sizes.values())
    done = 0
    with file.open("wb") as out:
        out.write(_header(sizes))
        for name, (source, shape) in sources.items():
            heads = _heads(config, name)
            for rows in _rows(source, shape, heads):
                if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
                    # llama.cpp stores the sum, transformers adds one in use.
                    rows = rows - 1
                out.write(_to_bfloat16(rows))
                done += rows.size
                report(done / total)


def _sources(config: Any, tensors: Mapping[str, Any]) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return the tensor and shape of each weight of transformers, in the order of names."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).state_dict()
    names = table(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    sources = {}
    for name in sorted(weights):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        source, shape = tensors.get(str(gguf_name)), tuple(weights[name].shape)
        if source is None or tuple(int(n) for n in reversed(source.shape)) != shape:
            raise WeightsError(
                f"The file's weight {gguf_name} must have the shape {shape}.",
                hint="Get a fresh copy of the file.",
            )
        sources[name] = (source, shape)
    return sources


def _heads(config: Any, name: str) -> int:
    """Return in how many heads llama.cpp has a weight's rows in pairs; 0 for none."""
    if ARCHITECTURES[config.model_type] not in ROTATED_BY_PAIRS:
        return 0
    if name.endswith("self_attn.q_proj.weight"):
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if name.endswith("self_attn.k_proj.weight") else 0


def _rows(source: Any, shape: tuple[int, ...], heads: int) -> Iterator[Any]:
    """Yield a tensor's numbers in transformers' order, some rows at a time."""
    from gguf import dequantize

    matrix = source.data.reshape(shape[0], -1) if len(shape) > 1 else source.data[None]
    count = max(1, _NUMBERS // shape[-1])
    # Whole heads, since their rows change places.
    size = shape[0] // heads if heads else 1
    count = max(size, count // size * size)
    for begin in range(0, len(matrix), count):
        rows = dequantize(matrix[begin : begin + count], source.tensor_type)
        if heads:
            pairs = rows.reshape(-1, size // 2, 2, rows.shape[-1])
            rows = pairs.swapaxes(1, 2).reshape(rows.shape)
        yield rows.astype(np.float32, copy=False)


def _header(sizes: Mapping[str, tuple[int, ...]]) -> bytes:
    """Return the header of a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in sizes.items():
        end = at + _BFLOAT16_BYTES * _count(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _to_bfloat16(rows: Any) -> bytes:
    import torch

    # A mapped file is read-only, and torch wants an array that is not.
    numbers = torch.from_numpy(np.require(rows, requirements=("C", "W"))).bfloat16()
    return bytes(numbers.view(torch.uint8).numpy().data)
