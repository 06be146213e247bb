"""Build a model around weights that stay in the base's file, unpacked part by part for each use.

A part fits the processor's cache, so the product reads it from there. That costs a tenth of a
product of 256 rows (docs/explanation/engines.md).

Invariants: weights are only read, and only vectors, such as norms, are in memory. One pass runs at
a time, so all layers of a model share one buffer. The model computes what the loaded one computes,
up to rounding. A row's outputs and gradients have the same bits in any batch, as far as the chooser
finds row counts for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from personalpeft.backends.torch.batch_invariant_matmul import (
    ProductChoice,
    ProductChooser,
    ProductKind,
    ProductShape,
)
from personalpeft.backends.torch.lora_layers import FrozenLinear, LinearFactory
from personalpeft.backends.torch.ops.base import Ops
from personalpeft.base_models.mapped_weights import MappedTensor, MappedWeights
from personalpeft.errors import WeightsError

# Numbers of a part: 2 MB in bfloat16.
_PART = 1 << 20
# Parts end where blocks end, and where libraries are fast.
_ROW_STEP, _COLUMN_STEP = 32, 256
_ROW_MULTIPLE = 32


class Unpacker:
    """Unpacks parts of matrices into one buffer.

    Args:
        ops: Unpacks blocks.
        chooser: Chooses row counts.
    """

    def __init__(self, ops: Ops, chooser: ProductChooser) -> None:
        self.ops, self.chooser = ops, chooser
        self._buffer = torch.empty(0, dtype=ops.dtype)
        self._packed = torch.empty(0, dtype=torch.int32)

    def part(self, matrices: Sequence[MappedTensor], rows: slice, columns: slice) -> Tensor:
        """Return a part of matrices below each other, valid until the next call.

        Args:
            matrices: Matrices with equally many columns. Rows are numbered through all of them.
            rows: The rows; both ends are given.
            columns: The columns; both ends are given.
        """
        shape = rows.stop - rows.start, columns.stop - columns.start
        self._buffer = _with_room(self._buffer, math.prod(shape))
        out = self._buffer[: math.prod(shape)].view(shape)
        first = 0
        for matrix in matrices:
            last = first + matrix.shape[0]
            low, high = max(rows.start, first), min(rows.stop, last)
            if low < high:
                part = out[low - rows.start : high - rows.start]
                self.ops.unpack(matrix, slice(low - first, high - first), columns, part)
            first = last
        return out

    def multiply(
        self, choice: ProductChoice, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        """Multiply rows with a part's weights.

        Args:
            choice: How to compute it.
            x: ``[rows, inputs]``.
            weight: The part, or its transpose, ``[outputs, inputs]``.
            bias: ``[outputs]``, if any.
            out: Takes the result, ``[rows, outputs]``.
        """
        native = self.chooser.native
        if choice.kind is not ProductKind.NATIVE or native is None:
            product = (
                partial(torch.mm, mat2=weight.t())
                if choice.kind is ProductKind.TRANSPOSED
                else partial(linear, weight=weight, bias=bias)
            )
            out.copy_(choice.apply(product, x))
            return
        outputs, inputs = weight.shape
        self._packed = _with_room(self._packed, native.packed_size(inputs, outputs))
        native(x, native.pack(weight, self._packed), bias, outputs, out)


class MappedLinear(FrozenLinear):
    """A linear layer over matrices below each other.

    Args:
        matrices: They have the same columns.
        bias: Of all their outputs, if any.
        unpacker: Shared by the model.
    """

    def __init__(
        self, matrices: Sequence[MappedTensor], bias: Tensor | None, unpacker: Unpacker
    ) -> None:
        super().__init__()
        self._matrices, self._unpacker = tuple(matrices), unpacker
        self.bias = bias
        self._inputs = matrices[0].shape[1]
        self._outputs = sum(matrix.shape[0] for matrix in matrices)
        # Chosen now: a choice may exclude thread counts, and the first pass needs to know those.
        plain, transposed = ProductKind.PLAIN, ProductKind.TRANSPOSED
        self._output_parts = self._choose(self._inputs, self._outputs, plain, _ROW_STEP)
        self._input_parts = self._choose(self._outputs, self._inputs, transposed, _COLUMN_STEP)

    def multiply(self, x: Tensor) -> Tensor:
        rows = _filled(x.reshape(-1, self._inputs))
        y = rows.new_empty((len(rows), self._outputs))
        for part, choice in self._output_parts:
            weight = self._unpacker.part(self._matrices, part, slice(0, self._inputs))
            bias = None if self.bias is None else self.bias[part]
            self._unpacker.multiply(choice, rows, weight, bias, y[:, part])
        return y[: x.numel() // self._inputs].view(*x.shape[:-1], self._outputs)

    def multiply_transposed(self, grad: Tensor) -> Tensor:
        rows = _filled(grad.reshape(-1, self._outputs))
        inputs = rows.new_empty((len(rows), self._inputs))
        for part, choice in self._input_parts:
            weight = self._unpacker.part(self._matrices, slice(0, self._outputs), part)
            self._unpacker.multiply(choice, rows, weight.t(), None, inputs[:, part])
        return inputs[: grad.numel() // self._outputs].view(*grad.shape[:-1], self._inputs)

    def _choose(
        self, inputs: int, outputs: int, kind: ProductKind, step: int
    ) -> list[tuple[slice, ProductChoice]]:
        """Return the parts of the outputs, and how to compute each."""
        bias, dtype = self.bias is not None and kind is ProductKind.PLAIN, self._unpacker.ops.dtype
        choose = self._unpacker.chooser.choose
        return [
            (part, choose(ProductShape(inputs, part.stop - part.start, dtype, bias, kind)))
            for part in _parts(outputs, _PART // inputs, step)
        ]


class MappedEmbedding(nn.Module):
    """The embeddings of tokens; ``scale`` multiplies them (Gemma)."""

    def __init__(self, matrix: MappedTensor, scale: Tensor | None, ops: Ops) -> None:
        super().__init__()
        self._matrix, self._scale, self._ops = matrix, scale, ops

    def forward(self, tokens: Tensor) -> Tensor:
        known, places = tokens.unique(return_inverse=True)
        columns = self._matrix.columns
        rows = torch.empty((len(known), columns), dtype=self._ops.dtype)
        for row, token in zip(rows.split(1), known.tolist(), strict=True):
            self._ops.unpack(self._matrix, slice(token, token + 1), slice(0, columns), row)
        embeddings = rows[places]
        return embeddings if self._scale is None else embeddings * self._scale


def fuse_mapped_linears(
    members: Sequence[tuple[str, nn.Linear]], weights: MappedWeights, unpacker: Unpacker
) -> MappedLinear:
    """Return one layer for the layers at these paths. Only their shapes are read."""
    matrices = [
        _matrix(weights, path, member.out_features, member.in_features) for path, member in members
    ]
    biases = [
        torch.tensor(weights.vector(f"{path}.bias"), dtype=unpacker.ops.dtype)
        for path, member in members
        if member.bias is not None
    ]
    return MappedLinear(matrices, torch.cat(biases) if biases else None, unpacker)


def fill_mapped_model(module: nn.Module, weights: MappedWeights, unpacker: Unpacker) -> None:
    """Give a model on the meta device its vectors, buffers and embeddings.

    Linear layers stay without weights, for ``install_lora_layers`` and ``map_other_linears``.

    Args:
        module: The model, changed in place.
        weights: The base's file.
        unpacker: Unpacks parts of its matrices.

    Raises:
        WeightsError: The file does not have the model's weights, or the model has others.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        for path, part in list(module.named_modules()):
            if isinstance(part, nn.Embedding):
                matrix = _matrix(weights, path, part.num_embeddings, part.embedding_dim)
                scale = getattr(part, "scalar_embed_scale", None)
                scaled = None if scale is None else torch.tensor(scale, dtype=unpacker.ops.dtype)
                _replace(module, path, MappedEmbedding(matrix, scaled, unpacker.ops))
            elif type(part).__name__.endswith("RotaryEmbedding"):
                # Its tables are computed, not stored.
                _replace(module, path, _on_cpu(part))
            elif not isinstance(part, nn.Linear):
                for name, _ in list(part.named_parameters(recurse=False)):
                    numbers = weights.vector(f"{path}.{name}")
                    vector = torch.tensor(numbers, dtype=unpacker.ops.dtype)
                    setattr(part, name, nn.Parameter(vector, requires_grad=False))
    _check_complete(module)


def map_other_linears(module: nn.Module, make_linear: LinearFactory) -> None:
    """Replace the linear layers that have no adapters."""
    for path, part in list(module.named_modules()):
        if isinstance(part, nn.Linear):
            _replace(module, path, make_linear([(path, part)]))


def check_unpacking(weights: MappedWeights, ops: Ops) -> None:
    """Raise ``WeightsError`` unless each format of the file is unpacked as the reference does."""
    reference = Ops(ops.device, ops.dtype)
    for matrix in weights.examples():
        columns = matrix.columns
        found, expected = (torch.empty((1, columns), dtype=ops.dtype) for _ in range(2))
        ops.unpack(matrix, slice(0, 1), slice(0, columns), found)
        reference.unpack(matrix, slice(0, 1), slice(0, columns), expected)
        if not torch.equal(found, expected):
            raise WeightsError(
                f"The compiled kernel unpacks {matrix.format.name} wrongly on this processor.",
                hint="Set PERSONALPEFT_KERNELS=plain.",
            )


def _matrix(weights: MappedWeights, path: str, rows: int, columns: int) -> MappedTensor:
    matrix = weights.matrix(f"{path}.weight")
    if matrix.shape != (rows, columns):
        raise WeightsError(
            f"{path} must have the shape {(rows, columns)}, got {matrix.shape} in the base's file.",
            hint="The file and config.json must be of one model.",
        )
    return matrix


def _with_room(buffer: Tensor, size: int) -> Tensor:
    """Return a buffer, or a new one if it has no room for so many numbers."""
    if size <= buffer.numel():
        return buffer
    # Not in inference mode: autograd rejects its tensors.
    with torch.inference_mode(mode=False):
        return buffer.new_empty(size)


def _on_cpu(part: Any) -> nn.Module:
    is_computed = not any(buffer.is_meta for buffer in part.buffers())
    module: nn.Module = part if is_computed else type(part)(config=part.config)
    return module


def _check_complete(module: nn.Module) -> None:
    """Raise ``WeightsError`` if something but linear layers has no numbers."""
    for path, part in module.named_modules():
        tensors = (*part.parameters(recurse=False), *part.buffers(recurse=False))
        if not isinstance(part, nn.Linear) and any(tensor.is_meta for tensor in tensors):
            raise WeightsError(
                f"The weights of {type(part).__name__} ({path}) cannot stay in the base's file.",
                hint="Unpack the weights: PERSONALPEFT_WEIGHTS=loaded.",
            )


def _replace(module: nn.Module, path: str, part: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, part)


def _parts(size: int, most: int, step: int) -> list[slice]:
    """Cut ``size`` into equal parts of whole steps, of at most ``most`` where a step allows it."""
    count = -(-size // max(most, 1))
    length = max(-(-size // count) // step, 1) * step
    return [slice(begin, min(begin + length, size)) for begin in range(0, size, length)]


def _filled(rows: Tensor) -> Tensor:
    """Add rows of zeros up to a multiple: libraries keep compiled code for each number of rows."""
    if len(rows) < _ROW_MULTIPLE or not (missing := -len(rows) % _ROW_MULTIPLE):
        return rows
    return torch.cat([rows, rows.new_zeros((missing, rows.shape[1]))])
