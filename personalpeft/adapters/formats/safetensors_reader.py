"""A safetensors file, read so that nothing in its header is believed before it was checked.

Why our own: the usual readers accept a key twice, an empty tensor sharing another's offset, and names such as ``../../x``.

Invariants: every byte after the header belongs to exactly one tensor, in the header's order; memory used is bounded by the
file's own size; arrays are read-only. F32 and F16 tensors are views of the file's bytes; BF16 is decoded to float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from personalpeft.adapters.safe_io import fault, parse_json, shown
from personalpeft.adapters.types import Matrix

HEADER_LIMIT = 2**20
NAME = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")
NAME_LIMIT = 256
DIMENSIONS_LIMIT = 8

_LENGTH_BYTES = 8
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_FLOATS = {"F32": "<f4", "F16": "<f2"}


@dataclass(frozen=True, slots=True)
class Tensors:
    """What a file holds: its ``__metadata__`` and its tensors by name, in the file's order."""

    metadata: Mapping[str, str]
    arrays: Mapping[str, Matrix]


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_tensors(data: bytes, *, source: str) -> Tensors:
    """The tensors of a whole file's bytes. Raises ``AdapterError`` naming ``source`` and the first fault."""
    if len(data) < _LENGTH_BYTES:
        raise fault(source, f"too short for a safetensors file ({len(data)} bytes).")
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > HEADER_LIMIT:
        raise fault(
            source, f"says that its header has {length} bytes; at most {HEADER_LIMIT} are read."
        )
    start = _LENGTH_BYTES + length
    if start > len(data):
        raise fault(
            source,
            f"says that its header has {length} bytes, but ends after {len(data) - _LENGTH_BYTES}.",
        )
    header = parse_json(data[_LENGTH_BYTES:start], source=source, what="the header")
    if not isinstance(header, dict):
        raise fault(source, "the header is not a JSON object.")
    metadata = _metadata(header.pop("__metadata__", {}), source)
    entries = [_entry(name, value, source) for name, value in header.items()]
    _check_layout(entries, len(data) - start, source)
    return Tensors(metadata, {entry.name: _array(data, start, entry) for entry in entries})


def _metadata(value: Any, source: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise fault(source, "__metadata__ is not an object of strings.")
    return value


def _entry(name: str, value: Any, source: str) -> _Entry:
    if len(name) > NAME_LIMIT or NAME.fullmatch(name) is None:
        raise fault(source, f"{shown(name)} cannot be the name of a tensor.")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        keys = sorted(value) if isinstance(value, dict) else value
        raise fault(
            source,
            f"tensor {name} needs dtype, shape and data_offsets and nothing else, not {shown(keys)}.",
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        hint = "Adapters are read as F32, F16 or BF16; convert the file to one of them."
        raise fault(source, f"tensor {name} has the dtype {shown(dtype)}.", hint=hint)
    if not _whole_numbers(shape) or not 1 <= len(shape) <= DIMENSIONS_LIMIT:
        raise fault(source, f"tensor {name} has the shape {shown(shape)}.")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise fault(source, f"tensor {name} has the data_offsets {shown(offsets)}.")
    # Python's integers have no width, so a shape whose product would wrap around elsewhere is only a large number here.
    size, (begin, end) = math.prod(shape) * _ITEM_BYTES[dtype], offsets
    if size == 0:
        raise fault(source, f"tensor {name} is empty (shape {shown(shape)}).")
    if size != end - begin:
        raise fault(
            source,
            f"tensor {name} of shape {shown(shape)} and dtype {dtype} does not fill its {end - begin} bytes.",
        )
    return _Entry(name, dtype, tuple(shape), begin, end)


def _whole_numbers(value: Any) -> bool:
    # type() and not isinstance(): true and false are integers to Python.
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _check_layout(entries: list[_Entry], available: int, source: str) -> None:
    """The tensors follow one another from the first byte to the last: no gap, no overlap, in the header's order."""
    if not entries:
        raise fault(source, "holds no tensors.")
    position = 0
    for entry in entries:
        if entry.end > available:
            raise fault(
                source,
                f"tensor {entry.name} ends at byte {entry.end}, but there are only {available}.",
            )
        if entry.begin != position:
            problem = (
                "overlaps or comes before another"
                if entry.begin < position
                else "leaves a gap before it"
            )
            raise fault(
                source,
                f"tensor {entry.name} {problem} (begins at {entry.begin}, expected {position}).",
            )
        position = entry.end
    if position != available:
        raise fault(source, f"{available - position} bytes after the last tensor belong to none.")


def _array(data: bytes, start: int, entry: _Entry) -> Matrix:
    count, offset = math.prod(entry.shape), start + entry.begin
    if entry.dtype in _FLOATS:
        flat: Matrix = np.frombuffer(data, _FLOATS[entry.dtype], count, offset)
        # A writer may put a half-width tensor first; matrix libraries want whole words at whole addresses.
        flat = flat if flat.flags.aligned else flat.copy()
    else:
        flat = (np.frombuffer(data, "<u2", count, offset).astype(np.uint32) << np.uint32(16)).view(
            np.float32
        )
    array = flat.reshape(entry.shape)
    array.flags.writeable = False
    return array
