"""A matrix product uses row counts with equal bits, for any classes of row counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from personalpeft.backends.torch import batch_invariant_matmul
from personalpeft.backends.torch.batch_invariant_matmul import (
    ProductChooser,
    ProductKind,
    ProductShape,
    RowCounts,
    find_row_counts,
    is_usable,
)
from personalpeft.backends.torch.ops.base import Ops
from personalpeft.backends.torch.ops.self_test import find_wrong_kernel

INPUTS = 8
X = torch.arange(256 * INPUTS, dtype=torch.float32).view(256, INPUTS)


def product_with(class_of: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
    """Return a product whose last bits depend on the class of its row count."""

    def product(x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True) + class_of(len(x)) / 2

    return product


def amx(rows: int) -> int:
    """The classes measured on an AMX processor in bfloat16, for the narrowest shape."""
    return 0 if rows < 2 else 1 if rows <= 32 else 2 if rows <= 36 else 3 if rows <= 300 else 4


def mkl(rows: int) -> int:
    """The classes of MKL in float32 with two threads."""
    return 0 if rows < 2 else 1 if rows < 4 else 2 if rows in (4, 8) or rows >= 12 else rows


def odd(rows: int) -> int:
    """Classes that powers of two do not reveal."""
    return int(rows in (50, 70, 145))


@pytest.mark.parametrize(
    ("classes", "padded_one"), [(amx, 37), (mkl, 4), (odd, 1), (lambda rows: 0, 1)]
)
def test_a_row_has_the_same_bits_in_a_batch_of_any_size(
    classes: Callable[[int], int], padded_one: int
) -> None:
    product = product_with(classes)
    counts = find_row_counts(product, X, (1,))
    assert counts is not None
    assert counts.padded(1) == padded_one
    x = X.repeat(3, 1)
    alone = torch.cat([counts.apply(product, row[None]) for row in x])

    @examples(40)
    @given(rows=st.integers(1, 700))
    def holds(rows: int) -> None:
        assert torch.equal(counts.apply(product, x[:rows]), alone[:rows])

    holds()


def test_with_a_single_class_few_rows_are_added() -> None:
    counts = find_row_counts(product_with(lambda rows: 0), X, (1,))
    assert counts is not None
    assert all(rows <= counts.padded(rows) <= rows * 4 / 3 for rows in range(1, 257))


def test_no_class_is_reported_when_bits_depend_on_the_row_position() -> None:
    def product(x: Tensor) -> Tensor:
        return x + torch.arange(len(x))[:, None] % 2

    found = find_row_counts(product, X, (1,))
    assert found is None or found.counts == (1,)


def test_a_row_count_that_the_library_cannot_compute_is_not_used() -> None:
    def product(x: Tensor) -> Tensor:
        if len(x) < 8:
            raise RuntimeError("could not create a primitive descriptor")
        return x

    found = find_row_counts(product, X, (1,))
    assert found is not None
    assert found.padded(1) == 8


def test_a_cached_choice_of_another_base_is_not_used(tmp_path: Path) -> None:
    first = ProductChooser((1,), tmp_path)
    first.choose(SHAPE)
    (file,) = (tmp_path / "products").iterdir()
    file.write_text(
        json.dumps(
            {"8x8-float32": {"kind": "plain", "rows": None}, **json.loads(file.read_text("utf-8"))}
        )
    )
    second = ProductChooser((1,), tmp_path)
    second.choose(SHAPE)
    assert second.invariant


def test_thread_counts_with_different_bits_share_no_class() -> None:
    def product(x: Tensor) -> Tensor:
        return x + (torch.get_num_threads() if len(x) < 12 else 0)

    found = find_row_counts(product, X, (1, 2))
    assert found is not None
    assert found.counts[0] == 12


SHAPE = ProductShape(64, 96, torch.float32, bias=True)


def test_a_choice_is_cached_and_a_damaged_cache_is_measured_again(tmp_path: Path) -> None:
    chosen = ProductChooser((1,), tmp_path).choose(SHAPE)
    (file,) = (tmp_path / "products").iterdir()
    kept = file.read_text("utf-8")
    assert ProductChooser((1,), tmp_path).choose(SHAPE) == chosen
    for damaged in (
        "{",
        "[]",
        kept.replace('"counts":[', '"counts":[-'),
        kept.replace('"kind":"', '"kind":"x'),
    ):
        assert damaged != kept
        file.write_text(damaged, "utf-8")
        assert ProductChooser((1,), tmp_path).choose(SHAPE) == chosen


def fails(*arguments: object) -> Tensor:
    raise RuntimeError("could not create a primitive descriptor")


def gives_zeros(x: Tensor) -> Tensor:
    return torch.zeros(*x.shape[:-1], SHAPE.outputs)


@pytest.mark.parametrize("product", [fails, gives_zeros])
def test_a_failing_or_wrong_product_is_not_chosen(
    product: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        batch_invariant_matmul, "make_packed_product", lambda weight, bias: (product, weight)
    )
    assert not is_usable(ProductKind.PACKED, SHAPE)
    assert ProductChooser((1,), None).choose(SHAPE).kind is ProductKind.PLAIN


def test_padding_never_changes_other_rows() -> None:
    seen: list[Tensor] = []
    counts = RowCounts((4, 8), (1,))
    counts.apply(lambda x: seen.append(x) or x, X[:2])
    assert torch.equal(seen[0][2:], torch.zeros(2, INPUTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_kernel_is_detected(dtype: torch.dtype) -> None:
    class BrokenOps(Ops):
        def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
            return super().rms_norm(x, weight, epsilon) * 1.5

    cpu = torch.device("cpu")
    assert find_wrong_kernel(Ops(cpu, dtype)) is None
    assert find_wrong_kernel(BrokenOps(cpu, dtype)) == "rms_norm"
