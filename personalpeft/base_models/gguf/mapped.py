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
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from personalpeft.base_models.gguf.header import read_header
from personalpeft.errors import WeightsError

Numbers: TypeAlias = npt.NDArray[np.float32]


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
        WeightsError: The file is damaged, or a tensor is stored in a way that is unknown here.
    """
    header = read_header(path)
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors = {}
    for name, info in header.tensors.items():
        if info.kind not in _LAYOUTS:
            known = ", ".join(each.name for each in BlockFormat)
            raise WeightsError(
                f"{path} stores {name!a} in a format that is unpacked only into memory.",
                hint=f"Set PERSONALPEFT_WEIGHTS=loaded, or get the model in one of {known}.",
            )
        block = BlockFormat(info.kind)
        row_bytes = info.shape[-1] // block.elements * block.bytes
        rows = math.prod(info.shape[:-1])
        begin = header.begin + info.offset
        stored = np.frombuffer(data, np.uint8, rows * row_bytes, begin).reshape(rows, row_bytes)
        tensors[name] = MappedTensor(name, block, info.shape, stored)
    return tensors
