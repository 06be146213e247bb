"""Read a GGUF file from a source that is not trusted.

The format is GGUF version 3; version 2 has the same layout. ``gguf.GGUFReader`` loops over an array
for as long as the file claims, so every length would have to be parsed before it could be used.

Invariants: time and memory are bounded by the size of the file. Tensors lie behind the header,
within the file, without overlap. Arrays are read-only; BF16 is converted to float32.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from personalpeft.adapters.safe_io import format_error, safe_repr
from personalpeft.adapters.types import Matrix

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ITEMS_LIMIT = 2**16
_DIMENSIONS_LIMIT = 4
_TEXT_LIMIT = 2**20
_TEXT, _ARRAY = 8, 9
_NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_FLOATS = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2)}


@dataclass(frozen=True, slots=True)
class GgufTensors:
    """The metadata of a file (None for an array) and its tensors, outermost dimension first."""

    metadata: Mapping[str, str | int | float | bool | None]
    arrays: Mapping[str, Matrix]


def read_gguf(data: bytes, *, source: str) -> GgufTensors:
    """Read the bytes of a GGUF file.

    Raises:
        AdapterError: The file is damaged, too large or quantised.
    """
    cursor = _Cursor(data, source)
    if cursor.take(4) != _MAGIC:
        raise format_error(
            source, "is not a GGUF file.", hint="Give a GGUF file that holds a LoRA adapter."
        )
    version = cursor.number("<I")
    if version not in _VERSIONS:
        raise format_error(
            source, f"is GGUF version {version}; {' and '.join(map(str, _VERSIONS))} are read."
        )
    tensors, items = cursor.number("<Q"), cursor.number("<Q")
    if max(tensors, items) > _ITEMS_LIMIT:
        raise format_error(
            source,
            f"must have at most {_ITEMS_LIMIT} tensors and keys, got {tensors} and {items}.",
        )
    metadata: dict[str, str | int | float | bool | None] = {}
    for _ in range(items):
        key = cursor.text()
        if key in metadata:
            raise format_error(source, f"the key {safe_repr(key)} occurs twice.")
        metadata[key] = cursor.value()
    entries = [cursor.entry() for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 2**16:
        raise format_error(source, f"has an alignment of {safe_repr(alignment)}.")
    begin = -(-cursor.at // alignment) * alignment
    _check_layout(entries, len(data) - begin, source)
    return GgufTensors(metadata, {entry.name: _array(data, begin, entry) for entry in entries})


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    size: int


class _Cursor:
    """A position in the bytes that never passes their end."""

    def __init__(self, data: bytes, source: str) -> None:
        self._data, self._source = data, source
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise format_error(
                self._source, f"ends after {len(self._data)} bytes, in the middle of its header."
            )
        self.at += count
        return self._data[self.at - count : self.at]

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack(kind, self.take(struct.calcsize(kind)))
        return value

    def text(self) -> str:
        length = self.number("<Q")
        if length > _TEXT_LIMIT:
            raise format_error(
                self._source, f"holds a text of {length} bytes; at most {_TEXT_LIMIT} are read."
            )
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise format_error(self._source, "holds a text that is not UTF-8.") from error

    def value(self) -> str | int | float | bool | None:
        """Read a value; skip an array and return None."""
        kind = self.number("<I")
        if kind in _NUMBERS:
            value: int | float | bool = self.number(_NUMBERS[kind])
            return value
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise format_error(self._source, f"holds a value of the unknown kind {kind}.")
        inner, length = self.number("<I"), self.number("<Q")
        if inner in _NUMBERS:
            self.take(length * struct.calcsize(_NUMBERS[inner]))
        elif inner == _TEXT:
            # Each text takes at least eight bytes, so the end of the file bounds the loop.
            for _ in range(length):
                self.text()
        else:
            raise format_error(self._source, f"holds an array of the unknown kind {inner}.")
        return None

    def entry(self) -> _Entry:
        name = self.text()
        dimensions = self.number("<I")
        if not 1 <= dimensions <= _DIMENSIONS_LIMIT:
            raise format_error(
                self._source, f"tensor {safe_repr(name)} has {dimensions} dimensions."
            )
        # The file has the innermost dimension first.
        shape = tuple(reversed([self.number("<Q") for _ in range(dimensions)]))
        kind, begin = self.number("<I"), self.number("<Q")
        if kind not in _FLOATS:
            hint = "Adapters are read as F32, F16 or BF16; convert the file to one of them."
            raise format_error(
                self._source,
                f"tensor {safe_repr(name)} is of the kind {kind}, which may be quantised.",
                hint=hint,
            )
        title, width = _FLOATS[kind]
        size = math.prod(shape) * width
        if size == 0:
            raise format_error(self._source, f"tensor {safe_repr(name)} is empty.")
        return _Entry(name, title, shape, begin, size)


def _check_layout(entries: list[_Entry], available: int, source: str) -> None:
    if len({entry.name for entry in entries}) < len(entries):
        raise format_error(source, "holds two tensors of one name.")
    end = 0
    for entry in sorted(entries, key=lambda each: each.begin):
        if entry.begin < end:
            raise format_error(source, f"tensor {safe_repr(entry.name)} overlaps another.")
        end = entry.begin + entry.size
        if end > available:
            raise format_error(
                source, f"tensor {safe_repr(entry.name)} ends beyond the end of the file."
            )


def _array(data: bytes, start: int, entry: _Entry) -> Matrix:
    count, offset = math.prod(entry.shape), start + entry.begin
    if entry.kind == "BF16":
        flat: Matrix = (
            np.frombuffer(data, "<u2", count, offset).astype(np.uint32) << np.uint32(16)
        ).view(np.float32)
    else:
        flat = np.frombuffer(data, "<f4" if entry.kind == "F32" else "<f2", count, offset).copy()
    array = flat.reshape(entry.shape)
    array.flags.writeable = False
    return array
