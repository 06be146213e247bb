"""Find the row counts for which a matrix product gives each row the same bits.

A library adds in another order for another number of rows or threads. docs/explanation/serving.md
has measurements. The row counts fall into classes. Within one class, a row's bits depend neither on
the number of rows nor on its position. So inputs are padded or split to row counts of one class.
Then each row has the same bits in any batch.

Invariants: the choice depends on the machine, the libraries and the product's shape, never on time.
So two processes choose alike. A product that fails or computes wrong results is not chosen.
On a processor with AMX our own product (``ops/packed_matmul.py``) needs no class.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
from pydantic import Field, PositiveInt, TypeAdapter, ValidationError
from torch import Tensor
from torch.nn.functional import linear

from personalpeft.backends.openmp import limit_threads
from personalpeft.backends.processor import instruction_sets
from personalpeft.backends.torch.ops.packed_matmul import PackedMatmul
from personalpeft.file_system import write_file_atomically

Product: TypeAlias = Callable[[Tensor], Tensor]
"""From ``[rows, inputs]`` to ``[rows, outputs]``."""

_CPU = torch.device("cpu")
# Row counts to try. No others are used: a library may compute each one in its own way. Up to 384, so
# that a training pass is one product; more would make the trial of a slow processor longer.
_SMALL = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 37, 48, 64, 80, 96, 128, 160, 192, 256)
_TRIED = (*_SMALL, *range(288, 385, 32))
# Rows of products this wide (a vocabulary) cost more, so fewer are tried and used.
_WIDE, _MOST_WIDE_ROWS = 16384, 128
# Reading the weights costs about as much as this many rows (AMX: 14.7 ms for 2, 29 for 128).
_CALL_COST_ROWS = 128
# Batches to optimise for: one reply, sixteen, a prompt.
_TYPICAL_ROWS = (1, 16, 256)
# Largest difference of a correct product from float32, relative to its largest value.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}
_FORMAT = 3

_Counts: TypeAlias = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class ProductKind(StrEnum):
    """How to compute a product: from reordered weights, or with torch's ``linear``.

    ``TRANSPOSED`` is torch's product with ``[inputs, outputs]`` weights. ``NATIVE`` is our own.
    """

    NATIVE = "native"
    PACKED = "packed"
    PLAIN = "plain"
    TRANSPOSED = "transposed"


@dataclass(frozen=True, slots=True)
class ProductShape:
    """What the choice of a product depends on; ``only`` is the one kind to try, if given."""

    inputs: int
    outputs: int
    dtype: torch.dtype
    bias: bool
    only: ProductKind | None = None

    @property
    def key(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        only = "" if self.only is None else f"-{self.only}"
        return f"{self.inputs}x{self.outputs}-{dtype}{'-bias' if self.bias else ''}{only}"


@dataclass(frozen=True, slots=True)
class RowCounts:
    """One class of row counts, and the thread counts for which it is the same."""

    counts: _Counts
    threads: _Counts

    @property
    def most(self) -> int:
        return self.counts[-1]

    def padded(self, rows: int) -> int:
        """Return the smallest number of the class that holds this many rows, at most ``most``."""
        return next((count for count in self.counts if count >= rows), self.most)

    def apply(self, product: Product, x: Tensor) -> Tensor:
        """Compute a product of ``[rows, inputs]`` with numbers of rows of this class alone."""
        rows = len(x)
        if rows > self.most:
            return torch.cat([self.apply(product, part) for part in x.split(self.most)])
        count = self.padded(rows)
        if count == rows:
            return product(x)
        wide = x.new_zeros((count, x.shape[1]))
        wide[:rows] = x
        return product(wide)[:rows]


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """How to compute products of one shape; ``rows`` are the row counts to use, None for any."""

    kind: ProductKind
    rows: RowCounts | None

    def apply(self, product: Product, x: Tensor) -> Tensor:
        """Compute a product of this kind, of ``[rows, inputs]``."""
        return product(x) if self.rows is None else self.rows.apply(product, x)


_CHOICES = TypeAdapter(dict[str, ProductChoice])


class ProductChooser:
    """Choose a kind and a class for each shape, by trial, and keep the choices in ``cache``.

    Args:
        threads: The numbers of threads that may compute, the largest last.
        cache: The folder to keep choices in; None keeps them in memory alone.
        device: Where products are computed: a CPU, or a GPU, where threads change nothing.
        native: Our own product, if this processor has one.
    """

    def __init__(
        self,
        threads: Sequence[int],
        cache: Path | None,
        device: torch.device = _CPU,
        native: PackedMatmul | None = None,
    ) -> None:
        self._threads, self._device, self.native = tuple(threads), device, native
        versions = [_FORMAT, torch.__version__, platform.machine()]
        machine = [*versions, instruction_sets(), self._threads]
        if device.type == "cuda":
            machine.append(torch.cuda.get_device_name(device))
        name = hashlib.sha256(json.dumps(machine).encode()).hexdigest()[:16]
        self._file = None if cache is None else cache / "products" / f"{name}.json"
        self._stored: dict[str, ProductChoice] = {}
        if self._file is not None:
            # Absent or damaged: the trial is made again.
            with suppress(OSError, ValidationError):
                self._stored = _CHOICES.validate_json(self._file.read_bytes())
        # The choices of this base's shapes. Choices of other bases must not affect `invariant`.
        self._chosen: dict[str, ProductChoice] = {}

    def choose(self, shape: ProductShape) -> ProductChoice:
        """Return how to compute products of this shape; the first call for a shape tries it."""
        if self.native is not None and self.native.fits(shape.inputs):
            return ProductChoice(ProductKind.NATIVE, None)
        if shape.key not in self._stored:
            self._stored[shape.key] = _choose(shape, self._threads, self._device)
            if self._file is not None:
                # A cache that cannot be written costs the next process a trial, nothing else.
                with suppress(OSError):
                    write_file_atomically(self._file, _CHOICES.dump_json(self._stored))
        choice = self._chosen[shape.key] = self._stored[shape.key]
        return choice

    @property
    def threads(self) -> tuple[int, ...]:
        """The numbers of threads that no choice made so far excludes."""
        classes = [choice.rows for choice in self._chosen.values() if choice.rows is not None]
        return tuple(n for n in self._threads if all(n in rows.threads for rows in classes))

    @property
    def invariant(self) -> bool:
        """Whether a class was found for each shape chosen so far."""
        return all(choice.rows is not None for choice in self._chosen.values())


class BatchInvariantProduct:
    """A product with ``[outputs, inputs]`` weights, computed as the chooser decides."""

    def __init__(self, weight: Tensor, bias: Tensor | None, chooser: ProductChooser) -> None:
        self._outputs, inputs = weight.shape
        shape = ProductShape(inputs, self._outputs, weight.dtype, bias is not None)
        self._choice = chooser.choose(shape)
        self.is_packed = self._choice.kind in (ProductKind.PACKED, ProductKind.NATIVE)
        self._product, self._weight = _make_product(self._choice.kind, weight, bias, chooser.native)

    @property
    def weight(self) -> Tensor:
        """The weights, ``[outputs, inputs]``."""
        if self._choice.kind is ProductKind.NATIVE:
            return PackedMatmul.unpack(self._weight, self._outputs)
        return self._weight.to_dense() if self.is_packed else self._weight

    def __call__(self, x: Tensor) -> Tensor:
        y = self._choice.apply(self._product, x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], self._outputs)


def _make_product(
    kind: ProductKind, weight: Tensor, bias: Tensor | None, native: PackedMatmul | None = None
) -> tuple[Product, Tensor]:
    """Return a product with ``[outputs, inputs]`` weights, and the weights in the form it holds.

    Raises ``RuntimeError`` if the libraries cannot compute this kind of product for this shape.
    """
    if kind is ProductKind.PLAIN:
        return lambda x: linear(x, weight, bias), weight
    if kind is ProductKind.TRANSPOSED:
        transposed = weight.t().contiguous()
        return lambda x: x @ transposed if bias is None else x @ transposed + bias, weight
    if kind is ProductKind.NATIVE and native is not None:
        packed, outputs = native.pack(weight), len(weight)
        return lambda x: native(x, packed, bias, outputs), packed
    return make_packed_product(weight, bias)


def make_packed_product(weight: Tensor, bias: Tensor | None) -> tuple[Product, Tensor]:
    """Return a product with weights in oneDNN's own order, and these weights."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], ""), packed


def _choose(shape: ProductShape, threads: Sequence[int], device: torch.device) -> ProductChoice:
    working = []
    for kind in (shape.only,) if shape.only else (ProductKind.PACKED, ProductKind.PLAIN):
        if not is_usable(kind, shape, device):
            continue
        for counts in (threads, threads[-1:]):
            if rows := _find_class(kind, shape, counts, device):
                return ProductChoice(kind, rows)
        working.append(kind)
    return ProductChoice(working[0] if working else shape.only or ProductKind.PLAIN, None)


def is_usable(kind: ProductKind, shape: ProductShape, device: torch.device = _CPU) -> bool:
    """Return whether the libraries can compute a product there, correct up to rounding.

    Args:
        kind: How the product is computed.
        shape: Inputs, outputs and dtype of the layer, and whether it has a bias.
        device: Where it is tried.
    """
    random = torch.Generator().manual_seed(1)
    tile = torch.randn((min(shape.outputs, 256), shape.inputs), generator=random).to(shape.dtype)
    bias = torch.ones(shape.outputs, dtype=shape.dtype, device=device) if shape.bias else None
    try:
        product, _ = _make_product(kind, _tiled(tile, shape.outputs).to(device), bias)
        for rows in (1, 2, 33):
            x = torch.randn((rows, shape.inputs), generator=random).to(shape.dtype)
            expected = x.float() @ tile.float().t() + (1.0 if shape.bias else 0.0)
            found = product(x.to(device))[:, : len(tile)].float().cpu()
            difference = float((found - expected).abs().max())
            # Written so that NaN is wrong too.
            if not difference <= _TOLERANCE[shape.dtype] * float(expected.abs().max()):
                return False
    except (RuntimeError, AttributeError, NotImplementedError):
        return False  # The library has no such primitive for this shape, or is not here at all.
    return True


def _find_class(
    kind: ProductKind, shape: ProductShape, threads: Sequence[int], device: torch.device
) -> RowCounts | None:
    weight, x = _cancelling_inputs(shape)
    bias = torch.zeros(shape.outputs, dtype=shape.dtype, device=device) if shape.bias else None
    product, _ = _make_product(kind, weight.to(device), bias)
    most = _MOST_WIDE_ROWS if max(shape.inputs, shape.outputs) >= _WIDE else len(x)
    return find_row_counts(product, x[:most].to(device), threads)


def find_row_counts(product: Product, x: Tensor, threads: Sequence[int]) -> RowCounts | None:
    """Return the class that is fastest for typical batches; None if no row count is stable.

    Args:
        product: The product to try.
        x: ``[rows, inputs]``. Its products must reveal the order of adding.
        threads: The thread counts to try it with.
    """
    tried = [count for count in _TRIED if count <= len(x)]
    # For each class the outputs of its largest member, and its members: numbers of threads and rows.
    outputs: list[Tensor] = []
    members: list[set[tuple[int, int]]] = []
    for number in threads:
        with limit_threads(number):
            for count in tried:
                try:
                    y, rolled = product(x[:count]), product(x[:count].roll(1, 0))
                except RuntimeError:
                    continue  # The library has no primitive for this number of rows.
                if not torch.equal(rolled.roll(-1, 0), y):
                    continue  # A row's bits depend on its position.
                for index, known in enumerate(outputs):
                    shared = min(len(known), count)
                    if torch.equal(known[:shared], y[:shared]):
                        outputs[index] = max(known, y, key=len)
                        members[index].add((number, count))
                        break
                else:
                    outputs.append(y)
                    members.append({(number, count)})
    shared_counts = (
        tuple(n for n in tried if all((number, n) in found for number in threads))
        for found in members
    )
    classes = [RowCounts(counts, tuple(threads)) for counts in shared_counts if counts]
    return min(classes, key=_cost, default=None)


def _cancelling_inputs(shape: ProductShape) -> tuple[Tensor, Tensor]:
    """Return weights and rows with products that are zero up to rounding, to reveal any other
    order.
    """
    random = torch.Generator().manual_seed(0)
    half = shape.inputs // 2
    order = torch.randperm(2 * half, generator=random)
    tile = torch.randn((min(shape.outputs, 256), half), generator=random).to(shape.dtype)
    weight = torch.zeros((len(tile), shape.inputs), dtype=shape.dtype)
    weight[:, : 2 * half] = torch.cat([tile, tile], dim=1)[:, order]
    rows = torch.randn((_TRIED[-1], half), generator=random).to(shape.dtype)
    x = torch.zeros((len(rows), shape.inputs), dtype=shape.dtype)
    x[:, : 2 * half] = torch.cat([rows, -rows], dim=1)[:, order]
    return _tiled(weight, shape.outputs), x


def _tiled(tile: Tensor, outputs: int) -> Tensor:
    return tile.repeat(-(-outputs // len(tile)), 1)[:outputs].contiguous()


def _cost(rows: RowCounts) -> float:
    """Return the cost of typical batches with this class, in rows relative to no padding."""
    total = 0.0
    for batch in _TYPICAL_ROWS:
        parts = [min(rows.most, batch - first) for first in range(0, batch, rows.most)]
        cost = sum(_CALL_COST_ROWS + rows.padded(part) for part in parts)
        total += cost / (_CALL_COST_ROWS + batch)
    return total
