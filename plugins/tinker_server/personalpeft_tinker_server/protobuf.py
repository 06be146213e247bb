"""The wire format of protobuf (protobuf.dev/programming-guides/encoding), read and written.

The few messages that are used here need no generated code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any


def read_fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a message: an int, a float or bytes."""
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = read_varint(data, at)
            yield number, value
        elif kind == 1:
            yield number, struct.unpack_from("<d", data, at)[0]
            at += 8
        elif kind == 2:
            size, at = read_varint(data, at)
            if at + size > len(data):
                raise ValueError("truncated")
            yield number, data[at : at + size]
            at += size
        elif kind == 5:
            yield number, struct.unpack_from("<f", data, at)[0]
            at += 4
        else:
            raise ValueError("unknown wire type")


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the number that begins at a position, and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a varint is too long")


def read_varints(data: memoryview) -> Iterator[int]:
    """Yield the values of a packed field."""
    at = 0
    while at < len(data):
        value, at = read_varint(data, at)
        yield value


def write_varint(number: int, value: int) -> bytes:
    """Return a field of a whole number that is not negative."""
    return _encode_varint(number << 3) + _encode_varint(value)


def write_double(number: int, value: float) -> bytes:
    """Return a field of a double."""
    return _encode_varint(number << 3 | 1) + struct.pack("<d", value)


def write_bytes(number: int, value: bytes) -> bytes:
    """Return a field of bytes, text in UTF-8 or a message."""
    return _encode_varint(number << 3 | 2) + _encode_varint(len(value)) + value


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
