"""Read a safetensors file from a source that is not trusted.

The library checks dtypes, shapes and offsets. It accepts duplicate keys, empty tensors that share
an offset, and names such as ``../../x``, so the header is checked here first.

Invariants: memory is bounded by the size of the file, and arrays are read-only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from personalpeft.adapters.safe_io import format_error, parse_object, safe_repr
from personalpeft.adapters.types import Matrix

HEADER_LIMIT = 2**20
NAME = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")
NAME_LIMIT = 256
DIMENSIONS_LIMIT = 8

_LENGTH_BYTES = 8
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class Tensors:
    """The ``__metadata__`` of a file and its tensors by name."""

    metadata: Mapping[str, str]
    arrays: Mapping[str, Matrix]


def read_tensors(data: bytes, *, source: str) -> Tensors:
    """Read the tensors in a file's bytes; BF16 is converted to float32."""
    metadata = _check_header(data, source)
    try:
        tensors = deserialize(data)  # type: ignore[no-untyped-call]  # the library has no types
    except SafetensorError as error:
        raise format_error(source, f"is not a valid safetensors file ({error}).") from error
    arrays = {
        name: to_array(tensor["data"], tensor["dtype"], tensor["shape"]) for name, tensor in tensors
    }
    return Tensors(metadata, arrays)


def _check_header(data: bytes, source: str) -> dict[str, str]:
    """Check what the library does not, and return the metadata."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > HEADER_LIMIT:
        raise format_error(
            source, f"the header must have at most {HEADER_LIMIT} bytes, got {length}."
        )
    text = data[_LENGTH_BYTES : _LENGTH_BYTES + length]
    if len(text) < length or len(data) < _LENGTH_BYTES:
        raise format_error(source, f"ends within its header, after {len(data)} bytes.")
    header = parse_object(text, source=source, what="the header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise format_error(source, "__metadata__ is not an object of strings.")
    if not header:
        raise format_error(source, "holds no tensors.")
    for name, tensor in header.items():
        _check_tensor(name, tensor, source)
    return metadata


def _check_tensor(name: str, tensor: Any, source: str) -> None:
    if len(name) > NAME_LIMIT or NAME.fullmatch(name) is None:
        raise format_error(source, f"{safe_repr(name)} cannot be the name of a tensor.")
    if not isinstance(tensor, dict) or tensor.keys() != {"dtype", "shape", "data_offsets"}:
        raise format_error(
            source,
            f"tensor {name} must have dtype, shape and data_offsets, got {safe_repr(tensor)}.",
        )
    dtype, shape = tensor["dtype"], tensor["shape"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise format_error(
            source,
            f"tensor {name} has the dtype {safe_repr(dtype)}.",
            hint="Adapters are read as F32, F16 or BF16; convert the file to one of them.",
        )
    # type() and not isinstance(): true is an int in Python.
    sizes = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
    if not sizes or not 1 <= len(shape) <= DIMENSIONS_LIMIT:
        raise format_error(source, f"tensor {name} has the shape {safe_repr(shape)}.")


def to_array(data: bytes, dtype: str, shape: Sequence[int]) -> Matrix:
    """Return little-endian F32, F16 or BF16 numbers as a read-only array; BF16 as float32."""
    flat = np.frombuffer(data, _DTYPES[dtype])
    if dtype == "BF16":
        # A bfloat16 is the upper half of a float32.
        flat = (flat.astype(np.uint32) << np.uint32(16)).view(np.float32)
    array: Matrix = flat.reshape(shape)
    array.flags.writeable = False
    return array
