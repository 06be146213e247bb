"""Unpack the weights of a GGUF file to safetensors, a few rows at a time.

Invariants: the numbers are those that transformers unpacks, bit by bit: in float32, or rounded once
to bfloat16. Memory holds a few rows, not the model.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from personalpeft.base_models.files import MANIFEST, SINGLE, safetensors_header
from personalpeft.base_models.gguf.tensor_names import GgufNames
from personalpeft.base_models.mapped_weights import MappedWeights, Numbers, map_gguf
from personalpeft.errors import WeightsError
from personalpeft.types import Progress

# Numbers that are unpacked at a time.
_NUMBERS = 1 << 22


def unpack_gguf(
    file: Path, config_folder: Path, into: Path, report: Progress, *, full: bool
) -> None:
    """Dequantise a GGUF file to safetensors beside its config, tokenizer and template.

    Args:
        file: The file.
        config_folder: The folder that ``write_gguf_config`` wrote.
        into: An empty folder.
        report: Called with the stage and its progress, 0 to 1.
        full: Whether to write float32, the file's own numbers, instead of bfloat16.

    Raises:
        WeightsError: A weight is missing or has another shape.
    """
    from transformers import AutoConfig

    for each in config_folder.iterdir():
        if each.name != MANIFEST:
            shutil.copyfile(each, into / each.name)
    config = AutoConfig.from_pretrained(str(config_folder), local_files_only=True)
    names = GgufNames.of_config(config.model_type, config.to_dict(), config.num_hidden_layers, "")
    weights, shapes = MappedWeights(map_gguf(file), names), _shapes(config)
    total, done = sum(map(math.prod, shapes.values())), 0
    dtype, width = ("F32", 4) if full else ("BF16", 2)
    entries = {name: (dtype, shape, width * math.prod(shape)) for name, shape in shapes.items()}
    with (into / SINGLE).open("wb") as out:
        out.write(safetensors_header(entries, {"format": "pt"}))
        for name, shape in shapes.items():
            if weights.shape(name) != shape:
                raise WeightsError(
                    f"The file's weight {names.tensor(name)} must have the shape {shape}.",
                    hint="Get a fresh copy of the file.",
                )
            for rows in weights.parts(name, _NUMBERS):
                out.write(rows.tobytes() if full else _to_bfloat16(rows))
                done += rows.size
                report("Unpacking the weights", done / total)


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of transformers, in the order of names."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).state_dict()
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return {name: tuple(weights[name].shape) for name in sorted(weights)}


def _to_bfloat16(rows: Numbers) -> bytes:
    import torch

    # A mapped file is read-only, and torch wants an array that is not.
    numbers = torch.from_numpy(np.require(rows, requirements=("C", "W"))).bfloat16()
    return bytes(numbers.view(torch.uint8).numpy().data)
