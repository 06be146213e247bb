"""Read the header of a GGUF file: its metadata, and where its tensors lie.

Invariants: for any bytes, a reader returns plain values or raises. The end of the bytes bounds every
loop, and limits bound what is kept in memory. ``gguf.GGUFReader`` is not used: it trusts the array
lengths of a file and makes an object of each number.

The format is GGUF version 3; version 2 has the same layout.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import stat
import struct
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from personalpeft.errors import WeightsError

Value: TypeAlias = str | int | float | bool | tuple[Any, ...]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DIMENSIONS_LIMIT = 4
_TEXT, _ARRAY = 8, 9
# The struct format of each kind of number.
_NUMBERS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
# Models have 50 keys, 1,000 tensors, 300,000 tokens and 600,000 merges at most.
_ITEMS_LIMIT = 1 << 16
_ARRAY_LIMIT = 1 << 21
_HEADER_LIMIT = 1 << 28
_OTHER_PATH = "Give the path of a GGUF file."


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's shape, outermost dimension first, its GGML type and its place in the data."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says of itself."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    size: int  # of the file, in bytes
    begin: int  # of the tensors' data
    alignment: int  # of each tensor, in bytes
    digest: str  # SHA-256 of the header's bytes


class GgufFault(Exception):
    """What is wrong with a file, without its name."""

    def __init__(self, what: str, hint: str = "Get a fresh copy of the file.") -> None:
        super().__init__(what)
        self.hint = hint


def read_header(path: Path) -> GgufHeader:
    """Read a file's header, and check that all its tensors lie in the file.

    Raises:
        WeightsError: The file is damaged, hostile, cut off or no GGUF file.
    """
    try:
        # Checked before opening: opening a named pipe without a writer blocks.
        if not stat.S_ISREG(path.stat().st_mode):
            raise GgufFault("is not a plain file.", _OTHER_PATH)
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with closing(mapped), memoryview(mapped) as whole:
                return parse_header(whole)
    except GgufFault as fault:
        raise WeightsError(f"{path}: {fault}", hint=fault.hint) from fault
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(
            f"{path}: cannot be read: {reason}.", hint="Check the path and the file's permissions."
        ) from error


def parse_header(data: bytes | memoryview) -> GgufHeader:
    """Read the header in the bytes of a whole file, and check that all its tensors lie in them.

    Raises ``GgufFault``.
    """
    # Slices of a view must end before its map does.
    with memoryview(data)[:_HEADER_LIMIT] as view:
        cursor = _Cursor(view)
        metadata, tensors = _read(cursor)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 2**16:
            raise GgufFault(f"has an alignment of {ascii(alignment)[:60]}.")
        begin = -(-cursor.at // alignment) * alignment
        _check_tensors(begin, len(data), alignment, tensors)
        digest = hashlib.sha256(data[: cursor.at]).hexdigest()
        return GgufHeader(metadata, tensors, len(data), begin, alignment, digest)


def _read(cursor: _Cursor) -> tuple[dict[str, Value], dict[str, TensorInfo]]:
    if cursor.take(len(_MAGIC)) != _MAGIC:
        raise GgufFault("is not a GGUF file.", _OTHER_PATH)
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise GgufFault(f"is GGUF version {version}; 2 and 3 are read.")
    count, items = cursor.number("Q"), cursor.number("Q")
    if max(count, items) > _ITEMS_LIMIT:
        raise GgufFault(
            f"names {max(count, items)} keys or tensors; at most {_ITEMS_LIMIT} are read."
        )
    metadata: dict[str, Value] = {}
    for _ in range(items):
        key = cursor.text()
        if key in metadata:
            raise GgufFault(f"the key {key[:60]!a} occurs twice.")
        metadata[key] = cursor.value()
    tensors: dict[str, TensorInfo] = {}
    for _ in range(count):
        name = cursor.text()
        if name in tensors:
            raise GgufFault(f"holds two tensors called {name[:60]!a}.")
        tensors[name] = cursor.tensor_info(name)
    if not tensors:
        raise GgufFault("holds no tensors.", "Give the file with the model's weights.")
    return metadata, tensors


def _check_tensors(
    begin: int, size: int, alignment: int, tensors: Mapping[str, TensorInfo]
) -> None:
    """Raise unless each tensor is of a known type and lies in the data."""
    from gguf import GGML_QUANT_SIZES

    sizes = {int(kind): block for kind, block in GGML_QUANT_SIZES.items()}
    end = begin
    for name, info in tensors.items():
        if info.kind not in sizes:
            raise GgufFault(
                f"tensor {name[:60]!a} has the unknown type {info.kind}.",
                "Get the model in another quantisation, such as Q4_K_M or Q8_0.",
            )
        block, block_bytes = sizes[info.kind]
        if info.shape[-1] % block or info.offset % alignment:
            raise GgufFault(f"tensor {name[:60]!a} is not a whole number of blocks.")
        end = max(end, begin + info.offset + math.prod(info.shape) // block * block_bytes)
    if end > size:
        raise GgufFault(
            f"is cut off: it has {size:,} bytes and names tensors up to byte {end:,}.",
            "Download it again.",
        )


class _Cursor:
    """A position in bytes that never passes their end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        """Return so many bytes."""
        if count > len(self._data) - self.at:
            raise GgufFault(f"ends after {len(self._data)} bytes, in the middle of its header.")
        self.at += count
        return bytes(self._data[self.at - count : self.at])

    def number(self, kind: str) -> Any:
        """Return a number in a format of ``struct``."""
        (value,) = struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))
        return value

    def text(self) -> str:
        """Return a text."""
        try:
            return self.take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise GgufFault("holds a text that is not UTF-8.") from error

    def value(self) -> Value:
        """Return a value; an array is a tuple."""
        kind = self.number("I")
        if kind in _NUMBERS:
            value: int | float | bool = self.number(_NUMBERS[kind])
            return value
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise GgufFault(f"holds a value of the unknown kind {kind}.")
        inner, length = self.number("I"), self.number("Q")
        if length > _ARRAY_LIMIT:
            raise GgufFault(f"holds an array of {length} values; at most {_ARRAY_LIMIT} are read.")
        if inner in _NUMBERS:
            width = struct.calcsize(f"<{_NUMBERS[inner]}")
            return struct.unpack(f"<{length}{_NUMBERS[inner]}", self.take(length * width))
        if inner == _TEXT:
            return tuple(self.text() for _ in range(length))
        raise GgufFault(f"holds an array of the unknown kind {inner}.")

    def tensor_info(self, name: str) -> TensorInfo:
        """Return what the header says of a tensor after its name."""
        dimensions = self.number("I")
        if not 1 <= dimensions <= _DIMENSIONS_LIMIT:
            raise GgufFault(f"tensor {name[:60]!a} has {dimensions} dimensions.")
        # The file has the innermost dimension first.
        shape = tuple(reversed([int(self.number("Q")) for _ in range(dimensions)]))
        kind, offset = self.number("I"), self.number("Q")
        if 0 in shape:
            raise GgufFault(f"tensor {name[:60]!a} is empty.")
        return TensorInfo(shape, kind, offset)
