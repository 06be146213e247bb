"""Whatever the bytes are, reading them gives an adapter or an ``AdapterError`` that names the file and the fault."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import ARCHITECTURE, make_adapter, put_together, take_apart
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.adapters.formats.packed import pack, unpack
from personalpeft.adapters.safe_io import read_file
from personalpeft.errors import AdapterError
from personalpeft.types import Architecture

GOOD = pack(make_adapter())
HEADER, BODY = take_apart(GOOD)
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
    return put_together(header, body)


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
    return put_together(json.dumps(HEADER).replace(f'"{old}"', json.dumps(new)), BODY)


def test_the_file_these_tests_spoil_is_well() -> None:
    unpack(changed(lambda header: None), source="good", architecture=ARCHITECTURE)


# The frame


@pytest.mark.parametrize("length", [0, 1, 7])
def test_too_short(length: int) -> None:
    refused(GOOD[:length])


@pytest.mark.parametrize("length", [2**20 + 1, 2**63, 2**64 - 1])
def test_a_header_longer_than_any_real_one(length: int) -> None:
    refused(length.to_bytes(8, "little") + GOOD[8:])


def test_a_header_longer_than_the_file() -> None:
    refused((2**19).to_bytes(8, "little") + b"{}")


def test_a_header_length_allocates_nothing() -> None:
    tracemalloc.start()
    try:
        refused((2**62).to_bytes(8, "little") + b"{}")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_shape_allocates_nothing() -> None:
    tracemalloc.start()
    try:
        refused(entry(FIRST, shape=[2**20, 2**10, 2**10], data_offsets=[0, 2**42]))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("header", [b"\xff\xfe{}", b'{"\xc3\x28": 1}'])
def test_a_header_that_is_not_utf8(header: bytes) -> None:
    refused(put_together(header, b""))


@pytest.mark.parametrize("header", ["", "{", "nonsense", "{'a': 1}", "{} {}", '{"a": 0x10}'])
def test_a_header_that_is_not_json(header: str) -> None:
    refused(put_together(header, b""))


@pytest.mark.parametrize("header", ["[]", "null", "3", '"text"'])
def test_a_header_that_is_no_object(header: str) -> None:
    refused(put_together(header, b""))


def test_a_header_nested_without_end() -> None:
    refused(put_together('{"a": ' + "[" * 500_000, b""))
    refused(put_together('{"a": ' + "[" * 100 + "]" * 100 + "}", b""))


def test_a_number_of_very_many_digits() -> None:
    refused(put_together('{"a": ' + "9" * 100_000 + "}", b""))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have(number: str) -> None:
    refused(put_together(f'{{"a": {number}}}', b""))


def test_a_key_twice() -> None:
    text = json.dumps(HEADER)
    refused(
        put_together(text[:-1] + f', "{FIRST}": {json.dumps(HEADER[FIRST])}}}', BODY),
    )


def test_no_tensors() -> None:
    refused(put_together({"__metadata__": HEADER["__metadata__"]}, b""))


def test_a_lone_surrogate() -> None:
    refused(put_together('{"\\ud800": 1}', b""))


# The entries


def test_an_unknown_key_in_an_entry() -> None:
    refused(entry(FIRST, more=1))


def test_a_missing_key_in_an_entry() -> None:
    refused(changed(lambda header: header[FIRST].pop("shape")))


def test_an_entry_that_is_no_object() -> None:
    refused(changed(lambda header: header.update({FIRST: [1]})))


@pytest.mark.parametrize("dtype", ["F64", "I32", "BOOL", "F8_E4M3", "f32", "", None, ["F32"]])
def test_other_dtypes(dtype: object) -> None:
    refused(entry(FIRST, dtype=dtype))


@pytest.mark.parametrize(
    "shape", [[], [2, -3, 16], [2.0, 3, 16], [True, 96], ["2", 48], "96", None, [1] * 9, {}]
)
def test_shapes_that_are_none(shape: object) -> None:
    refused(entry(FIRST, shape=shape))


def test_a_shape_that_would_overflow_a_machine_word() -> None:
    refused(entry(FIRST, shape=[2**32, 2**32, 384]))


def test_an_empty_tensor() -> None:
    refused(entry(FIRST, shape=[2, 0, 16], data_offsets=[0, 0]))


def test_a_size_that_the_shape_does_not_fill() -> None:
    refused(entry(FIRST, shape=[2, 3, 15]))
    refused(entry(FIRST, dtype="F16"))


@pytest.mark.parametrize(
    "offsets", [[-4, 380], [0.0, 384], [0], [0, 384, 384], None, ["0", "384"], [False, 384]]
)
def test_offsets_that_are_none(offsets: object) -> None:
    refused(entry(FIRST, data_offsets=offsets))


def test_offsets_turned_round() -> None:
    refused(entry(FIRST, data_offsets=[384, 0]))


def test_tensors_that_overlap() -> None:
    begin, end = HEADER[SECOND]["data_offsets"]
    refused(entry(SECOND, data_offsets=[begin - 4, end - 4]))


def test_a_gap_between_tensors() -> None:
    begin, end = HEADER[SECOND]["data_offsets"]
    refused(entry(SECOND, data_offsets=[begin + 4, end + 4]))


def test_a_tensor_beyond_the_end() -> None:
    refused(put_together(HEADER, BODY[:-1]))


def test_bytes_after_the_last_tensor() -> None:
    refused(put_together(HEADER, BODY + b"\0"))


def test_the_order_of_the_header_does_not_matter() -> None:
    adapter = unpack(put_together(dict(reversed(HEADER.items())), BODY), source="reordered")
    assert pack(adapter) == GOOD


@pytest.mark.parametrize(
    "name", ["../../x.A", "/etc/x.A", "a..A", ".A", "a b.A", "ä.A", "a\n.A", "x" * 300 + ".A", ""]
)
def test_names_outside_the_grammar(name: str) -> None:
    refused(renamed(FIRST, name))


# The adapter


@pytest.mark.parametrize("name", ["A", "mlp.down_proj", "mlp.down_proj.C", "mlp.down_proj.a"])
def test_names_that_are_no_half(name: str) -> None:
    refused(renamed(FIRST, name))


def test_half_a_pair() -> None:
    refused(renamed(FIRST, "mlp.up_proj.A"))


def test_a_name_that_begins_with_a_digit() -> None:
    text = json.dumps(HEADER).replace("mlp.down_proj.", "0mlp.down_proj.")
    refused(put_together(text, BODY))


def test_halves_of_different_ranks() -> None:
    refused(entry(SECOND, shape=[2, 4, 6]))


def test_halves_of_different_blocks() -> None:
    refused(entry(FIRST, shape=[1, 3, 32]))


def test_projections_of_different_ranks() -> None:
    def change(header: dict[str, Any]) -> None:
        header[FIRST]["shape"], header[SECOND]["shape"] = [2, 6, 8], [2, 4, 6]

    refused(changed(change))


def test_projections_of_different_blocks() -> None:
    def change(header: dict[str, Any]) -> None:
        header[FIRST]["shape"], header[SECOND]["shape"] = [1, 3, 32], [1, 16, 3]

    refused(changed(change))


def test_a_tensor_of_other_dimensions() -> None:
    refused(entry(FIRST, shape=[96]))


def test_a_rank_beyond_the_limit() -> None:
    header: dict[str, Any] = {"__metadata__": HEADER["__metadata__"]}
    header["x.A"] = {"dtype": "F32", "shape": [1, 2000, 1], "data_offsets": [0, 8000]}
    header["x.B"] = {"dtype": "F32", "shape": [1, 1, 2000], "data_offsets": [8000, 16000]}
    refused(put_together(header, bytes(16000)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(value: float) -> None:
    refused(
        put_together(HEADER, BODY[:-4] + np.float32(value).tobytes()),
    )


# The manifest


def test_no_manifest() -> None:
    refused(changed(lambda header: header.pop("__metadata__")))


@pytest.mark.parametrize("metadata", [[], "text", None, {"personalpeft": 3}, {"personalpeft": {}}])
def test_metadata_that_is_no_object_of_strings(metadata: object) -> None:
    refused(changed(lambda header: header.update(__metadata__=metadata)))


def test_metadata_of_somebody_else() -> None:
    refused(changed(lambda header: header["__metadata__"].update(format="pt")))


@pytest.mark.parametrize("text", ["", "{", "[]", "NaN", '{"format": 1, "format": 1}', "[" * 1000])
def test_a_manifest_that_is_no_json_object(text: str) -> None:
    refused(envelope(text))


def test_a_newer_format_is_called_newer() -> None:
    refused(envelope('{"format": 2, "something": "else"}'))


@pytest.mark.parametrize("version", ["0", "-1", "true", "1.0", '"1"', "null"])
def test_formats_that_never_were(version: str) -> None:
    refused(envelope(f'{{"format": {version}, "manifest": {{}}}}'))


def test_unknown_keys_beside_the_manifest() -> None:
    refused(envelope('{"format": 1, "manifest": {}, "more": 1}'))


@pytest.mark.parametrize(
    "field", ["base", "layer", "rank", "scaling", "targets", "recipe", "signals", "below", "parent"]
)
def test_a_manifest_that_lacks_a_field(field: str) -> None:
    refused(manifest(**{field: ...}))


def test_a_manifest_with_a_field_too_many() -> None:
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
def test_manifest_fields_of_the_wrong_kind(field: str, value: object) -> None:
    refused(manifest(**{field: value}))


def test_a_manifest_of_another_rank() -> None:
    refused(manifest(rank=4))


@pytest.mark.parametrize(
    "targets", [[], ["mlp.down_proj"], ["mlp.down_proj", "self_attn.k_proj", "self_attn.v_proj"]]
)
def test_a_manifest_of_other_targets(targets: list[str]) -> None:
    refused(manifest(targets=targets))


# The base


def other_architecture(blocks: int = 2, **projections: tuple[int, int]) -> Architecture:
    return Architecture(
        "llama", "model.layers", blocks, {**ARCHITECTURE.projections, **projections}
    )


def test_a_target_that_the_base_has_not() -> None:
    missing = {
        name: sizes for name, sizes in ARCHITECTURE.projections.items() if name != "mlp.down_proj"
    }
    refused(
        GOOD,
        architecture=Architecture("llama", "model.layers", 2, missing),
    )


@pytest.mark.parametrize("sizes", [(16, 9), (15, 8), (8, 16)])
def test_sizes_that_the_base_has_not(sizes: tuple[int, int]) -> None:
    refused(GOOD, architecture=other_architecture(**{"mlp.down_proj": sizes}))


def test_blocks_that_the_base_has_not() -> None:
    refused(GOOD, architecture=other_architecture(blocks=3))


# The file system


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AdapterError):
        read_file(tmp_path / "missing")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(AdapterError):
        read_file(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are a POSIX thing")
@pytest.mark.timeout(10)
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(AdapterError):
        read_file(tmp_path / "pipe")


# All of it at once


def assert_adapter_or_refusal(data: bytes) -> None:
    try:
        adapter = unpack(data, source="fuzzed", architecture=ARCHITECTURE)
    except AdapterError:
        return
    assert set(adapter.pairs) == set(ARCHITECTURE.projections)
    for name, (inputs, outputs) in ARCHITECTURE.projections.items():
        pair = adapter.pairs[name]
        assert pair.a.shape == (2, 3, inputs)
        assert pair.b.shape == (2, outputs, 3)
        assert np.isfinite(pair.a).all()
        assert np.isfinite(pair.b).all()


@examples(500, deadline=2000)
@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_changed_bytes(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for position, value in changes:
        data[position] = value
    assert_adapter_or_refusal(bytes(data))


@examples(500, deadline=2000)
@given(
    st.integers(0, len(GOOD) - len(BODY) - 1), st.sampled_from(b'0123456789-.eE"{}[],: \\u\0\xff')
)
def test_changed_characters_of_the_header(position: int, character: int) -> None:
    assert_adapter_or_refusal(GOOD[:position] + bytes([character]) + GOOD[position + 1 :])


@examples(200, deadline=2000)
@given(st.integers(0, len(GOOD)), st.integers(0, 64), st.integers(0, 3))
def test_cut_and_doubled_bytes(position: int, length: int, copies: int) -> None:
    assert_adapter_or_refusal(
        GOOD[:position] + GOOD[position : position + length] * copies + GOOD[position + length :]
    )
    assert_adapter_or_refusal(GOOD[:position])


@examples(200, deadline=2000)
@given(st.binary(max_size=200))
def test_any_header_at_all(header: bytes) -> None:
    assert_adapter_or_refusal(put_together(header, BODY))
