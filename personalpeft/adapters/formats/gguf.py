"""GGUF LoRAs: what llama.cpp and the programs around it load beside a base's GGUF file.

Invariants: what llama.cpp makes of a written file is what this package makes of the stack, whatever the order in which
the architecture keeps its rows (``base_models/gguf/tensor_names.py``); a read takes the whole of a file or nothing, in memory for a few
times (three to five) what the file has in bytes, or, where ranks differ, what it would have with the largest for all.
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
    """Writes a stack as one LoRA, in float16 where its numbers allow and the base is not in float32 itself.

    Raises ``OSError``; ``AdapterError`` where a weight makes its numbers too large.
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
    """The adapter in a GGUF LoRA, as a revision of ``layer`` on the base with the digest ``base``.

    Raises ``AdapterError`` naming the fault for a file that is damaged, of another kind or architecture, quantised, or that adapts
    what the base's card does not; ``InvalidId`` for a layer of no such name.
    """
    check_layer_name(layer)
    source = str(path)
    data = read_file(path)
    digest = canonical_digest(["gguf", hashlib.sha256(data).hexdigest()])
    read = read_gguf(data, source=source)
    alpha = _alpha(read.about, names, source)
    found = _paired(read.arrays, architecture, names, source)
    for name, pair in found.items():
        # Before ranks are filled up, which could make much of little.
        manifest = Manifest(base, layer, pair.a.shape[1], 1.0, (name,), {}, digest)
        check_adapter(
            Adapter(manifest, {name: pair}), source=source, architecture=architecture, numbers=False
        )
    pairs, scaling = _of_one_rank(found, alpha)
    rank = next(iter(pairs.values())).a.shape[1]
    recipe = {"imported": "gguf", "rank": rank}
    manifest = Manifest(base, layer, rank, scaling, tuple(sorted(pairs)), recipe, digest)
    adapter = Adapter(manifest, pairs)
    check_adapter(adapter, source=source, architecture=architecture, base=base)
    return adapter


def _alpha(about: Mapping[str, object], names: GgufNames, source: str) -> float:
    """The file's alpha, after all that it says of itself was looked at; 0 means that the scaling is 1."""
    if (about.get("general.type"), about.get("adapter.type")) != ("adapter", "lora"):
        raise format_error(
            source, "is no LoRA.", hint="Give a GGUF file that holds a LoRA adapter."
        )
    if _ACTIVATED in about:
        raise format_error(
            source,
            "answers only after certain words (an activated LoRA).",
            hint="Such adapters are not taken in.",
        )
    architecture = about.get("general.architecture")
    if architecture != names.architecture:
        raise format_error(
            source,
            f"is for the architecture {safe_repr(architecture)}, the base is {names.architecture}.",
            hint="An adapter works only on the base it was built for.",
        )
    alpha = about.get(_ALPHA, 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha) or alpha < 0:
        raise format_error(source, f"has an alpha of {safe_repr(alpha)}.")
    return alpha


def _paired(
    tensors: Mapping[str, npt.NDArray[Any]],
    architecture: Architecture,
    names: GgufNames,
    source: str,
) -> dict[str, LoRAWeights]:
    """Our pairs from the file's tensors: every tensor is used, and every block has what any block has."""
    places = {
        names.projection(projection, block): (projection, block)
        for projection in architecture.projections
        for block in range(architecture.blocks)
    }
    halves: dict[str, dict[str, list[npt.NDArray[Any] | None]]] = {}
    for name, tensor in tensors.items():
        found = _LORA.fullmatch(name)
        if found is None or found[1] not in places:
            raise format_error(
                source,
                f"adapts {safe_repr(name)}, which is no projection that the base's card names.",
            )
        projection, block = places[found[1]]
        rows = tensor if found[2] == "lora_a" else _in_our_order(tensor, projection, names, source)
        empty: list[npt.NDArray[Any] | None] = [None] * architecture.blocks
        halves.setdefault(projection, {}).setdefault(found[2], empty)[block] = rows
    pairs: dict[str, LoRAWeights] = {}
    for projection, both in halves.items():
        a, b = (_stacked(both.get(half, ()), projection, source) for half in ("lora_a", "lora_b"))
        pairs[projection] = LoRAWeights(a, b)
    if not pairs:
        raise format_error(source, "holds no tensors.")
    return pairs


def _of_one_rank(
    pairs: Mapping[str, LoRAWeights], alpha: float
) -> tuple[Mapping[str, LoRAWeights], float]:
    """The pairs with one rank for all, and their scaling. A whole stack has more ranks where more layers adapt: smaller
    ones are filled with zeros, which add nothing.
    """
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


def _in_our_order(
    tensor: npt.NDArray[Any], projection: str, names: GgufNames, source: str
) -> npt.NDArray[Any]:
    try:
        return names.from_gguf(projection, tensor)
    except ValueError as error:
        raise format_error(
            source, f"{projection} has {tensor.shape[0]} outputs, which its heads do not share."
        ) from error


def _stacked(blocks: Any, projection: str, source: str) -> Matrix:
    if not blocks or any(block is None for block in blocks):
        raise format_error(source, f"{projection} is not there in every block.")
    if len({(block.shape, block.dtype) for block in blocks}) != 1 or blocks[0].ndim != 2:
        raise format_error(source, f"{projection} is no matrix of the same size in every block.")
    return np.stack(list(blocks))
