"""Read the bodies of requests: JSON, and the protobuf of ``forward_backward`` since SDK 0.25.

The protobuf reader knows the wire format (protobuf.dev/programming-guides/encoding) and the fields
that are used here, so no generated code is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from personalpeft.errors import InvalidInput
from personalpeft_tinker_server import models

PROTOBUF = "application/x-protobuf"

Array: TypeAlias = npt.NDArray[Any]
M = TypeVar("M", bound=models.Wire)

# The enum DType.
_DTYPES: Mapping[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}


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
        except (IndexError, KeyError, ValueError, struct.error) as error:
            raise InvalidInput(
                "The body is not a ForwardBackwardRequest of tinker_public.proto.",
                hint="Use an SDK from 0.25 to 0.38, or send JSON.",
            ) from error
    request = read(models.ForwardBackward, body)
    data = tuple(
        Datum(
            read_tokens(each.model_input),
            {name: _dense(tensor) for name, tensor in each.loss_fn_inputs.items()},
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


def _dense(tensor: models.TensorData) -> Array:
    values = np.asarray(tensor.data, np.float64).astype(np.dtype(tensor.dtype))
    crow, col = tensor.sparse_crow_indices, tensor.sparse_col_indices
    if crow is not None or col is not None:
        return _from_csr(values, crow or [], col or [], tensor.shape or [])
    return _reshape(values, tensor.shape)


def _reshape(values: Array, shape: Sequence[int] | None) -> Array:
    try:
        return values if shape is None else values.reshape(shape)
    except ValueError:
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
    if shape[0] * shape[1] > 2**26 or any(column >= shape[1] for column in col):
        raise InvalidInput("A sparse tensor's indices exceed its shape.", hint="Check its shape.")
    dense = np.zeros(shape, values.dtype)
    rows = np.repeat(np.arange(shape[0]), np.diff(crow))
    dense[rows, list(col)] = values
    return dense


def _not_text(kind: str) -> InvalidInput:
    return InvalidInput(
        f"An input has a chunk of the type {kind[:40]!a}; this base reads text alone.",
        hint="Send tokens.",
    )


# Protobuf


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a message: an int, a float or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
        elif kind == 1:
            yield number, struct.unpack_from("<d", data, at)[0]
            at += 8
        elif kind == 2:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError("truncated")
            yield number, data[at : at + size]
            at += size
        elif kind == 5:
            yield number, struct.unpack_from("<f", data, at)[0]
            at += 4
        else:
            raise ValueError("unknown wire type")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a varint is too long")


def _text(data: memoryview) -> str:
    return bytes(data).decode()


def _forward_backward(body: bytes) -> ForwardBackward:
    model_id = loss_fn = ""
    seq_id: int | None = None
    data: list[Datum] = []
    numbers: dict[str, float | str] = {}
    values: dict[str, float | str] = {}
    forward_only = False
    for number, value in _fields(memoryview(body)):
        if number == 1:
            model_id = _text(value)
        elif number == 2:
            seq_id = value or None
        elif number == 3:
            data.append(_datum(value))
        elif number == 4:
            loss_fn = _text(value)
        elif number == 5:
            entry = dict(_fields(value))
            numbers[_text(entry[1])] = entry.get(2, 0.0)
        elif number == 6:
            forward_only = bool(value)
        elif number == 7:
            entry = dict(_fields(value))
            option = dict(_fields(entry[2]))
            values[_text(entry[1])] = _text(option[2]) if 2 in option else option.get(1, 0.0)
    return ForwardBackward(model_id, seq_id, tuple(data), loss_fn, values or numbers, forward_only)


def _datum(data: memoryview) -> Datum:
    tokens: list[int] = []
    inputs = {}
    for number, value in _fields(data):
        if number == 1:
            for kind, chunk in _fields(value):
                if kind != 1:
                    raise _not_text({2: "image", 3: "dmel"}.get(kind, "unknown"))
                for field, packed in _fields(chunk):
                    if field == 1:
                        tokens += np.frombuffer(packed, "<i4").tolist()
        elif number == 2:
            entry = dict(_fields(value))
            inputs[_text(entry[1])] = _tensor(entry[2])
    return Datum(tuple(tokens), inputs)


def _tensor(data: memoryview) -> Array:
    dense: memoryview | None = None
    sparse: dict[int, Any] | None = None
    dtype, shape = 1, []
    for number, value in _fields(data):
        if number == 1:
            dense = value
        elif number == 2:
            sparse = dict(_fields(value))
        elif number == 3:
            dtype = value
        elif number == 4:
            shape += [value] if isinstance(value, int) else list(_varints(value))
    kind: np.dtype[Any] = _DTYPES[dtype]
    if sparse is not None:
        crow, col = (np.frombuffer(sparse.get(n, b""), "<i8").tolist() for n in (2, 3))
        return _from_csr(np.frombuffer(sparse.get(1, b""), kind), crow, col, shape)
    return _reshape(np.frombuffer(dense or b"", kind), shape or None)


def _varints(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value
