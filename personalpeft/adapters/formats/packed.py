"""The packed format: an adapter as one safetensors file with two tensors per projection.

Tensors are ``<projection>.A`` and ``<projection>.B``, each stacked over the blocks of the model.
Loading time depends on the number of tensors. ``__metadata__`` has one key with canonical JSON of
``{"format": 1, "manifest": {...}}``.

Invariants: the same adapter gives the same bytes, and ``unpack`` reads whatever ``pack`` writes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from personalpeft.adapters.formats.safetensors_reader import HEADER_LIMIT, read_tensors
from personalpeft.adapters.manifest import (
    FORMAT,
    canonical_manifest,
    check_format,
    manifest_from_json,
)
from personalpeft.adapters.safe_io import Fault, naming, parse_object, safe_repr
from personalpeft.adapters.types import Adapter, LoRAWeights, Manifest, Matrix
from personalpeft.adapters.validate import check_adapter
from personalpeft.base_models.files import safetensors_header
from personalpeft.types import Architecture, canonical_json

METADATA_KEY = "personalpeft"
_DTYPES = {2: "F16", 4: "F32"}
_LITTLE = {2: "<f2", 4: "<f4"}


def pack(adapter: Adapter) -> bytes:
    """Return the bytes of an adapter's file."""
    with naming(f"adapter for {adapter.manifest.layer}"):
        about = {"format": FORMAT, "manifest": canonical_manifest(adapter.manifest)}
        check_adapter(adapter)
        halves = {
            f"{name}.{half}": np.ascontiguousarray(matrix).astype(_LITTLE[matrix.dtype.itemsize])
            for name, pair in adapter.weights.items()
            for half, matrix in (("A", pair.a), ("B", pair.b))
        }
        entries = {
            name: (_DTYPES[body.itemsize], body.shape, body.nbytes) for name, body in halves.items()
        }
        header = safetensors_header(entries, {METADATA_KEY: canonical_json(about)})
        if len(header) - 8 > HEADER_LIMIT:
            raise Fault(
                f"its manifest is too long ({len(header)} bytes with the header).",
                hint="Shorten the recipe.",
            )
        return b"".join([header, *(body.data for _, body in sorted(halves.items()))])


def unpack(
    data: bytes,
    *,
    source: str,
    architecture: Architecture | None = None,
    base: str | None = None,
    known: bool = False,
) -> Adapter:
    """Read an adapter from the bytes of a packed file; its arrays are read-only views of them.

    Args:
        data: The bytes of the file.
        source: What error messages call it.
        architecture: The shapes that it must fit, if any.
        base: Digest of the base that it must be for, if any.
        known: Whether a digest has shown that ``pack`` wrote the bytes. Then the numbers are not
            checked. That halves the time.

    Returns:
        The adapter.

    Raises:
        AdapterError: It is damaged, hostile, or does not fit.
    """
    with naming(source):
        metadata, arrays = read_tensors(data)
        adapter = Adapter(_manifest(metadata), _read_weights(arrays))
        check_adapter(adapter, architecture=architecture, base=base, numbers=not known)
    return adapter


def _manifest(metadata: Mapping[str, str]) -> Manifest:
    if metadata.keys() != {METADATA_KEY}:
        raise Fault(
            f"has no manifest, or more than one (found {safe_repr(sorted(metadata))}).",
            hint="Give a file that personalpeft packed. A PEFT folder can be imported.",
        )
    about = parse_object(metadata[METADATA_KEY], what="the manifest")
    # Check the version first: a newer format may have other keys, and is not damaged.
    check_format(about.get("format"), what="the file")
    if about.keys() != {"format", "manifest"}:
        raise Fault(f"the manifest's envelope has the keys {safe_repr(sorted(about))}.")
    return manifest_from_json(about["manifest"])


def _read_weights(arrays: Mapping[str, Matrix]) -> dict[str, LoRAWeights]:
    for name in arrays:
        projection, _, half = name.rpartition(".")
        if half not in ("A", "B") or not projection:
            raise Fault(f"tensor {safe_repr(name)} is not called <projection>.A or <projection>.B.")
        other = f"{projection}.{'B' if half == 'A' else 'A'}"
        if other not in arrays:
            raise Fault(f"tensor {safe_repr(name)} is there without {safe_repr(other)}.")
    projections = sorted({name.rpartition(".")[0] for name in arrays})
    return {name: LoRAWeights(arrays[f"{name}.A"], arrays[f"{name}.B"]) for name in projections}
