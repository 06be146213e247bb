"""A stack of adapters composes into one LoRA."""

from __future__ import annotations

import numpy as np
import pytest
from adapter_files import ARCHITECTURE, OTHER_BASE, deltas, make_adapter
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.adapters.compose import compose, concatenate
from personalpeft.adapters.types import Adapter
from personalpeft.errors import AdapterError
from personalpeft.types import Architecture

TARGETS = st.lists(st.sampled_from(sorted(ARCHITECTURE.projections)), min_size=1, unique=True).map(
    tuple
)


@st.composite
def stacks(draw: st.DrawFn) -> list[tuple[Adapter, float]]:
    return [
        (
            make_adapter(
                draw(st.integers(0, 1000)),
                targets=draw(TARGETS),
                rank=draw(st.integers(1, 5)),
                scaling=draw(st.floats(0.01, 8)),
            ),
            draw(st.floats(-2, 2)),
        )
        for _ in range(draw(st.integers(0, 4)))
    ]


@examples(25)
@given(stacks(), st.randoms())
def test_composed_stack_is_the_sum_of_its_layers_in_any_order(
    parts: list[tuple[Adapter, float]], random: object
) -> None:
    expected = {n: np.zeros((2, o, i)) for n, (i, o) in ARCHITECTURE.projections.items()}
    for adapter, weight in parts:
        for name, delta in deltas(adapter.weights, adapter.manifest.scaling * weight).items():
            expected[name] += delta
    shuffled = list(parts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for order in (parts, shuffled):
        composed = compose(order)
        found = deltas(concatenate(composed))
        for name, delta in expected.items():
            np.testing.assert_allclose(
                found.get(name, np.zeros_like(delta)), delta, rtol=1e-4, atol=1e-4
            )
        assert composed.rank == max(
            (pair.a.shape[1] for pair in concatenate(composed).values()), default=0
        )


def test_empty_stack_composes_to_nothing() -> None:
    composed = compose([])
    assert composed.rank == 0
    assert not concatenate(composed)


def test_layer_of_weight_zero_is_left_out() -> None:
    style, memory = make_adapter(1), make_adapter(2, rank=5)
    assert compose([(style, 1.0), (memory, 0.0)]).rank == 3
    assert compose([(memory, 0.0)]).rank == 0


def test_projection_has_only_the_ranks_of_the_layers_that_adapt_it() -> None:
    style, memory = make_adapter(1), make_adapter(2, targets=("mlp.down_proj",), rank=5)
    composed = compose([(style, 1.0), (memory, 1.0)])
    assert composed.rank == 8
    assert concatenate(composed)["mlp.down_proj"].a.shape == (2, 8, 16)
    assert concatenate(composed)["self_attn.q_proj"].a.shape == (2, 3, 8)


def test_composing_leaves_its_inputs_unchanged_and_returns_read_only_arrays() -> None:
    style = make_adapter(1)
    before = style.weights["mlp.down_proj"].b.copy()
    pair = concatenate(compose([(style, 0.5)]))["mlp.down_proj"]
    np.testing.assert_array_equal(style.weights["mlp.down_proj"].b, before)
    assert pair.a.dtype == pair.b.dtype == np.float32
    assert not pair.a.flags.writeable
    assert not pair.b.flags.writeable


def test_layers_of_different_bases_are_refused() -> None:
    with pytest.raises(AdapterError, match=r"cdcdcdcdcdcd.*abababababab"):
        compose([(make_adapter(1), 1.0), (make_adapter(2, base=OTHER_BASE), 1.0)])


def test_layers_of_different_sizes_are_refused() -> None:
    other = Architecture("llama", "model.layers", 3, ARCHITECTURE.projections)
    with pytest.raises(AdapterError):
        compose([(make_adapter(1), 1.0), (make_adapter(2, architecture=other), 1.0)])


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_non_finite_weight_is_refused(weight: float) -> None:
    with pytest.raises(AdapterError, match="weight"):
        concatenate(compose([(make_adapter(), weight)]))


def test_product_too_large_for_float32_is_refused() -> None:
    with pytest.raises(AdapterError):
        concatenate(compose([(make_adapter(), 1e300)]))
