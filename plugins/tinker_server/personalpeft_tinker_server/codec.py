"""Read the bodies of requests: JSON, and the protobuf of ``forward_backward`` since SDK 0.25."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from personalpeft.errors import InvalidInput
from personalpeft_tinker_server import models
from personalpeft_tinker_server.protobuf import (
    read_fields,
    read_varints,
    write_bytes,
    write_double,
    write_varint,
)

PROTOBUF = "application/x-protobuf"

Array: TypeAlias = npt.NDArray[Any]
M = TypeVar("M", bound=models.Wire)

# What reading malformed bytes raises.
_MALFORMED = (IndexError, KeyError, TypeError, ValueError, struct.error)
# What the SDK takes for a place without a log-prob.
_NO_LOGPROB = (0, -99999.0)
# Values of the enum DType.
_FLOAT32 = 1
_DTYPES: Mapping[int, np.dtype[Any]] = {
    _FLOAT32: np.dtype("<f4"),
    2: np.dtype("<i8"),
    3: np.dtype("<i4"),
}


@dataclass(frozen=True, slots=True)
class Datum:
    """The tokens that the model reads, and the inputs of the loss by name."""

    tokens: tuple[int, ...]
    inputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """One pass. ``seq_id`` orders the calls of a model."""

    model_id: str
    seq_id: int | None
    data: tuple[Datum, ...]
    loss_fn: str
    config: Mapping[str, float | str]
    forward_only: bool


def read(kind: type[M], body: bytes) -> M:
    """Return a request from JSON. Raises ``InvalidInput`` that names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "The body"
        raise InvalidInput(
            f"{place}: {first['msg']}.", hint="See the API of the tinker SDK."
        ) from None


def read_number(body: bytes, *, protobuf: bool) -> tuple[str, int] | None:
    """Return the run and the number of a call, from a body that may have mistakes elsewhere."""
    try:
        if protobuf:
            found: dict[Any, Any] = {}
            for number, value in read_fields(memoryview(body)):
                found[number] = value
                if {1, 2} <= found.keys():
                    break
            run, seq = _text(found[1]), found[2]
        else:
            fields = json.loads(body)
            run, seq = fields["model_id"], fields["seq_id"]
            # JSON may have half of a surrogate pair, which no text of a database can hold.
            str(run).encode()
    except (*_MALFORMED, RecursionError):
        return None
    is_number = isinstance(seq, int) and 0 <= seq <= models.MAX_SEQ
    return (run, seq) if isinstance(run, str) and is_number else None


def read_forward_backward(body: bytes, *, protobuf: bool, forward: bool) -> ForwardBackward:
    """Return a pass from JSON or protobuf.

    Args:
        body: The bytes.
        protobuf: Whether they are protobuf.
        forward: Whether the route asks for no gradients.

    Raises:
        InvalidInput: The body is malformed, or has other than tokens in it.
    """
    if protobuf:
        try:
            return _forward_backward(body)
        except InvalidInput:
            raise
        except _MALFORMED as error:
            raise InvalidInput(
                "The body is not a ForwardBackwardRequest of tinker_public.proto.",
                hint="Use an SDK from 0.25 to 0.38, or send JSON.",
            ) from error
    request = read(models.ForwardBackward, body)
    data = tuple(
        Datum(
            read_tokens(each.model_input),
            {name: read_tensor(tensor) for name, tensor in each.loss_fn_inputs.items()},
        )
        for each in request.input.data
    )
    config = request.input.loss_fn_config or {}
    return ForwardBackward(
        request.model_id, request.seq_id, data, request.input.loss_fn, config, forward
    )


def read_tokens(model_input: models.ModelInput) -> tuple[int, ...]:
    """Return the tokens of an input. Raises ``InvalidInput`` for images and audio."""
    for chunk in model_input.chunks:
        if chunk.type != "encoded_text":
            raise _not_text(chunk.type)
    return tuple(token for chunk in model_input.chunks for token in chunk.tokens)


def read_tensor(tensor: models.TensorData) -> Array:
    """Return a tensor, dense. Raises ``InvalidInput`` if its sizes or numbers do not fit."""
    try:
        # As infinity, a number that is too large would train on silently.
        with np.errstate(over="raise", invalid="raise"):
            values = np.asarray(tensor.data, np.float64).astype(np.dtype(tensor.dtype))
    except FloatingPointError:
        raise InvalidInput(
            f"A number of a tensor does not fit into {tensor.dtype}.",
            hint="Send smaller numbers.",
        ) from None
    crow, col = tensor.sparse_crow_indices, tensor.sparse_col_indices
    if crow is not None or col is not None:
        return _from_csr(values, crow or [], col or [], tensor.shape or [])
    return _reshape(values, tensor.shape)


def _reshape(values: Array, shape: Sequence[int] | None) -> Array:
    try:
        return values if shape is None else values.reshape(shape)
    except (OverflowError, ValueError):
        raise InvalidInput(
            f"A tensor of {values.size} numbers cannot have the shape {list(shape or ())}.",
            hint="Send as many numbers as the shape has.",
        ) from None


def _from_csr(
    values: Array, crow: Sequence[int], col: Sequence[int], shape: Sequence[int]
) -> Array:
    if len(shape) != 2 or len(crow) != shape[0] + 1 or len(col) != len(values):
        raise InvalidInput(
            "A sparse tensor needs a shape of two sizes and matching indices.",
            hint="Send it as the SDK's TensorData.from_torch_sparse does.",
        )
    if shape[0] * shape[1] > 2**26 or any(not 0 <= column < shape[1] for column in col):
        raise InvalidInput("A sparse tensor's indices exceed its shape.", hint="Check its shape.")
    if crow[0] != 0 or crow[-1] != len(values) or any(a > b for a, b in pairwise(crow)):
        raise InvalidInput(
            "A sparse tensor's sparse_crow_indices must rise from 0 to its number of values.",
            hint="Send it as the SDK's TensorData.from_torch_sparse does.",
        )
    dense = np.zeros(shape, values.dtype)
    rows = np.repeat(np.arange(shape[0]), np.diff(crow))
    dense[rows, list(col)] = values
    return dense


def _not_text(kind: str) -> InvalidInput:
    return InvalidInput(
        f"An input has a chunk of the type {kind[:40]!a}; this base reads text alone.",
        hint="Send tokens.",
    )


def _text(data: memoryview) -> str:
    if not isinstance(data, memoryview):
        raise TypeError("a field of text has another type")
    return bytes(data).decode()


def _forward_backward(body: bytes) -> ForwardBackward:
    model_id = loss_fn = ""
    seq_id: int | None = None
    data: list[Datum] = []
    numbers: dict[str, float | str] = {}
    values: dict[str, float | str] = {}
    forward_only = False
    for number, value in read_fields(memoryview(body)):
        if number == 1:
            model_id = _text(value)
        elif number == 2:
            if not 0 <= value <= models.MAX_SEQ:
                raise ValueError("a number is too large")
            seq_id = value or None
        elif number == 3:
            data.append(_datum(value))
        elif number == 4:
            loss_fn = _text(value)
        elif number == 5:
            entry = dict(read_fields(value))
            numbers[_text(entry[1])] = entry.get(2, 0.0)
        elif number == 6:
            forward_only = bool(value)
        elif number == 7:
            entry = dict(read_fields(value))
            option = dict(read_fields(entry[2]))
            values[_text(entry[1])] = _text(option[2]) if 2 in option else option.get(1, 0.0)
    return ForwardBackward(model_id, seq_id, tuple(data), loss_fn, values or numbers, forward_only)


def _datum(data: memoryview) -> Datum:
    tokens: list[int] = []
    inputs = {}
    for number, value in read_fields(data):
        if number == 1:
            for kind, chunk in read_fields(value):
                if kind != 1:
                    raise _not_text({2: "image", 3: "dmel"}.get(kind, "unknown"))
                for field, packed in read_fields(chunk):
                    if field == 1:
                        tokens += np.frombuffer(packed, "<i4").tolist()
        elif number == 2:
            entry = dict(read_fields(value))
            inputs[_text(entry[1])] = _tensor(entry[2])
    return Datum(tuple(tokens), inputs)


def _tensor(data: memoryview) -> Array:
    dense: memoryview | None = None
    sparse: dict[int, Any] | None = None
    dtype, shape = 1, []
    for number, value in read_fields(data):
        if number == 1:
            dense = value
        elif number == 2:
            sparse = dict(read_fields(value))
        elif number == 3:
            dtype = value
        elif number == 4:
            shape += [value] if isinstance(value, int) else list(read_varints(value))
    kind: np.dtype[Any] = _DTYPES[dtype]
    if sparse is not None:
        crow, col = (np.frombuffer(sparse.get(n, b""), "<i8").tolist() for n in (2, 3))
        return _from_csr(np.frombuffer(sparse.get(1, b""), kind), crow, col, shape)
    return _reshape(np.frombuffer(dense or b"", kind), shape or None)


def write_protobuf(result: bytes, *, json_allowed: bool) -> bytes | None:
    """Return a result as the protobuf message that it has, None if it has none.

    Args:
        result: The JSON of a ``ForwardBackwardOutput`` or ``SampleResponse``.
        json_allowed: Whether the client reads JSON, too. Such an SDK reads tensors of different
            shapes as if they were of one shape, so they have no message.
    """
    fields = json.loads(result)
    if "loss_fn_outputs" in fields:
        output = models.ForwardBackwardOutput.model_validate(fields)
        shapes = [_trailing_shapes(each) for each in output.loss_fn_outputs]
        if json_allowed and any(shape != shapes[0] for shape in shapes):
            return None
        return _forward_backward_output(output)
    if "sequences" in fields:
        return _sample_response(models.SampleResponse.model_validate(fields))
    return None


def _trailing_shapes(output: Mapping[str, models.Tensor]) -> dict[str, list[int]]:
    return {name: tensor.shape[1:] for name, tensor in output.items()}


def _forward_backward_output(output: models.ForwardBackwardOutput) -> bytes:
    message = write_bytes(1, output.loss_fn_output_type.encode())
    # Tensors of one record differ in their first size alone.
    for _, same in groupby(output.loss_fn_outputs, key=_trailing_shapes):
        message += write_bytes(2, _array_record(list(same)))
    for name, value in output.metrics.items():
        message += write_bytes(3, write_bytes(1, name.encode()) + write_double(2, value))
    return message


def _array_record(outputs: Sequence[Mapping[str, models.Tensor]]) -> bytes:
    record = write_varint(3, len(outputs))
    for name, first in sorted(outputs[0].items()):
        arrays = [np.asarray(each[name].data, "<f4") for each in outputs]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
        batched = (
            write_bytes(1, b"".join(array.tobytes() for array in arrays))
            + write_bytes(2, offsets.tobytes())
            + write_varint(3, _FLOAT32)
        )
        for size in first.shape[1:]:
            batched += write_varint(4, size)
        record += write_bytes(2, write_bytes(1, name.encode()) + write_bytes(2, batched))
    return record


def _top_logprobs(rows: Sequence[Sequence[tuple[int, float]] | None]) -> bytes:
    """Return rows of one length; one of None has the values that the SDK takes for None."""
    count = max((len(row) for row in rows if row), default=0)
    filled = [row or [_NO_LOGPROB] * count for row in rows]
    tokens = np.asarray([[token for token, _ in row] for row in filled], "<i4")
    logprobs = np.asarray([[logprob for _, logprob in row] for row in filled], "<f4")
    return (
        write_bytes(1, tokens.tobytes())
        + write_bytes(2, logprobs.tobytes())
        + write_varint(3, count)
        + write_varint(4, len(rows))
    )


def _sample_response(response: models.SampleResponse) -> bytes:
    message = b""
    for sequence in response.sequences:
        message += write_bytes(
            1,
            write_varint(1, int(sequence.stop_reason == "length"))
            + write_bytes(2, np.asarray(sequence.tokens, "<i4").tobytes())
            + write_bytes(3, np.asarray(sequence.logprobs, "<f4").tobytes()),
        )
    if response.prompt_logprobs is not None:
        values = [math.nan if each is None else each for each in response.prompt_logprobs]
        message += write_bytes(2, np.asarray(values, "<f4").tobytes())
    if response.topk_prompt_logprobs is not None:
        message += write_bytes(3, _top_logprobs(response.topk_prompt_logprobs))
    return message
