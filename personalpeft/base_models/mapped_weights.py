"""A base's weights as its file stores them, mapped into memory under transformers' names.

Invariants: nothing is copied or changed. Unpacked numbers are the ones that the base's folder of
plain weights has.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from personalpeft.base_models.files import FRESH_COPY, gguf_parts
from personalpeft.base_models.gguf.file import source_gguf_file
from personalpeft.base_models.gguf.mapped import BlockFormat, MappedTensor, Numbers, map_gguf
from personalpeft.base_models.gguf.tensor_names import GgufNames, gguf_names
from personalpeft.base_models.types import Base
from personalpeft.errors import WeightsError

_DTYPES = {"F32": BlockFormat.F32, "F16": BlockFormat.F16, "BF16": BlockFormat.BF16}
_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class MappedMatrix:
    """A matrix of a base.

    Attributes:
        tensor: Its numbers.
        head_size: Rows of one head where the file has them in llama.cpp's order, else 0.
    """

    tensor: MappedTensor
    head_size: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.tensor.shape
        return rows, columns


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

    def tensors(self) -> Iterator[MappedTensor]:
        """Yield all tensors in the order of their names."""
        for name in sorted(self._tensors):
            yield self._tensors[name]

    def matrix(self, name: str) -> MappedMatrix:
        """Return a matrix by transformers' name, or raise ``WeightsError``."""
        tensor = self._find(name)
        if len(tensor.shape) != 2:
            raise _unexpected(name)
        return MappedMatrix(tensor, self._head_size(name, tensor))

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

    def _matrices(self) -> Iterator[MappedTensor]:
        return (each for each in self._tensors.values() if len(each.shape) == 2)

    def _head_size(self, name: str, tensor: MappedTensor) -> int:
        for projection, heads in ({} if self._names is None else self._names.heads).items():
            if f".{projection}." in name:
                return tensor.shape[0] // heads
        return 0

    def _find(self, name: str) -> MappedTensor:
        for each in (name, _EMBEDDINGS) if name == _HEAD else (name,):
            tensor = self._tensors.get(self._names.tensor(each) if self._names else each)
            if tensor is not None:
                return tensor
        raise WeightsError(f"The base's file has no weight {name}.", hint=FRESH_COPY)


def map_weights(base: Base) -> MappedWeights:
    """Map the file that the base comes from: one GGUF file, or a folder's safetensors.

    Raises:
        WeightsError: There is no such file, or a tensor is stored in an unknown way.
    """
    if gguf_parts(base.card):
        file = source_gguf_file(base.card)
        if file is None:
            raise WeightsError(
                f"The GGUF file of {base.card.name} comes in parts, which cannot be mapped.",
                hint="Unpack the weights instead: PERSONALPEFT_WEIGHTS=loaded.",
            )
        return MappedWeights(map_gguf(file), gguf_names(base))
    tensors: dict[str, MappedTensor] = {}
    for path in sorted(base.folder.glob("model*.safetensors")):
        tensors |= _map_safetensors(path)
    return MappedWeights(tensors, None)


def _map_safetensors(path: Path) -> dict[str, MappedTensor]:
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        header = json.loads(data[_LENGTH_BYTES:end])
        header.pop("__metadata__", None)
        return {
            name: _safetensor(name, info["dtype"], info["shape"], info["data_offsets"], end, data)
            for name, info in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is damaged: {error}.", hint=FRESH_COPY) from error


def _safetensor(
    name: str, dtype: str, shape: list[int], offsets: list[int], begin: int, data: mmap.mmap
) -> MappedTensor:
    if dtype not in _DTYPES:
        raise ValueError(f"{name!a} has the dtype {dtype!a}")
    block, (first, last) = _DTYPES[dtype], offsets
    size = math.prod(shape) * block.bytes
    if min(shape, default=0) < 1 or last - first != size or begin + last > len(data) or first < 0:
        raise ValueError(f"{name!a} does not fit into the file")
    rows = math.prod(shape[:-1])
    numbers = np.frombuffer(data, np.uint8, size, begin + first).reshape(rows, size // rows)
    return MappedTensor(name, block, tuple(shape), numbers)


def _unexpected(name: str) -> WeightsError:
    return WeightsError(f"The weight {name} has another shape than expected.", hint=FRESH_COPY)
