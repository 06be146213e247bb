"""The packed format: an adapter as one safetensors file with one tensor per projection and half.

Each tensor is stacked over the model's blocks, because the number of tensors and not of bytes is what makes loading slow. Names
are ``<projection>.A`` and ``<projection>.B``; ``__metadata__`` holds one key, whose text is canonical JSON of
``{"format": 1, "manifest": {...}}``. Invariants: the same adapter gives the same bytes; whatever ``pack`` writes, ``unpack`` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from personalpeft.adapters.formats.safetensors_reader import HEADER_LIMIT, Tensors, read_tensors
from personalpeft.adapters.manifest import (
    FORMAT,
    canonical_manifest,
    check_format,
    manifest_from_json,
)
from personalpeft.adapters.safe_io import fault, parse_json, read_file, shown
from personalpeft.adapters.types import Adapter, Manifest, Matrix, Pair
from personalpeft.adapters.validate import check_adapter, is_finite
from personalpeft.types import Architecture, canonical_json

METADATA_KEY = "personalpeft"
_ALIGNMENT = 8
_DTYPES = {2: "F16", 4: "F32"}
_LITTLE = {2: "<f2", 4: "<f4"}


def pack(adapter: Adapter) -> bytes:
    """The file's bytes. Raises ``AdapterError`` for an adapter that breaks an invariant, so that none is written that cannot be read."""
    source = f"adapter for {adapter.manifest.layer}"
    about = {"format": FORMAT, "manifest": canonical_manifest(adapter.manifest, source=source)}
    check_adapter(adapter, source=source)
    halves = {
        f"{name}.{half}": matrix
        for name, p in adapter.pairs.items()
        for half, matrix in (("A", p.a), ("B", p.b))
    }
    header: dict[str, Any] = {"__metadata__": {METADATA_KEY: canonical_json(about)}}
    position = 0
    for name in sorted(halves):
        end = position + halves[name].nbytes
        header[name] = {
            "dtype": _DTYPES[halves[name].dtype.itemsize],
            "shape": list(halves[name].shape),
            "data_offsets": [position, end],
        }
        position = end
    # Sorted keys put the tensors in the order of their offsets, which the reader insists on.
    text = canonical_json(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        raise fault(
            source,
            f"its manifest is too long ({len(text)} bytes with the header).",
            hint="Shorten the recipe.",
        )
    bodies = [
        np.ascontiguousarray(halves[name]).astype(_LITTLE[halves[name].dtype.itemsize])
        for name in sorted(halves)
    ]
    return b"".join([len(text).to_bytes(8, "little"), text, *(body.data for body in bodies)])


def unpack(
    data: bytes,
    *,
    source: str,
    architecture: Architecture | None = None,
    base: str | None = None,
    known: bool = False,
) -> Adapter:
    """The adapter in a packed file's bytes; its arrays are read-only views of ``data`` where that is float16 or float32.

    Raises ``AdapterError`` naming ``source`` (a path or a revision) and the fault, whatever the bytes are. With ``architecture`` and
    ``base`` (a digest) the adapter must also be one for them. ``known`` says that a digest has shown the bytes to be what ``pack``
    wrote, so that the numbers need not be looked at again: that would take as long as all the rest.
    """
    tensors = read_tensors(data, source=source)
    adapter = Adapter(_manifest(tensors, source), _pairs(tensors, source))
    check_adapter(adapter, source=source, architecture=architecture, base=base, numbers=not known)
    return adapter


def in_half(pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """The pairs as float16, which is how what was trained is kept: half the bytes to hash, read and hold, and finer than
    the bfloat16 that it is served in. A half with a number that float16 cannot hold stays as it is.
    """
    return {name: Pair(_narrowed(pair.a), _narrowed(pair.b)) for name, pair in pairs.items()}


def read_packed(
    path: Path, *, architecture: Architecture | None = None, base: str | None = None
) -> Adapter:
    """The adapter in a file, read at once; as ``unpack``, with the path as its source."""
    return unpack(read_file(path), source=str(path), architecture=architecture, base=base)


def _narrowed(matrix: Matrix) -> Matrix:
    with np.errstate(over="ignore", under="ignore"):
        narrow = matrix.astype(np.float16)
    return narrow if is_finite(narrow) else matrix


def _manifest(tensors: Tensors, source: str) -> Manifest:
    if tensors.metadata.keys() != {METADATA_KEY}:
        hint = (
            "Only files that personalpeft packed can be read here; a PEFT folder can be imported."
        )
        raise fault(
            source,
            f"has no manifest, or more than one (found {shown(sorted(tensors.metadata))}).",
            hint=hint,
        )
    about = parse_json(tensors.metadata[METADATA_KEY], source=source, what="the manifest")
    if not isinstance(about, dict):
        raise fault(source, "the manifest is not a JSON object.")
    # The version first: a newer format may well have other keys, and should be called newer and not damaged.
    check_format(about.get("format"), source=source, what="the file")
    if about.keys() != {"format", "manifest"}:
        raise fault(source, f"the manifest's envelope has the keys {shown(sorted(about))}.")
    return manifest_from_json(about["manifest"], source=source)


def _pairs(tensors: Tensors, source: str) -> dict[str, Pair]:
    for name in tensors.arrays:
        projection, _, half = name.rpartition(".")
        if half not in ("A", "B") or not projection:
            raise fault(source, f"tensor {name} is not called <projection>.A or <projection>.B.")
        other = f"{projection}.{'B' if half == 'A' else 'A'}"
        if other not in tensors.arrays:
            raise fault(source, f"tensor {name} is there, its other half {other} is missing.")
    projections = sorted({name.rpartition(".")[0] for name in tensors.arrays})
    return {
        name: Pair(tensors.arrays[f"{name}.A"], tensors.arrays[f"{name}.B"]) for name in projections
    }
