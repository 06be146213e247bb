"""Read a safetensors file from a source that is not trusted.

The library checks the header's frame, the metadata, and that offsets fit shapes, dtypes and the
file. It also takes a key twice, unknown keys, empty tensors and any number of dimensions, so those
are checked here. Names are checked where they become projections.

Invariants: memory is bounded by the size of the file, and arrays are read-only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from personalpeft.adapters.safe_io import Fault, parse_object, safe_repr
from personalpeft.adapters.types import Matrix

HEADER_LIMIT = 2**20
DIMENSIONS_LIMIT = 8

_LENGTH_BYTES = 8
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def read_tensors(data: bytes) -> tuple[Mapping[str, str], Mapping[str, Matrix]]:
    """Return ``__metadata__`` and the tensors in a file's bytes; BF16 is converted to float32.

    Raises ``Fault``.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > HEADER_LIMIT:
        raise Fault(f"the header must have at most {HEADER_LIMIT} bytes, got {length}.")
    try:
        tensors = deserialize(data)  # type: ignore[no-untyped-call]  # the library has no types
    except SafetensorError as error:
        raise Fault(f"is not a valid safetensors file ({error}).") from error
    text = data[_LENGTH_BYTES : _LENGTH_BYTES + length]
    header = parse_object(text, what="the header")
    metadata = header.pop("__metadata__", None) or {}
    if not header:
        raise Fault("holds no tensors.")
    for name, info in header.items():
        _check_info(name, info)
    arrays = {
        name: to_array(tensor["data"], tensor["dtype"], tensor["shape"]) for name, tensor in tensors
    }
    return metadata, arrays


def _check_info(name: str, info: Mapping[str, Any]) -> None:
    dtype, shape = info["dtype"], info["shape"]
    if dtype not in _DTYPES:
        raise Fault(
            f"tensor {safe_repr(name)} has the dtype {safe_repr(dtype)}.",
            hint="Adapters are read as F32, F16 or BF16; convert the file to one of them.",
        )
    if info.keys() != {"dtype", "shape", "data_offsets"} or 0 in shape:
        raise Fault(f"tensor {safe_repr(name)} is {safe_repr(info)}.")
    if not 1 <= len(shape) <= DIMENSIONS_LIMIT:
        raise Fault(f"tensor {safe_repr(name)} has {len(shape)} dimensions.")


def to_array(data: bytes, dtype: str, shape: Sequence[int]) -> Matrix:
    """Return numbers as a read-only array.

    Args:
        data: The bytes, little-endian.
        dtype: F32, F16, or BF16, which becomes float32.
        shape: The shape.
    """
    flat = np.frombuffer(data, _DTYPES[dtype])
    if dtype == "BF16":
        # A bfloat16 is the upper half of a float32.
        flat = (flat.astype(np.uint32) << np.uint32(16)).view(np.float32)
    array: Matrix = flat.reshape(shape)
    array.flags.writeable = False
    return array
