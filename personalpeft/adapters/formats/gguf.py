"""Write and import GGUF LoRA files for llama.cpp.

Invariants: llama.cpp computes from a written file what this package computes from the stack, also
where the architecture permutes rows (``base_models/gguf/tensor_names.py``). An import reads a whole
file or nothing, in memory of at most five times the file's size at the largest rank. Tensors lie
behind the header, within the file, without overlap.

The format is GGUF version 3; version 2 has the same layout. ``gguf.GGUFReader`` loops over an array
for as long as a file claims, so files are parsed here.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from personalpeft.adapters.compose import as_single_lora, in_half
from personalpeft.adapters.formats.safetensors_reader import to_array
from personalpeft.adapters.safe_io import format_error, read_file, safe_repr
from personalpeft.adapters.types import Adapter, AdapterStack, LoRAWeights, Manifest, Matrix
from personalpeft.adapters.validate import check_adapter
from personalpeft.base_models.gguf.tensor_names import GgufNames
from personalpeft.ids import check_layer_name
from personalpeft.types import Architecture, canonical_digest

_ALPHA = "adapter.lora.alpha"
_ACTIVATED = "adapter.alora.invocation_tokens"
_LORA = re.compile(r"(.+)\.(lora_[ab])")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ITEMS_LIMIT = 2**16
_DIMENSIONS_LIMIT = 4
_TEXT_LIMIT = 2**20
_TEXT, _ARRAY = 8, 9
# The struct format of each kind of number.
_NUMBERS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_FLOATS = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2)}


def write_gguf_lora(names: GgufNames, stack: AdapterStack, path: Path, *, title: str = "") -> None:
    """Write a stack as one LoRA, in float16 unless the base is float32 or a number is too large."""
    from gguf import GGUFWriter

    pairs, scaling = as_single_lora(stack)
    ranks = {pair.a.shape[1] for pair in pairs.values()}
    halves = pairs if names.full else in_half(pairs)
    writer = GGUFWriter(path, names.architecture)
    try:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        if title:
            writer.add_name(title)
        # llama.cpp multiplies by alpha over the rank of each tensor, or by 1 where alpha is 0.
        writer.add_float32(_ALPHA, scaling * ranks.pop() if len(ranks) == 1 else 0.0)
        for projection, pair in halves.items():
            for block in range(pair.a.shape[0]):
                name = names.projection(projection, block)
                writer.add_tensor(f"{name}.lora_a", pair.a[block])
                writer.add_tensor(f"{name}.lora_b", names.to_gguf(projection, pair.b[block]))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def import_gguf_lora(
    path: Path, architecture: Architecture, names: GgufNames, *, layer: str, base: str
) -> Adapter:
    """Read a GGUF LoRA as an adapter of ``layer`` on the base with the digest ``base``."""
    check_layer_name(layer)
    source = str(path)
    data = read_file(path)
    digest = canonical_digest(["gguf", hashlib.sha256(data).hexdigest()])
    read = read_gguf(data, source=source)
    alpha = _alpha(read.metadata, names, source)
    unpadded = _stack_tensors(read.arrays, architecture, names, source)
    for name, pair in unpadded.items():
        # Check before ranks are padded, which can make a small file large.
        manifest = Manifest(base, layer, pair.a.shape[1], 1.0, (name,), {}, digest)
        check_adapter(
            Adapter(manifest, {name: pair}), source=source, architecture=architecture, numbers=False
        )
    pairs, scaling = _pad_ranks(unpadded, alpha)
    rank = next(iter(pairs.values())).a.shape[1]
    recipe = {"imported": "gguf", "rank": rank}
    manifest = Manifest(base, layer, rank, scaling, tuple(sorted(pairs)), recipe, digest)
    adapter = Adapter(manifest, pairs)
    check_adapter(adapter, source=source, architecture=architecture, base=base)
    return adapter


def _alpha(metadata: Mapping[str, object], names: GgufNames, source: str) -> float:
    """Check the file's metadata and return alpha, where 0 means a scaling of 1."""
    if (metadata.get("general.type"), metadata.get("adapter.type")) != ("adapter", "lora"):
        raise format_error(
            source, "is not a LoRA.", hint="Give a GGUF file that holds a LoRA adapter."
        )
    if _ACTIVATED in metadata:
        raise format_error(
            source,
            "is an activated LoRA (aLoRA), which cannot be imported.",
            hint="Train it again as plain LoRA.",
        )
    architecture = metadata.get("general.architecture")
    if architecture != names.architecture:
        raise format_error(
            source,
            f"is for the architecture {safe_repr(architecture)}, the base is {names.architecture}.",
            hint="An adapter works only on the base it was built for.",
        )
    alpha = metadata.get(_ALPHA, 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha) or alpha < 0:
        raise format_error(source, f"has an alpha of {safe_repr(alpha)}.")
    return alpha


def _stack_tensors(
    tensors: Mapping[str, npt.NDArray[Any]],
    architecture: Architecture,
    names: GgufNames,
    source: str,
) -> dict[str, LoRAWeights]:
    """Stack the file's tensors over the blocks. Every tensor must belong to a projection."""
    modules = {
        names.projection(projection, block): (projection, block)
        for projection in architecture.projections
        for block in range(architecture.blocks)
    }
    halves: dict[str, dict[str, list[npt.NDArray[Any] | None]]] = {}
    for name, tensor in tensors.items():
        match = _LORA.fullmatch(name)
        if match is None or match[1] not in modules:
            raise format_error(
                source,
                f"adapts {safe_repr(name)}, which the base's card does not name.",
            )
        projection, block = modules[match[1]]
        rows = tensor if match[2] == "lora_a" else _permute_rows(tensor, projection, names, source)
        empty: list[npt.NDArray[Any] | None] = [None] * architecture.blocks
        halves.setdefault(projection, {}).setdefault(match[2], empty)[block] = rows
    pairs: dict[str, LoRAWeights] = {}
    for projection, both in halves.items():
        a, b = (
            _stack_blocks(both.get(half, ()), projection, source) for half in ("lora_a", "lora_b")
        )
        pairs[projection] = LoRAWeights(a, b)
    if not pairs:
        raise format_error(source, "holds no tensors.")
    return pairs


def _pad_ranks(
    pairs: Mapping[str, LoRAWeights], alpha: float
) -> tuple[Mapping[str, LoRAWeights], float]:
    """Pad all ranks to the largest with zeros; return the weights and their scaling."""
    ranks = {pair.a.shape[1] for pair in pairs.values()}
    if len(ranks) == 1:
        return pairs, alpha / ranks.pop() if alpha else 1.0
    padded = {}
    for name, pair in pairs.items():
        scale = np.float32(alpha / pair.a.shape[1] if alpha else 1.0)
        padded[name] = LoRAWeights(pair.a, pair.b.astype(np.float32) * scale).padded(max(ranks))
    return padded, 1.0


def _permute_rows(
    tensor: npt.NDArray[Any], projection: str, names: GgufNames, source: str
) -> npt.NDArray[Any]:
    try:
        return names.from_gguf(projection, tensor)
    except ValueError as error:
        raise format_error(
            source, f"{projection} has {tensor.shape[0]} outputs, which its heads do not share."
        ) from error


def _stack_blocks(blocks: Any, projection: str, source: str) -> Matrix:
    if not blocks or any(block is None for block in blocks):
        raise format_error(source, f"{projection} is not there in every block.")
    if len({(block.shape, block.dtype) for block in blocks}) != 1 or blocks[0].ndim != 2:
        raise format_error(source, f"{projection} is no matrix of the same size in every block.")
    return np.stack(list(blocks))


@dataclass(frozen=True, slots=True)
class GgufTensors:
    """The metadata of a file (None for an array) and its tensors, outermost dimension first."""

    metadata: Mapping[str, str | int | float | bool | None]
    arrays: Mapping[str, Matrix]


def read_gguf(data: bytes, *, source: str) -> GgufTensors:
    """Read the bytes of a GGUF file."""
    cursor = _Cursor(data, source)
    if cursor.take(4) != _MAGIC:
        raise format_error(
            source, "is not a GGUF file.", hint="Give a GGUF file that holds a LoRA adapter."
        )
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise format_error(
            source, f"is GGUF version {version}; {' and '.join(map(str, _VERSIONS))} are read."
        )
    tensors, items = cursor.number("Q"), cursor.number("Q")
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
    arrays = {}
    for entry in entries:
        offset = begin + entry.begin
        # A slice copies, since the offset may not be aligned.
        arrays[entry.name] = to_array(data[offset : offset + entry.size], entry.kind, entry.shape)
    return GgufTensors(metadata, arrays)


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
        (value,) = struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))
        return value

    def text(self) -> str:
        length = self.number("Q")
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
        kind = self.number("I")
        if kind in _NUMBERS:
            value: int | float | bool = self.number(_NUMBERS[kind])
            return value
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise format_error(self._source, f"holds a value of the unknown kind {kind}.")
        inner, length = self.number("I"), self.number("Q")
        if inner in _NUMBERS:
            self.take(length * struct.calcsize(f"<{_NUMBERS[inner]}"))
        elif inner == _TEXT:
            # Each text takes at least eight bytes, so the end of the file bounds the loop.
            for _ in range(length):
                self.text()
        else:
            raise format_error(self._source, f"holds an array of the unknown kind {inner}.")
        return None

    def entry(self) -> _Entry:
        name = self.text()
        dimensions = self.number("I")
        if not 1 <= dimensions <= _DIMENSIONS_LIMIT:
            raise format_error(
                self._source, f"tensor {safe_repr(name)} has {dimensions} dimensions."
            )
        # The file has the innermost dimension first.
        shape = tuple(reversed([self.number("Q") for _ in range(dimensions)]))
        kind, begin = self.number("I"), self.number("Q")
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
