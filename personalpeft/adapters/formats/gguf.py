"""Write and import GGUF LoRA files for llama.cpp.

Invariants: llama.cpp computes from a written file what this package computes from the stack, also
where the architecture permutes rows (``base_models/gguf/tensor_names.py``). An import reads a whole
file or nothing, in memory of at most five times the file's size at the largest rank.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from personalpeft.adapters.compose import as_single_lora, to_half
from personalpeft.adapters.formats.gguf_reader import read_gguf
from personalpeft.adapters.safe_io import format_error, read_file, safe_repr
from personalpeft.adapters.types import Adapter, AdapterStack, LoRAWeights, Manifest, Matrix
from personalpeft.adapters.validate import check_adapter
from personalpeft.base_models.gguf.tensor_names import GgufNames
from personalpeft.ids import check_layer_name
from personalpeft.types import Architecture, canonical_digest

_ALPHA = "adapter.lora.alpha"
_ACTIVATED = "adapter.alora.invocation_tokens"
_LORA = re.compile(r"(.+)\.(lora_[ab])")


def write_gguf_lora(names: GgufNames, stack: AdapterStack, path: Path, *, title: str = "") -> None:
    """Write a stack as one LoRA, in float16 unless the base is float32 or a number is too large.

    Raises:
        OSError: The file cannot be written.
        AdapterError: A layer's weight makes its numbers too large.
    """
    from gguf import GGUFWriter

    pairs, scaling = as_single_lora(stack)
    ranks = {pair.a.shape[1] for pair in pairs.values()}
    halves = (
        pairs
        if names.full
        else {n: LoRAWeights(to_half(pair.a), to_half(pair.b)) for n, pair in pairs.items()}
    )
    writer = GGUFWriter(path, names.architecture)
    try:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        if title:
            writer.add_name(title)
        # llama.cpp multiplies by alpha over the rank of each tensor, or by 1 where alpha is 0.
        writer.add_float32(_ALPHA, scaling * ranks.pop() if len(ranks) == 1 else 0.0)
        for projection, pair in halves.items():
            for block in range(pair.a.shape[0]):
                name = names.projection(projection, block)
                writer.add_tensor(f"{name}.lora_a", pair.a[block])
                writer.add_tensor(f"{name}.lora_b", names.to_gguf(projection, pair.b[block]))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def import_gguf_lora(
    path: Path, architecture: Architecture, names: GgufNames, *, layer: str, base: str
) -> Adapter:
    """Read a GGUF LoRA as an adapter of ``layer`` on the base with the digest ``base``.

    Args:
        path: The file.
        architecture: The architecture of the base.
        names: The names of the base's tensors in GGUF.
        layer: The layer to import into.
        base: The digest of the base.

    Raises:
        AdapterError: The file is damaged, quantised, for another architecture, or adapts a module
            that the base's card does not name.
        InvalidId: ``layer`` is not the name of a layer.
    """
    check_layer_name(layer)
    source = str(path)
    data = read_file(path)
    digest = canonical_digest(["gguf", hashlib.sha256(data).hexdigest()])
    read = read_gguf(data, source=source)
    alpha = _alpha(read.metadata, names, source)
    found = _stack_tensors(read.arrays, architecture, names, source)
    for name, pair in found.items():
        # Check before ranks are padded, which can make a small file large.
        manifest = Manifest(base, layer, pair.a.shape[1], 1.0, (name,), {}, digest)
        check_adapter(
            Adapter(manifest, {name: pair}), source=source, architecture=architecture, numbers=False
        )
    pairs, scaling = _pad_ranks(found, alpha)
    rank = next(iter(pairs.values())).a.shape[1]
    recipe = {"imported": "gguf", "rank": rank}
    manifest = Manifest(base, layer, rank, scaling, tuple(sorted(pairs)), recipe, digest)
    adapter = Adapter(manifest, pairs)
    check_adapter(adapter, source=source, architecture=architecture, base=base)
    return adapter


def _alpha(metadata: Mapping[str, object], names: GgufNames, source: str) -> float:
    """Check the file's metadata and return alpha, where 0 means a scaling of 1."""
    if (metadata.get("general.type"), metadata.get("adapter.type")) != ("adapter", "lora"):
        raise format_error(
            source, "is not a LoRA.", hint="Give a GGUF file that holds a LoRA adapter."
        )
    if _ACTIVATED in metadata:
        raise format_error(
            source,
            "is an activated LoRA (aLoRA), which cannot be imported.",
            hint="Train it again as plain LoRA.",
        )
    architecture = metadata.get("general.architecture")
    if architecture != names.architecture:
        raise format_error(
            source,
            f"is for the architecture {safe_repr(architecture)}, the base is {names.architecture}.",
            hint="An adapter works only on the base it was built for.",
        )
    alpha = metadata.get(_ALPHA, 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha) or alpha < 0:
        raise format_error(source, f"has an alpha of {safe_repr(alpha)}.")
    return alpha


def _stack_tensors(
    tensors: Mapping[str, npt.NDArray[Any]],
    architecture: Architecture,
    names: GgufNames,
    source: str,
) -> dict[str, LoRAWeights]:
    """Stack the file's tensors over the blocks. Every tensor must belong to a projection."""
    modules = {
        names.projection(projection, block): (projection, block)
        for projection in architecture.projections
        for block in range(architecture.blocks)
    }
    halves: dict[str, dict[str, list[npt.NDArray[Any] | None]]] = {}
    for name, tensor in tensors.items():
        found = _LORA.fullmatch(name)
        if found is None or found[1] not in modules:
            raise format_error(
                source,
                f"adapts {safe_repr(name)}, which the base's card does not name.",
            )
        projection, block = modules[found[1]]
        rows = tensor if found[2] == "lora_a" else _permute_rows(tensor, projection, names, source)
        empty: list[npt.NDArray[Any] | None] = [None] * architecture.blocks
        halves.setdefault(projection, {}).setdefault(found[2], empty)[block] = rows
    pairs: dict[str, LoRAWeights] = {}
    for projection, both in halves.items():
        a, b = (
            _stack_blocks(both.get(half, ()), projection, source) for half in ("lora_a", "lora_b")
        )
        pairs[projection] = LoRAWeights(a, b)
    if not pairs:
        raise format_error(source, "holds no tensors.")
    return pairs


def _pad_ranks(
    pairs: Mapping[str, LoRAWeights], alpha: float
) -> tuple[Mapping[str, LoRAWeights], float]:
    """Pad all ranks to the largest with zeros; return the weights and their scaling."""
    ranks = {pair.a.shape[1] for pair in pairs.values()}
    if len(ranks) == 1:
        return pairs, alpha / ranks.pop() if alpha else 1.0
    filled = {}
    for name, pair in pairs.items():
        rank = pair.a.shape[1]
        missing = max(ranks) - rank
        scale = np.float32(alpha / rank if alpha else 1.0)
        filled[name] = LoRAWeights(
            np.pad(pair.a, ((0, 0), (0, missing), (0, 0))),
            np.pad(pair.b.astype(np.float32) * scale, ((0, 0), (0, 0), (0, missing))),
        )
    return filled, 1.0


def _permute_rows(
    tensor: npt.NDArray[Any], projection: str, names: GgufNames, source: str
) -> npt.NDArray[Any]:
    try:
        return names.from_gguf(projection, tensor)
    except ValueError as error:
        raise format_error(
            source, f"{projection} has {tensor.shape[0]} outputs, which its heads do not share."
        ) from error


def _stack_blocks(blocks: Any, projection: str, source: str) -> Matrix:
    if not blocks or any(block is None for block in blocks):
        raise format_error(source, f"{projection} is not there in every block.")
    if len({(block.shape, block.dtype) for block in blocks}) != 1 or blocks[0].ndim != 2:
        raise format_error(source, f"{projection} is no matrix of the same size in every block.")
    return np.stack(list(blocks))
