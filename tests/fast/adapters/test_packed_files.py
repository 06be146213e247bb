"""The packed format: equal values back, equal bytes for equal adapters, and refusals at packing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from adapter_files import (
    ARCHITECTURE,
    BASE,
    OTHER_BASE,
    assert_equal,
    join_file,
    make_adapter,
    make_manifest,
    split_file,
)
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import load

from personalpeft.adapters.compose import in_half
from personalpeft.adapters.formats.packed import pack, unpack
from personalpeft.adapters.safe_io import read_file
from personalpeft.adapters.types import Adapter, LoRAWeights
from personalpeft.errors import AdapterError

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
WORDS = st.from_regex(r"[a-z_][a-z0-9_]{0,8}(\.[a-z_][a-z0-9_]{0,8}){0,2}", fullmatch=True)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def adapters(draw: st.DrawFn) -> Adapter:
    blocks, rank = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    names = draw(st.lists(WORDS, min_size=1, max_size=3, unique=True))
    pairs = {}
    for name in names:
        inputs, outputs = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        a = draw(arrays(np.float32, (blocks, rank, inputs), elements=FINITE))
        b = draw(arrays(np.float32, (blocks, outputs, rank), elements=FINITE))
        pairs[name] = LoRAWeights(a, b)
    manifest = make_manifest(
        rank=rank,
        targets=tuple(names),
        scaling=draw(st.floats(1e-6, 1e6)),
        recipe=draw(st.dictionaries(st.text(), JSON, max_size=3)),
        layer=draw(st.sampled_from(["style", "memory", "skill.email"])),
        parent=draw(st.none() | st.just("style@0123456789ab")),
    )
    return Adapter(manifest, pairs)


@examples(25)
@given(adapters())
def test_packed_adapter_is_read_back_equal(adapter: Adapter) -> None:
    data = pack(adapter)
    again = unpack(data, source="test")
    assert_equal(again, adapter)
    assert pack(again) == data


@examples(15)
@given(adapters(), st.sampled_from(["F16", "BF16"]))
def test_half_width_files_are_read_as_their_exact_values(adapter: Adapter, dtype: str) -> None:
    small = {
        n: LoRAWeights(np.clip(p.a, -9e3, 9e3), np.clip(p.b, -9e3, 9e3))
        for n, p in adapter.weights.items()
    }
    header, _ = split_file(pack(Adapter(adapter.manifest, small)))
    body = b""
    for name in [name for name in header if name != "__metadata__"]:
        projection, _, half = name.rpartition(".")
        values = getattr(small[projection], half.lower())
        if dtype == "F16":
            raw = values.astype("<f2").tobytes()
        else:
            raw = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype("<u2").tobytes()
        header[name].update(dtype=dtype, data_offsets=[len(body), len(body) + len(raw)])
        body += raw
    again = unpack(join_file(header, body), source="test")
    for name, pair in small.items():
        for before, after in ((pair.a, again.weights[name].a), (pair.b, again.weights[name].b)):
            assert after.dtype == (np.float16 if dtype == "F16" else np.float32)
            np.testing.assert_allclose(after, before, rtol=2**-7, atol=2**-24)


@examples(20)
@given(adapters())
def test_half_precision_adapter_is_read_back_equal_and_half_as_large(
    adapter: Adapter,
) -> None:
    half = Adapter(adapter.manifest, in_half(adapter.weights))
    again = unpack(pack(half), source="test")
    assert_equal(again, half)
    assert all(
        np.array_equal(after, before.astype(np.float16))
        for name, pair in adapter.weights.items()
        for before, after in ((pair.a, again.weights[name].a), (pair.b, again.weights[name].b))
        if np.abs(before).max() < 65504
    )


def test_values_beyond_half_precision_stay_in_float32() -> None:
    large = LoRAWeights(np.full((2, 1, 3), 1e5, np.float32), np.full((2, 4, 1), 0.5, np.float32))
    kept = in_half({"p": large})["p"]
    assert (kept.a.dtype, kept.b.dtype) == (np.float32, np.float16)
    np.testing.assert_array_equal(kept.a, large.a)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_half_precision_is_refused(bad: float) -> None:
    adapter = make_adapter()
    name = next(iter(adapter.weights))
    pair = in_half(adapter.weights)[name]
    spoiled = pair.b.copy()
    spoiled[0, 0, 0] = bad
    with pytest.raises(AdapterError):
        pack(Adapter(adapter.manifest, {**adapter.weights, name: LoRAWeights(pair.a, spoiled)}))


def test_equal_adapters_have_equal_bytes_in_any_construction_order() -> None:
    adapter = make_adapter()
    turned = Adapter(adapter.manifest, dict(reversed(adapter.weights.items())))
    fortran = Adapter(
        adapter.manifest,
        {
            n: LoRAWeights(np.asfortranarray(p.a), np.asfortranarray(p.b))
            for n, p in adapter.weights.items()
        },
    )
    assert pack(adapter) == pack(turned) == pack(fortran)


def test_packed_file_is_safetensors_with_one_tensor_per_projection_and_matrix() -> None:
    adapter = make_adapter()
    tensors = load(pack(adapter))
    assert set(tensors) == {f"{name}.{half}" for name in ARCHITECTURE.projections for half in "AB"}
    np.testing.assert_array_equal(
        tensors["self_attn.q_proj.A"], adapter.weights["self_attn.q_proj"].a
    )
    assert all(tensor.dtype == np.float32 for tensor in tensors.values())


def test_manifest_is_in_the_metadata_with_a_format_version() -> None:
    header, _ = split_file(pack(make_adapter()))
    about = json.loads(header["__metadata__"]["personalpeft"])
    assert about["format"] == 1
    assert about["manifest"]["base"] == BASE


def test_arrays_are_read_only() -> None:
    pair = unpack(pack(make_adapter()), source="test").weights["self_attn.q_proj"]
    with pytest.raises(ValueError, match="read-only"):
        pair.b[0, 0, 0] = 1.0


def test_file_is_read_for_its_architecture_and_base(tmp_path: Path) -> None:
    adapter = make_adapter()
    path = tmp_path / "style.adapter"
    path.write_bytes(pack(adapter))
    assert_equal(
        unpack(read_file(path), source=str(path), architecture=ARCHITECTURE, base=BASE), adapter
    )


def test_wrong_base_is_named_beside_the_expected_one() -> None:
    with pytest.raises(AdapterError, match=r"abababababab.*cdcdcdcdcdcd") as caught:
        unpack(pack(make_adapter()), source="test", base=OTHER_BASE)
    assert caught.value.hint


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_adapter_is_not_packed(value: float) -> None:
    adapter = make_adapter()
    adapter.weights["self_attn.q_proj"].b[0, 0, 0] = value
    with pytest.raises(AdapterError, match=r"self_attn\.q_proj\.B"):
        pack(adapter)


@pytest.mark.parametrize(
    "recipe",
    [
        {"rate": float("nan")},
        {"when": object()},
        {"name": "\ud800"},
        {"deep": json.loads("[" * 40 + "]" * 40)},
    ],
)
def test_recipe_that_cannot_be_read_back_is_not_packed(recipe: dict[str, object]) -> None:
    with pytest.raises(AdapterError):
        pack(make_adapter(recipe=recipe))


def test_recipe_of_the_greatest_depth_is_read_back() -> None:
    deepest = None
    for depth in range(1, 40):
        adapter = make_adapter(recipe={"deep": json.loads("[" * depth + "]" * depth)})
        try:
            data = pack(adapter)
        except AdapterError:
            break
        assert_equal(unpack(data, source="test"), adapter)
        deepest = depth
    assert deepest is not None


def test_adapter_that_contradicts_its_manifest_is_not_packed() -> None:
    adapter = make_adapter()
    with pytest.raises(AdapterError, match="rank 4"):
        pack(Adapter(make_manifest(rank=4), adapter.weights))
