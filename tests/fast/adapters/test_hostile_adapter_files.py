"""Any bytes give an adapter or an ``AdapterError`` that names the file and the fault."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import ARCHITECTURE, join_file, make_adapter, split_file
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.adapters.formats.packed import pack, unpack
from personalpeft.adapters.safe_io import read_file
from personalpeft.errors import AdapterError
from personalpeft.types import Architecture

GOOD = pack(make_adapter())
HEADER, BODY = split_file(GOOD)
FIRST, SECOND = "mlp.down_proj.A", "mlp.down_proj.B"


def refused(data: bytes, **expected: Any) -> None:
    with pytest.raises(AdapterError) as caught:
        unpack(data, source="hostile.adapter", **expected)
    assert str(caught.value).startswith("hostile.adapter: ")
    assert caught.value.hint


def changed(change: Callable[[dict[str, Any]], object], body: bytes = BODY) -> bytes:
    """The good file with its header changed."""
    header = json.loads(json.dumps(HEADER))
    change(header)
    return join_file(header, body)


def entry(name: str, **fields: Any) -> bytes:
    return changed(lambda header: header[name].update(fields))


def manifest(**fields: Any) -> bytes:
    """The good file with fields of its manifest changed; ... removes one."""
    about = json.loads(HEADER["__metadata__"]["personalpeft"])
    about["manifest"].update(fields)
    about["manifest"] = {key: value for key, value in about["manifest"].items() if value is not ...}
    return envelope(json.dumps(about))


def envelope(text: str) -> bytes:
    return changed(lambda header: header.update(__metadata__={"personalpeft": text}))


def renamed(old: str, new: str) -> bytes:
    return join_file(json.dumps(HEADER).replace(f'"{old}"', json.dumps(new)), BODY)


def test_good_file_of_these_tests_is_valid() -> None:
    unpack(changed(lambda header: None), source="good", architecture=ARCHITECTURE)


# The frame


@pytest.mark.parametrize("length", [0, 1, 7])
def test_file_that_is_too_short_is_refused(length: int) -> None:
    refused(GOOD[:length])


@pytest.mark.parametrize("length", [2**20 + 1, 2**63, 2**64 - 1])
def test_header_longer_than_the_limit_is_refused(length: int) -> None:
    refused(length.to_bytes(8, "little") + GOOD[8:])


def test_header_longer_than_the_file_is_refused() -> None:
    refused((2**19).to_bytes(8, "little") + b"{}")


def test_header_length_allocates_nothing() -> None:
    tracemalloc.start()
    try:
        refused((2**62).to_bytes(8, "little") + b"{}")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_shape_allocates_nothing() -> None:
    tracemalloc.start()
    try:
        refused(entry(FIRST, shape=[2**20, 2**10, 2**10], data_offsets=[0, 2**42]))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("header", [b"\xff\xfe{}", b'{"\xc3\x28": 1}'])
def test_header_that_is_not_utf8_is_refused(header: bytes) -> None:
    refused(join_file(header, b""))


@pytest.mark.parametrize("header", ["", "{", "nonsense", "{'a': 1}", "{} {}", '{"a": 0x10}'])
def test_header_that_is_not_json_is_refused(header: str) -> None:
    refused(join_file(header, b""))


@pytest.mark.parametrize("header", ["[]", "null", "3", '"text"'])
def test_header_that_is_no_object_is_refused(header: str) -> None:
    refused(join_file(header, b""))


def test_endlessly_nested_header_is_refused() -> None:
    refused(join_file('{"a": ' + "[" * 500_000, b""))
    refused(join_file('{"a": ' + "[" * 100 + "]" * 100 + "}", b""))


def test_number_of_very_many_digits_is_refused() -> None:
    refused(join_file('{"a": ' + "9" * 100_000 + "}", b""))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_non_json_numbers_are_refused(number: str) -> None:
    refused(join_file(f'{{"a": {number}}}', b""))


def test_duplicate_key_is_refused() -> None:
    text = json.dumps(HEADER)
    refused(
        join_file(text[:-1] + f', "{FIRST}": {json.dumps(HEADER[FIRST])}}}', BODY),
    )


def test_file_without_tensors_is_refused() -> None:
    refused(join_file({"__metadata__": HEADER["__metadata__"]}, b""))


def test_lone_surrogate_is_refused() -> None:
    refused(join_file('{"\\ud800": 1}', b""))


# The entries


def test_unknown_key_in_an_entry_is_refused() -> None:
    refused(entry(FIRST, more=1))


def test_missing_key_in_an_entry_is_refused() -> None:
    refused(changed(lambda header: header[FIRST].pop("shape")))


def test_entry_that_is_no_object_is_refused() -> None:
    refused(changed(lambda header: header.update({FIRST: [1]})))


@pytest.mark.parametrize("dtype", ["F64", "I32", "BOOL", "F8_E4M3", "f32", "", None, ["F32"]])
def test_other_dtypes_are_refused(dtype: object) -> None:
    refused(entry(FIRST, dtype=dtype))


@pytest.mark.parametrize(
    "shape", [[], [2, -3, 16], [2.0, 3, 16], [True, 96], ["2", 48], "96", None, [1] * 9, {}]
)
def test_invalid_shapes_are_refused(shape: object) -> None:
    refused(entry(FIRST, shape=shape))


def test_shape_that_overflows_a_machine_word_is_refused() -> None:
    refused(entry(FIRST, shape=[2**32, 2**32, 384]))


def test_empty_tensor_is_refused() -> None:
    refused(entry(FIRST, shape=[2, 0, 16], data_offsets=[0, 0]))


def test_size_that_does_not_match_the_shape_is_refused() -> None:
    refused(entry(FIRST, shape=[2, 3, 15]))
    refused(entry(FIRST, dtype="F16"))


@pytest.mark.parametrize(
    "offsets", [[-4, 380], [0.0, 384], [0], [0, 384, 384], None, ["0", "384"], [False, 384]]
)
def test_invalid_offsets_are_refused(offsets: object) -> None:
    refused(entry(FIRST, data_offsets=offsets))


def test_reversed_offsets_are_refused() -> None:
    refused(entry(FIRST, data_offsets=[384, 0]))


def test_overlapping_tensors_are_refused() -> None:
    begin, end = HEADER[SECOND]["data_offsets"]
    refused(entry(SECOND, data_offsets=[begin - 4, end - 4]))


def test_gap_between_tensors_is_refused() -> None:
    begin, end = HEADER[SECOND]["data_offsets"]
    refused(entry(SECOND, data_offsets=[begin + 4, end + 4]))


def test_tensor_beyond_the_end_is_refused() -> None:
    refused(join_file(HEADER, BODY[:-1]))


def test_bytes_after_the_last_tensor_are_refused() -> None:
    refused(join_file(HEADER, BODY + b"\0"))


def test_header_order_does_not_matter() -> None:
    adapter = unpack(join_file(dict(reversed(HEADER.items())), BODY), source="reordered")
    assert pack(adapter) == GOOD


@pytest.mark.parametrize(
    "name", ["../../x.A", "/etc/x.A", "a..A", ".A", "a b.A", "ä.A", "a\n.A", "x" * 300 + ".A", ""]
)
def test_invalid_tensor_names_are_refused(name: str) -> None:
    refused(renamed(FIRST, name))


# The adapter


@pytest.mark.parametrize("name", ["A", "mlp.down_proj", "mlp.down_proj.C", "mlp.down_proj.a"])
def test_names_of_neither_matrix_are_refused(name: str) -> None:
    refused(renamed(FIRST, name))


def test_matrix_without_its_counterpart_is_refused() -> None:
    refused(renamed(FIRST, "mlp.up_proj.A"))


def test_name_that_begins_with_a_digit_is_refused() -> None:
    text = json.dumps(HEADER).replace("mlp.down_proj.", "0mlp.down_proj.")
    refused(join_file(text, BODY))


def test_matrices_of_different_ranks_are_refused() -> None:
    refused(entry(SECOND, shape=[2, 4, 6]))


def test_matrices_of_different_layer_counts_are_refused() -> None:
    refused(entry(FIRST, shape=[1, 3, 32]))


def test_projections_of_different_ranks_are_refused() -> None:
    def change(header: dict[str, Any]) -> None:
        header[FIRST]["shape"], header[SECOND]["shape"] = [2, 6, 8], [2, 4, 6]

    refused(changed(change))


def test_projections_of_different_layer_counts_are_refused() -> None:
    def change(header: dict[str, Any]) -> None:
        header[FIRST]["shape"], header[SECOND]["shape"] = [1, 3, 32], [1, 16, 3]

    refused(changed(change))


def test_tensor_of_other_dimensions_is_refused() -> None:
    refused(entry(FIRST, shape=[96]))


def test_rank_beyond_the_limit_is_refused() -> None:
    header: dict[str, Any] = {"__metadata__": HEADER["__metadata__"]}
    header["x.A"] = {"dtype": "F32", "shape": [1, 2000, 1], "data_offsets": [0, 8000]}
    header["x.B"] = {"dtype": "F32", "shape": [1, 1, 2000], "data_offsets": [8000, 16000]}
    refused(join_file(header, bytes(16000)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_refused(value: float) -> None:
    refused(
        join_file(HEADER, BODY[:-4] + np.float32(value).tobytes()),
    )


# The manifest


def test_missing_manifest_is_refused() -> None:
    refused(changed(lambda header: header.pop("__metadata__")))


@pytest.mark.parametrize("metadata", [[], "text", None, {"personalpeft": 3}, {"personalpeft": {}}])
def test_metadata_that_is_no_object_of_strings_is_refused(metadata: object) -> None:
    refused(changed(lambda header: header.update(__metadata__=metadata)))


def test_foreign_metadata_is_refused() -> None:
    refused(changed(lambda header: header["__metadata__"].update(format="pt")))


@pytest.mark.parametrize("text", ["", "{", "[]", "NaN", '{"format": 1, "format": 1}', "[" * 1000])
def test_manifest_that_is_no_json_object_is_refused(text: str) -> None:
    refused(envelope(text))


def test_newer_format_is_named_as_newer() -> None:
    refused(envelope('{"format": 2, "something": "else"}'))


@pytest.mark.parametrize("version", ["0", "-1", "true", "1.0", '"1"', "null"])
def test_unknown_formats_are_refused(version: str) -> None:
    refused(envelope(f'{{"format": {version}, "manifest": {{}}}}'))


def test_unknown_keys_beside_the_manifest_are_refused() -> None:
    refused(envelope('{"format": 1, "manifest": {}, "more": 1}'))


@pytest.mark.parametrize(
    "field", ["base", "layer", "rank", "scaling", "targets", "recipe", "signals", "below", "parent"]
)
def test_manifest_without_a_field_is_refused(field: str) -> None:
    refused(manifest(**{field: ...}))


def test_manifest_with_an_extra_field_is_refused() -> None:
    refused(manifest(more=1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base", 3),
        ("base", ""),
        ("base", "x" * 300),
        ("base", "a\nb"),
        ("layer", "../style"),
        ("layer", None),
        ("rank", 0),
        ("rank", -1),
        ("rank", 3.0),
        ("rank", True),
        ("rank", 10**6),
        ("scaling", "2"),
        ("scaling", 0),
        ("scaling", -1.0),
        ("scaling", 1e300),
        ("scaling", True),
        ("targets", "self_attn.q_proj"),
        ("targets", [1]),
        ("targets", ["mlp.down_proj", "mlp.down_proj"]),
        ("recipe", []),
        ("recipe", None),
        ("signals", None),
        ("below", "style"),
        ("below", [None]),
        ("parent", 3),
    ],
)
def test_manifest_fields_of_the_wrong_type_are_refused(field: str, value: object) -> None:
    refused(manifest(**{field: value}))


def test_manifest_of_another_rank_is_refused() -> None:
    refused(manifest(rank=4))


@pytest.mark.parametrize(
    "targets", [[], ["mlp.down_proj"], ["mlp.down_proj", "self_attn.k_proj", "self_attn.v_proj"]]
)
def test_manifest_of_other_targets_is_refused(targets: list[str]) -> None:
    refused(manifest(targets=targets))


# The base


def other_architecture(blocks: int = 2, **projections: tuple[int, int]) -> Architecture:
    return Architecture(
        "llama", "model.layers", blocks, {**ARCHITECTURE.projections, **projections}
    )


def test_target_that_the_base_lacks_is_refused() -> None:
    missing = {
        name: sizes for name, sizes in ARCHITECTURE.projections.items() if name != "mlp.down_proj"
    }
    refused(
        GOOD,
        architecture=Architecture("llama", "model.layers", 2, missing),
    )


@pytest.mark.parametrize("sizes", [(16, 9), (15, 8), (8, 16)])
def test_sizes_that_differ_from_the_base_are_refused(sizes: tuple[int, int]) -> None:
    refused(GOOD, architecture=other_architecture(**{"mlp.down_proj": sizes}))


def test_layer_count_that_differs_from_the_base_is_refused() -> None:
    refused(GOOD, architecture=other_architecture(blocks=3))


# The file system


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError):
        read_file(tmp_path / "missing")


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError):
        read_file(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are a POSIX thing")
@pytest.mark.timeout(10)
def test_named_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(AdapterError):
        read_file(tmp_path / "pipe")


# Any change of any byte


def assert_adapter_or_refusal(data: bytes) -> None:
    try:
        adapter = unpack(data, source="fuzzed", architecture=ARCHITECTURE)
    except AdapterError:
        return
    assert set(adapter.weights) == set(ARCHITECTURE.projections)
    for name, (inputs, outputs) in ARCHITECTURE.projections.items():
        pair = adapter.weights[name]
        assert pair.a.shape == (2, 3, inputs)
        assert pair.b.shape == (2, outputs, 3)
        assert np.isfinite(pair.a).all()
        assert np.isfinite(pair.b).all()


@examples(150, deadline=2000)
@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_changed_bytes_give_an_adapter_or_an_error(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for position, value in changes:
        data[position] = value
    assert_adapter_or_refusal(bytes(data))


@examples(150, deadline=2000)
@given(
    st.integers(0, len(GOOD) - len(BODY) - 1), st.sampled_from(b'0123456789-.eE"{}[],: \\u\0\xff')
)
def test_changed_characters_of_the_header_give_an_adapter_or_an_error(
    position: int, character: int
) -> None:
    assert_adapter_or_refusal(GOOD[:position] + bytes([character]) + GOOD[position + 1 :])


@examples(80, deadline=2000)
@given(st.integers(0, len(GOOD)), st.integers(0, 64), st.integers(0, 3))
def test_cut_and_doubled_bytes_give_an_adapter_or_an_error(
    position: int, length: int, copies: int
) -> None:
    assert_adapter_or_refusal(
        GOOD[:position] + GOOD[position : position + length] * copies + GOOD[position + length :]
    )
    assert_adapter_or_refusal(GOOD[:position])


@examples(80, deadline=2000)
@given(st.binary(max_size=200))
def test_any_header_gives_an_adapter_or_an_error(header: bytes) -> None:
    assert_adapter_or_refusal(join_file(header, BODY))
