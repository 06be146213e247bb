"""Map the tensors of a GGUF file into memory as they are stored.

Invariants: a file is only read. Each tensor lies within the file, and its rows hold whole blocks.
Nothing is copied until a tensor is unpacked.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from personalpeft.base_models.gguf.header import read_header

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

Numbers: TypeAlias = npt.NDArray[np.float32]


class PlainFormat(IntEnum):
    """GGML's numbers of the formats that are not quantised. A chat does not import gguf for them."""

    F32 = 0
    F16 = 1
    BF16 = 30


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
    format: GGMLQuantizationType | PlainFormat
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8] = field(repr=False)

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def block_elements(self) -> int:
        """Numbers in a block."""
        if isinstance(self.format, PlainFormat):
            return 1
        from gguf import GGML_QUANT_SIZES

        return GGML_QUANT_SIZES[self.format][0]

    def numbers(self, rows: npt.NDArray[np.intp] | slice, columns: slice) -> Numbers:
        """Return numbers as float32, in the file's order of rows.

        Args:
            rows: The rows, or their indices.
            columns: The columns, from the begin of a block to the end of one.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        kind = GGMLQuantizationType(self.format)
        of, size = GGML_QUANT_SIZES[kind]
        begin, end, _ = columns.indices(self.columns)
        data = np.ascontiguousarray(self.data[rows, begin // of * size : end // of * size])
        return dequantize(data, kind).astype(np.float32, copy=False)


def map_gguf(path: Path) -> Mapping[str, MappedTensor]:
    """Return the tensors of a file by name. Raises ``WeightsError`` for a damaged file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    header = read_header(path)
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors = {}
    for name, info in header.tensors.items():
        kind = GGMLQuantizationType(info.kind)
        elements, size = GGML_QUANT_SIZES[kind]
        row_bytes, rows = info.shape[-1] // elements * size, math.prod(info.shape[:-1])
        begin = header.begin + info.offset
        stored = np.frombuffer(data, np.uint8, rows * row_bytes, begin).reshape(rows, row_bytes)
        tensors[name] = MappedTensor(name, kind, info.shape, stored)
    return tensors
