"""GGUF LoRAs: what llama.cpp and the programs around it load beside a base's GGUF file.

Invariants: what llama.cpp makes of a written file is what this package makes of the stack, whatever the order in which
the architecture keeps its rows (``bases/gguf_names.py``); a read takes the whole of a file or nothing, and allocates no more
than the file has bytes.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from personalpeft.adapters.base import Adapter, Composed, Manifest, Matrix, Pair
from personalpeft.adapters.compose import merged
from personalpeft.adapters.strict import fault, read_file, shown
from personalpeft.adapters.validate import check_adapter, is_finite
from personalpeft.bases.gguf_names import GgufNames
from personalpeft.ids import check_layer_name
from personalpeft.types import Architecture, canonical_digest

if TYPE_CHECKING:
    from gguf import GGUFReader

_ALPHA = "adapter.lora.alpha"
_LORA = re.compile(r"(.+)\.(lora_[ab])")


def write_gguf_lora(stack: Composed, names: GgufNames, path: Path, *, title: str = "") -> None:
    """Writes a stack as one LoRA, in float16 where its numbers allow and the base is not in float32 itself.

    Raises ``OSError``; ``AdapterError`` where a weight makes its numbers too large.
    """
    from gguf import GGUFWriter

    pairs = merged(stack)
    ranks = {pair.a.shape[1] for pair in pairs.values()}
    writer = GGUFWriter(path, names.architecture)
    try:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        if title:
            writer.add_name(title)
        # llama.cpp multiplies by alpha over the rank of each tensor, or by 1 where alpha is 0; our scaling is in B.
        writer.add_float32(_ALPHA, float(ranks.pop()) if len(ranks) == 1 else 0.0)
        for projection, pair in pairs.items():
            a, b = (pair.a, pair.b) if names.full else (_narrow(pair.a), _narrow(pair.b))
            for block in range(a.shape[0]):
                name = names.projection(projection, block)
                writer.add_tensor(f"{name}.lora_a", a[block])
                writer.add_tensor(f"{name}.lora_b", names.to_gguf(projection, b[block]))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def import_gguf_lora(path: Path, architecture: Architecture, names: GgufNames, *, layer: str, base: str) -> Adapter:
    """The adapter in a GGUF LoRA, as a revision of ``layer`` on the base with the digest ``base``.

    Raises ``AdapterError`` naming the fault for a file that is damaged, of another kind or architecture, quantised, or that adapts
    what the base's card does not; ``InvalidId`` for a layer of no such name.
    """
    check_layer_name(layer)
    source = str(path)
    # Read and bounded here first: the library maps whatever it is given.
    digest = canonical_digest(["gguf", hashlib.sha256(read_file(path)).hexdigest()])
    tensors, alpha = _read(path, names, source)
    pairs = _paired(tensors, architecture, names, source)
    rank = next(iter(pairs.values())).a.shape[1]
    scaling = alpha / rank if alpha else 1.0
    recipe = {"imported": "gguf", "rank": rank}
    manifest = Manifest(base, layer, rank, scaling, tuple(sorted(pairs)), recipe, digest)
    adapter = Adapter(manifest, pairs)
    check_adapter(adapter, source=source, architecture=architecture, base=base)
    return adapter


def _narrow(matrix: Matrix) -> Matrix:
    """In half precision, which is what packed files are in, unless a weight took it beyond."""
    with np.errstate(over="ignore"):
        half = matrix.astype(np.float16)
    return half if is_finite(half) else np.asarray(matrix, np.float32)


def _read(path: Path, names: GgufNames, source: str) -> tuple[Mapping[str, npt.NDArray[Any]], float]:
    """The file's tensors and its alpha, after all that it says of itself was looked at."""
    from gguf import GGMLQuantizationType, GGUFReader

    try:
        reader = GGUFReader(path)
        said = {key: _said(reader, key) for key in ("general.type", "adapter.type", "general.architecture", _ALPHA)}
    # The library has no error of its own for a damaged file: whatever its parsing runs into comes out.
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, OSError, AttributeError, MemoryError) as error:
        raise fault(source, "is no GGUF file, or a damaged one.") from error
    if (said["general.type"], said["adapter.type"]) != ("adapter", "lora"):
        raise fault(source, "is no LoRA.", hint="Give a GGUF file that holds a LoRA adapter.")
    if said["general.architecture"] != names.architecture:
        raise fault(
            source,
            f"is for the architecture {shown(said['general.architecture'])}, the base is {names.architecture}.",
            hint="An adapter works only on the base it was built for.",
        )
    alpha = said[_ALPHA] if said[_ALPHA] is not None else 0.0
    if not isinstance(alpha, float) or not math.isfinite(alpha) or alpha < 0:
        raise fault(source, f"has an alpha of {shown(alpha)}.")
    plain = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
    tensors: dict[str, npt.NDArray[Any]] = {}
    for tensor in reader.tensors:
        if tensor.tensor_type not in plain:
            kind = tensor.tensor_type.name
            raise fault(source, f"{shown(tensor.name)} is {kind}.", hint="Convert the adapter to F16 or F32.")
        if tensor.name in tensors:
            raise fault(source, f"{shown(tensor.name)} occurs twice.")
        tensors[tensor.name] = np.array(tensor.data)
    return tensors, alpha


def _said(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _paired(
    tensors: Mapping[str, npt.NDArray[Any]], architecture: Architecture, names: GgufNames, source: str
) -> dict[str, Pair]:
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
            raise fault(source, f"adapts {shown(name)}, which is no projection that the base's card names.")
        projection, block = places[found[1]]
        rows = tensor if found[2] == "lora_a" else _in_our_order(tensor, projection, names, source)
        empty: list[npt.NDArray[Any] | None] = [None] * architecture.blocks
        halves.setdefault(projection, {}).setdefault(found[2], empty)[block] = rows
    pairs = {}
    for projection, both in halves.items():
        a, b = (_stacked(both.get(half, ()), projection, source) for half in ("lora_a", "lora_b"))
        pairs[projection] = Pair(a, b)
    if not pairs:
        raise fault(source, "holds no tensors.")
    return pairs


def _in_our_order(tensor: npt.NDArray[Any], projection: str, names: GgufNames, source: str) -> npt.NDArray[Any]:
    try:
        return names.from_gguf(projection, tensor)
    except ValueError as error:
        raise fault(source, f"{projection} has {tensor.shape[0]} outputs, which its heads do not share.") from error


def _stacked(blocks: Any, projection: str, source: str) -> Matrix:
    if not blocks or any(block is None for block in blocks):
        raise fault(source, f"{projection} is not there in every block.")
    if len({(block.shape, block.dtype) for block in blocks}) != 1:
        raise fault(source, f"{projection} is not the same size in every block.")
    return np.stack(list(blocks))
