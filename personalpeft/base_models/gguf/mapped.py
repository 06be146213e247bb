"""Map the tensors of a GGUF file into memory as they are stored.

Invariants: a file is only read. Each tensor lies within the file, and its rows hold whole blocks.
Nothing is copied until a tensor is unpacked.

``gguf.GGUFReader`` is not used here: it makes an object of each token of the vocabulary.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from personalpeft.base_models.files import FRESH_COPY
from personalpeft.errors import WeightsError

Numbers: TypeAlias = npt.NDArray[np.float32]

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_TEXT, _ARRAY = 8, 9
# Bytes of each kind of number in the metadata.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_ALIGNMENT_KEY, _ALIGNMENT = "general.alignment", 32
_MOST_TENSORS, _MOST_DIMENSIONS, _MOST_NESTING = 1 << 20, 4, 4


class BlockFormat(IntEnum):
    """How a tensor's numbers are stored, by GGML's number of the type."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30

    @property
    def elements(self) -> int:
        """Numbers in a block."""
        return _LAYOUTS[self][0]

    @property
    def bytes(self) -> int:
        """Bytes of a block."""
        return _LAYOUTS[self][1]


_LAYOUTS = {
    BlockFormat.F32: (1, 4),
    BlockFormat.F16: (1, 2),
    BlockFormat.BF16: (1, 2),
    BlockFormat.Q4_0: (32, 18),
    BlockFormat.Q4_1: (32, 20),
    BlockFormat.Q5_0: (32, 22),
    BlockFormat.Q5_1: (32, 24),
    BlockFormat.Q8_0: (32, 34),
    BlockFormat.Q4_K: (256, 144),
    BlockFormat.Q5_K: (256, 176),
    BlockFormat.Q6_K: (256, 210),
}


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor of a file: ``rows`` of ``columns`` numbers in blocks.

    Attributes:
        name: Its name in the file.
        format: How numbers are stored.
        shape: As torch has it, the columns last.
        data: uint8 ``[rows, bytes of a row]``, mapped from the file.
    """

    name: str
    format: BlockFormat
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8] = field(repr=False)

    @property
    def columns(self) -> int:
        return self.shape[-1]

    def numbers(self, rows: npt.NDArray[np.intp] | slice, columns: slice) -> Numbers:
        """Return numbers as float32, the reference for faster kernels.

        Args:
            rows: The rows, or their indices.
            columns: The columns, from the begin of a block to the end of one.
        """
        from gguf import GGMLQuantizationType, quants

        of, size = self.format.elements, self.format.bytes
        begin, end, _ = columns.indices(self.columns)
        data = np.ascontiguousarray(self.data[rows, begin // of * size : end // of * size])
        if self.format is BlockFormat.F32:
            return data.view(np.float32)
        return quants.dequantize(data, GGMLQuantizationType(self.format)).astype(np.float32)


def map_gguf(path: Path) -> Mapping[str, MappedTensor]:
    """Return the tensors of a file by name.

    Raises:
        WeightsError: The file is damaged, or a tensor is stored in an unknown way.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}.", hint=FRESH_COPY) from error
    try:
        return _Header(data, path).tensors()
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise _damaged(path, "its header ends early") from error


def _damaged(path: Path, why: str) -> WeightsError:
    return WeightsError(f"{path} is damaged: {why}.", hint=FRESH_COPY)


class _Header:
    """Reads a header from its begin to its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._at = data, path, 0

    def tensors(self) -> dict[str, MappedTensor]:
        if self._data[:4] != _MAGIC:
            raise _damaged(self._path, "it is not a GGUF file")
        self._at = 4
        (version,) = self._numbers("I")
        if version not in _VERSIONS:
            raise _damaged(self._path, f"version {version} of the format is unknown")
        num_tensors, num_fields = self._numbers("QQ")
        if num_tensors > _MOST_TENSORS:
            raise _damaged(self._path, f"it claims {num_tensors} tensors")
        alignment = _ALIGNMENT
        for _ in range(num_fields):
            key = self._text()
            (kind,) = self._numbers("I")
            if key == _ALIGNMENT_KEY and kind == 4:
                (alignment,) = self._numbers("I")
            else:
                self._skip(kind)
        infos = [self._info() for _ in range(num_tensors)]
        if alignment < 1:
            raise _damaged(self._path, "its alignment is 0")
        begin = -(-self._at // alignment) * alignment
        return {info[0]: self._tensor(*info, begin) for info in infos}

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return the name, shape, format and offset of the next tensor."""
        name = self._text()
        (dimensions,) = self._numbers("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise _damaged(self._path, f"tensor {name!a} has {dimensions} dimensions")
        sizes = self._numbers(f"{dimensions}Q")
        kind, offset = self._numbers("IQ")
        return name, tuple(reversed(sizes)), kind, offset

    def _tensor(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, begin: int
    ) -> MappedTensor:
        try:
            block = BlockFormat(kind)
        except ValueError as error:
            known = ", ".join(each.name for each in BlockFormat)
            raise WeightsError(
                f"{self._path} stores {name!a} as type {kind}, which cannot be unpacked here.",
                hint=f"Get the model in one of {known}.",
            ) from error
        rows = 1
        for size in shape[:-1]:
            rows *= size
        blocks, rest = divmod(shape[-1], block.elements)
        row_bytes = blocks * block.bytes
        size = rows * row_bytes
        if rest or not size or begin + offset + size > len(self._data):
            raise _damaged(self._path, f"tensor {name!a} does not fit into the file")
        data = np.frombuffer(self._data, np.uint8, size, begin + offset).reshape(rows, row_bytes)
        return MappedTensor(name, block, shape, data)

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self._data, self._at)
        self._at += struct.calcsize(f"<{layout}")
        return values

    def _text(self) -> str:
        begin = self._begin_of_text()
        return self._data[begin : self._at].decode("utf-8")

    def _begin_of_text(self) -> int:
        """Move behind the next text and return where it begins."""
        (length,) = self._numbers("Q")
        begin = self._at
        self._move(length)
        return begin

    def _skip(self, kind: int, depth: int = 0) -> None:
        """Move behind a value of the metadata."""
        if kind == _TEXT:
            self._begin_of_text()
        elif kind == _ARRAY and depth < _MOST_NESTING:
            inner, count = self._numbers("IQ")
            if inner in _SIZES:
                self._move(count * _SIZES[inner])
                return
            for _ in range(count):
                self._skip(inner, depth + 1)
        elif kind in _SIZES:
            self._move(_SIZES[kind])
        else:
            raise _damaged(self._path, f"it has metadata of an unknown type {kind}")

    def _move(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise _damaged(self._path, "its header ends early")
