"""Requests and results in protobuf are the same as in JSON."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from tinker_makers import TEXT, TinkerServer, datum, passed

from personalpeft.errors import InvalidInput
from personalpeft_tinker_server import models
from personalpeft_tinker_server.codec import (
    PROTOBUF,
    read_forward_backward,
    read_number,
    read_tensor,
    write_protobuf,
)
from personalpeft_tinker_server.protobuf import read_fields, write_bytes, write_double, write_varint

# What tinker 0.38.0 sends for the pass of ``EXPECTED``.
RECORDED = bytes.fromhex(
    "0a1173657373696f6e2d313a747261696e3a3010ac021a6a0a0c0a0a0a0801000000020000000a080a06"
    "0a042c01000012300a0d7461726765745f746f6b656e73121f0a1802000000000000002c010000000000"
    "0007000000000000001802220103121e0a077765696768747312130a0c000000000000003f0000803f18"
    "01220103220370706f2a1d0a12636c69705f6c6f775f7468726573686f6c6411666666666666e63f3a1f"
    "0a12636c69705f6c6f775f7468726573686f6c64120909666666666666e63f"
)
EXPECTED = {
    "model_id": "session-1:train:0",
    "seq_id": 300,
    "forward_backward_input": {
        "data": [
            {
                "model_input": {"chunks": [{"tokens": [1, 2]}, {"tokens": [300]}]},
                "loss_fn_inputs": {
                    "target_tokens": {"data": [2, 300, 7], "dtype": "int64", "shape": [3]},
                    "weights": {"data": [0, 0.5, 1], "dtype": "float32", "shape": [3]},
                },
            }
        ],
        "loss_fn": "ppo",
        "loss_fn_config": {"clip_low_threshold": 0.7},
    },
}


def test_a_recorded_request_reads_as_its_json() -> None:
    ours = read_forward_backward(RECORDED, protobuf=True, forward=False)
    json_ = read_forward_backward(json.dumps(EXPECTED).encode(), protobuf=False, forward=False)
    for name in ("model_id", "seq_id", "loss_fn", "config", "forward_only"):
        assert getattr(ours, name) == getattr(json_, name)
    for a, b in zip(ours.data, json_.data, strict=True):
        assert a.tokens == b.tokens == (1, 2, 300)
        assert a.inputs.keys() == b.inputs.keys()
        for name, array in a.inputs.items():
            assert array.dtype == b.inputs[name].dtype
            np.testing.assert_array_equal(array, b.inputs[name])


@pytest.mark.parametrize("size", range(0, len(RECORDED), 7))
def test_a_truncated_request_is_refused(size: int) -> None:
    try:
        read_forward_backward(RECORDED[:size], protobuf=True, forward=False)
    except InvalidInput:
        return
    # A message may end after any whole field.
    assert sum(1 for _ in read_fields(memoryview(RECORDED[:size]))) < 6


def test_a_request_with_a_mistake_still_has_its_number() -> None:
    number = ("session-1:train:0", 300)
    for size in (25, len(RECORDED) - 1, len(RECORDED)):
        assert read_number(RECORDED[:size], protobuf=True) == number
    assert read_number(RECORDED[:10], protobuf=True) is None
    body = json.dumps({**EXPECTED, "forward_backward_input": float("nan")}).encode()
    assert read_number(body, protobuf=False) == number
    assert read_number(write_varint(1, 2**40) + write_varint(2, 3), protobuf=True) is None
    for text in (
        "",
        "[]",
        "3",
        "{}",
        '{"model_id": 3, "seq_id": 3}',
        '{"model_id": "x", "seq_id": -1}',
        "[" * 100_000,
        '{"model_id": "\\ud800", "seq_id": 1}',
    ):
        assert read_number(text.encode(), protobuf=False) is None


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 7])
def test_a_field_of_another_type_is_refused(number: int) -> None:
    body = RECORDED + write_varint(number, 2**64)
    with pytest.raises(InvalidInput, match="not a ForwardBackwardRequest"):
        read_forward_backward(body, protobuf=True, forward=False)


def test_images_are_refused() -> None:
    chunk = write_bytes(1, write_bytes(2, b"picture"))
    with pytest.raises(InvalidInput, match="image"):
        read_forward_backward(write_bytes(3, chunk), protobuf=True, forward=False)


def test_a_sparse_tensor_reads_as_the_dense_one() -> None:
    body = json.loads(json.dumps(EXPECTED))
    (sent,) = body["forward_backward_input"]["data"]
    sent["loss_fn_inputs"]["weights"] = {
        "data": [5, 6],
        "shape": [2, 3],
        "sparse_crow_indices": [0, 1, 2],
        "sparse_col_indices": [2, 0],
    }
    read = read_forward_backward(json.dumps(body).encode(), protobuf=False, forward=False)
    np.testing.assert_array_equal(read.data[0].inputs["weights"], [[0, 0, 5], [6, 0, 0]])


@pytest.mark.parametrize(
    "tensor",
    [
        {"data": [1.0], "shape": [2**70]},
        {"data": [1.0], "shape": [2, 2], "crow": [3, 0, 1], "col": [0]},
        {"data": [1.0], "shape": [1, 2], "crow": [0, 5], "col": [0]},
        {"data": [1.0], "shape": [1, 2], "crow": [1, 1], "col": [0]},
        {"data": [1.0], "shape": [1, 2], "crow": [0, 1], "col": [2]},
    ],
)
def test_a_tensor_whose_sizes_do_not_match_is_refused(tensor: dict[str, Any]) -> None:
    crow, col = tensor.pop("crow", None), tensor.pop("col", None)
    sent = models.TensorData(**tensor, sparse_crow_indices=crow, sparse_col_indices=col)
    with pytest.raises(InvalidInput, match="tensor"):
        read_tensor(sent)


@pytest.mark.parametrize(
    ("number", "dtype"), [(1e39, "float32"), (-1e300, "float32"), (1e300, "int64")]
)
def test_a_number_that_does_not_fit_its_tensor_is_refused(number: float, dtype: str) -> None:
    sent = models.TensorData.model_validate({"data": [number], "dtype": dtype})
    with pytest.raises(InvalidInput):
        read_tensor(sent)


def test_a_result_in_protobuf_is_that_in_json(server: TinkerServer) -> None:
    run = server.session().run()
    client = run.session.client
    request = run.submit(
        "forward_backward",
        forward_backward_input=passed([datum(TEXT), datum(TEXT[3:])], "cross_entropy"),
    )
    output = client.result(request)
    answer = client.ask(
        "POST", "retrieve_future", {"request_id": request}, headers={"Accept": PROTOBUF}
    )
    assert answer.mimetype == PROTOBUF
    fields = list(read_fields(memoryview(answer.data)))
    record = dict(read_fields(next(value for number, value in fields if number == 2)))
    metric = dict(read_fields(next(value for number, value in fields if number == 3)))
    entry = dict(read_fields(record[2]))
    batched = dict(read_fields(entry[2]))
    assert bytes(entry[1]) == b"logprobs"
    assert record[3] == 2
    values = np.frombuffer(batched[1], "<f4")
    offsets = np.frombuffer(batched[2], "<i8") // 4
    for index, own in enumerate(output["loss_fn_outputs"]):
        np.testing.assert_allclose(
            values[offsets[index] : offsets[index + 1]], own["logprobs"]["data"], rtol=1e-6
        )
    assert bytes(metric[1]) == b"loss:sum"
    assert metric[2] == output["metrics"]["loss:sum"]


def test_places_of_several_targets_keep_their_shape_in_protobuf() -> None:
    outputs = [
        {"logprobs": {"data": [float(n) for n in range(size)], "shape": shape}}
        for size, shape in ((6, [2, 3]), (3, [1, 3]), (2, [2]))
    ]

    fields = {"loss_fn_output_type": "x", "loss_fn_outputs": outputs, "metrics": {}}
    result = json.dumps(fields).encode()
    # The SDKs that also read JSON would read the last one in the shape of the first.
    assert write_protobuf(result, json_allowed=True) is None
    message = write_protobuf(result, json_allowed=False)
    records = [
        dict(read_fields(value))
        for number, value in read_fields(memoryview(message or b""))
        if number == 2
    ]
    assert [record[3] for record in records] == [2, 1]
    tensors = [dict(read_fields(dict(read_fields(record[2]))[2])) for record in records]
    assert [tensor.get(4) for tensor in tensors] == [3, None]
    assert np.frombuffer(tensors[0][1], "<f4").tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]


def test_top_log_probs_in_protobuf_are_two_matrices() -> None:
    rows = [None, [[5, -0.5], [6, -1.5]]]
    sample = {"sequences": [], "topk_prompt_logprobs": rows}
    (field,) = read_fields(
        memoryview(write_protobuf(json.dumps(sample).encode(), json_allowed=True) or b"")
    )
    top = dict(read_fields(field[1]))
    assert (field[0], top[3], top[4]) == (3, 2, 2)
    assert np.frombuffer(top[1], "<i4").tolist() == [0, 0, 5, 6]
    assert np.frombuffer(top[2], "<f4").tolist() == [-99999, -99999, -0.5, -1.5]


def test_results_keep_numbers_that_are_not_finite() -> None:
    values = [math.nan, math.inf, -math.inf, 0.5]
    output = models.ForwardBackwardOutput(
        loss_fn_outputs=[{"logprobs": models.Tensor(data=values, shape=[4])}],
        metrics={"loss:sum": math.nan},
    )
    sampled = models.SampledSequence(stop_reason="stop", tokens=[1] * 4, logprobs=values)
    sample = models.SampleResponse(sequences=[sampled], prompt_logprobs=[None, *values])
    expected = np.array(values, "<f4").tobytes()
    for result in (output, sample):
        text = result.model_dump_json()
        assert "NaN" in text
        message = write_protobuf(text.encode(), json_allowed=True)
        assert message is not None
        assert expected in message


def test_results_without_a_message_stay_json() -> None:
    assert write_protobuf(b'{"type": "optim_step", "metrics": {}}', json_allowed=True) is None


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**40])
def test_numbers_are_read_as_they_were_written(value: int) -> None:
    data = write_varint(3, value) + write_double(4, value / 8) + write_bytes(5, b"x" * 200)
    fields = list(read_fields(memoryview(data)))
    assert fields[:2] == [(3, value), (4, value / 8)]
    assert fields[2] == (5, b"x" * 200)
    assert list(read_fields(memoryview(b"\x0d" + struct.pack("<f", 0.5)))) == [(1, 0.5)]
