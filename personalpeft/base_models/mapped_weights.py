"""A base's weights as its file stores them, mapped into memory under transformers' names.

Invariants: a file is only read, and nothing is copied until a tensor is unpacked. Each tensor lies
within its file, and its rows hold whole blocks. Unpacked numbers are the ones that the base's folder
of plain weights has.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from personalpeft.base_models.files import FRESH_COPY, weights_of
from personalpeft.base_models.gguf.file import gguf_file, source_gguf_file
from personalpeft.base_models.gguf.header import read_header
from personalpeft.base_models.gguf.tensor_names import GgufNames, gguf_names
from personalpeft.base_models.types import Base, ModelCard
from personalpeft.errors import WeightsError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAPPED_FORMATS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q4_K", "Q5_K", "Q6_K"),
)
"""GGML's names of the formats that the kernels unpack."""
# Of learning: activations, adapters and everything else.
_OTHER_BYTES = 3 * 2**30
_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"

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
        head_size: Rows of one head where the file has them in llama.cpp's order, else 0.
    """

    name: str
    format: GGMLQuantizationType | PlainFormat
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8] = field(repr=False)
    head_size: int = 0

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

    def numbers(self, rows: slice, columns: slice) -> Numbers:
        """Return numbers as float32 in transformers' order, the reference for faster kernels.

        Args:
            rows: The rows.
            columns: The columns, from the begin of a block to the end of one.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        indices = np.arange(*rows.indices(len(self.data)))
        if self.head_size:
            inside = indices % self.head_size
            half = self.head_size // 2
            indices += inside % half * 2 + inside // half - inside
        kind = GGMLQuantizationType(self.format)
        of, size = GGML_QUANT_SIZES[kind]
        begin, end, _ = columns.indices(self.columns)
        data = np.ascontiguousarray(self.data[indices, begin // of * size : end // of * size])
        return dequantize(data, kind).astype(np.float32, copy=False)


class MappedWeights:
    """All weights of a base.

    Args:
        tensors: By their names in the file.
        names: The base's names in a GGUF file; None for a file with transformers' names.
    """

    def __init__(self, tensors: Mapping[str, MappedTensor], names: GgufNames | None) -> None:
        self._tensors, self._names = tensors, names

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of the matrices, by name."""
        return tuple(sorted({each.format.name for each in self._matrices()}))

    @property
    def parameters(self) -> int:
        """The number of numbers in all matrices."""
        return sum(math.prod(each.shape) for each in self._matrices())

    def examples(self) -> Iterator[MappedTensor]:
        """Yield one matrix of each format."""
        yield from {each.format: each for each in self._matrices()}.values()

    def matrix(self, name: str) -> MappedTensor:
        """Return a matrix by transformers' name, or raise ``WeightsError``."""
        tensor = self._find(name)
        if len(tensor.shape) != 2:
            raise _unexpected(name)
        heads = {} if self._names is None else self._names.heads
        for projection, count in heads.items():
            if f".{projection}." in name:
                return replace(tensor, head_size=tensor.shape[0] // count)
        return tensor

    def vector(self, name: str) -> Numbers:
        """Return a vector by transformers' name as float32, or raise ``WeightsError``."""
        tensor = self._find(name)
        if len(tensor.shape) != 1:
            raise _unexpected(name)
        values: Numbers = tensor.numbers(slice(None), slice(None))[0]
        if (
            self._names is not None
            and self._names.architecture == "gemma3"
            and name.endswith("norm.weight")
        ):
            # transformers adds one to a Gemma's norms in use, llama.cpp stores the sum.
            values = (values - 1).astype(np.float32)
        return values

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight by transformers' name, or raise ``WeightsError``."""
        return self._find(name).shape

    def parts(self, name: str, most: int) -> Iterator[Numbers]:
        """Yield a weight's numbers by transformers' name, at most ``most`` or one row at a time."""
        if len(self.shape(name)) == 1:
            yield self.vector(name)
            return
        matrix = self.matrix(name)
        rows, columns = matrix.shape
        count = max(1, most // columns)
        for begin in range(0, rows, count):
            yield matrix.numbers(slice(begin, min(begin + count, rows)), slice(0, columns))

    def _matrices(self) -> Iterator[MappedTensor]:
        return (each for each in self._tensors.values() if len(each.shape) == 2)

    def _find(self, name: str) -> MappedTensor:
        for each in (name, _EMBEDDINGS) if name == _HEAD else (name,):
            tensor = self._tensors.get(self._names.tensor(each) if self._names else each)
            if tensor is not None:
                return tensor
        raise WeightsError(f"The base's file has no weight {name}.", hint=FRESH_COPY)


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


def map_weights(base: Base) -> MappedWeights:
    """Map the file that the base comes from: a GGUF file, or a folder's safetensors.

    Raises:
        WeightsError: There is no such file, or a tensor is stored in an unknown way.
    """
    if file := gguf_file(base.card, base.cache):
        return MappedWeights(_map_gguf(file), gguf_names(base))
    return MappedWeights(_map_folder(base.folder), None)


def map_source(card: ModelCard) -> MappedWeights:
    """Map the file that a card names, under the names in it, before the base is prepared.

    Raises as ``map_weights``, and for a source that is no file yet.
    """
    if file := source_gguf_file(card):
        return MappedWeights(_map_gguf(file), None)
    if card.source.path is None:
        raise WeightsError(
            f"{card.name} is not prepared.", hint="Open it once, which prepares its file."
        )
    return MappedWeights(_map_folder(card.source.path), None)


def bytes_to_load(parameters: int, width: int) -> int:
    """Return the free bytes that weights need to be loaded by default.

    Args:
        parameters: How many there are. Learning stores them a second time, transposed.
        width: Bytes of one.
    """
    return 2 * width * parameters + _OTHER_BYTES


def _map_gguf(file: Path) -> Mapping[str, MappedTensor]:
    weights = map_gguf(file)
    for each in weights.values():
        if each.format.name not in MAPPED_FORMATS:
            raise WeightsError(
                f"{file} stores {each.name!a} in a format that is unpacked only into memory.",
                hint="Set PERSONALPEFT_WEIGHTS=loaded, or get the model in one of "
                f"{', '.join(MAPPED_FORMATS)}.",
            )
    return weights


def _map_folder(folder: Path) -> Mapping[str, MappedTensor]:
    import torch

    formats = {
        torch.float32: PlainFormat.F32,
        torch.float16: PlainFormat.F16,
        torch.bfloat16: PlainFormat.BF16,
    }
    mapped = {}
    for name, tensor in weights_of(folder):
        if tensor.dtype not in formats or not tensor.ndim or not tensor.numel():
            raise WeightsError(
                f"{folder} stores {name!a} in a way that is not known.", hint=FRESH_COPY
            )
        rows = tensor.view(-1, tensor.shape[-1]).view(torch.uint8).numpy()
        mapped[name] = MappedTensor(name, formats[tensor.dtype], tuple(tensor.shape), rows)
    return mapped


def _unexpected(name: str) -> WeightsError:
    return WeightsError(f"The weight {name} has another shape than expected.", hint=FRESH_COPY)
