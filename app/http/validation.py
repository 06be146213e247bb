"""What came in a request: JSON read strictly, its fields checked and bounded, and what nobody asked for named.

Invariants: NaN, infinities and numbers too large to be floats are refused; a field that is not known is refused by name, so
that nobody believes that something was heeded; no message repeats a value that was sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Never, TypeAlias, TypeVar

from flask import request
from werkzeug.exceptions import BadRequest, UnsupportedMediaType

from personalpeft_app.http.error_responses import InvalidParameter

Body: TypeAlias = Mapping[str, Any]
T = TypeVar("T")

LARGEST = 4 * 2**20
"""Bytes of a body, where a route does not say otherwise."""
LARGEST_FILE = 256 * 2**20
"""Bytes of a body, where a route takes files."""
_LONGEST_NAME = 64
_FILES = "for_files"

View = TypeVar("View", bound=Callable[..., Any])


def for_files(view: View) -> View:
    """Mark a view whose body is a file and may be large."""
    setattr(view, _FILES, True)
    return view


def is_for_files(view: Callable[..., Any]) -> bool:
    """Return whether a view is marked by ``for_files``."""
    return hasattr(view, _FILES)


def read_object() -> Body:
    """The JSON object of this request. Raises ``BadRequest``, ``UnsupportedMediaType``."""
    if request.mimetype != "application/json":
        raise UnsupportedMediaType("Send JSON, with Content-Type: application/json.")
    try:
        found = json.loads(
            request.get_data().decode("utf-8"), parse_constant=_refuse, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise BadRequest("The body is not JSON that can be read.") from error
    if not isinstance(found, dict):
        raise BadRequest("The body is not a JSON object.")
    return found


def check_names(
    body: Body,
    *,
    known: Collection[str],
    ignored: Collection[str] = (),
    neutral: Mapping[str, Any] | None = None,
) -> None:
    """Refuses by name what is neither known nor ignored. A ``neutral`` field is taken where it has the value that changes
    nothing, or is null.
    """
    neutral = neutral or {}
    for name, value in body.items():
        if name in known or name in ignored or value is None:
            continue
        if name in neutral and _same(value, neutral[name]):
            continue
        shown = ascii(name)[1:-1][:_LONGEST_NAME]
        raise InvalidParameter(
            f"The parameter {shown} is not supported{' with this value' if name in neutral else ''}.",
            shown,
        )


def read_text(body: Body, name: str, *, longest: int = 100_000) -> str | None:
    """A string, None where it is not there."""
    return _kind(
        body,
        name,
        str,
        "a text",
        lambda value: len(value) <= longest,
        f"at most {longest} characters",
    )


def read_bool(body: Body, name: str, default: bool = False) -> bool:
    """A boolean."""
    found = _kind(body, name, bool, "true or false")
    return default if found is None else found


def read_int(body: Body, name: str, *, least: int, most: int) -> int | None:
    """A whole number within bounds, None where it is not there."""
    return _kind(
        body,
        name,
        int,
        "a whole number",
        lambda value: least <= value <= most,
        f"from {least} to {most}",
    )


def read_float(body: Body, name: str, *, least: float, most: float) -> float | None:
    """A number within bounds, None where it is not there."""
    found = body.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not least <= found <= most:
        raise InvalidParameter(f"{name} must be a number from {least:g} to {most:g}.", name)
    return float(found)


def read_texts(body: Body, name: str, *, most: int, longest: int = 1000) -> tuple[str, ...]:
    """A list of texts that are not empty, or one alone; empty where it is not there."""
    found = body.get(name)
    if found is None:
        return ()
    listed = [found] if isinstance(found, str) else found
    fits = isinstance(listed, list) and all(
        isinstance(each, str) and 0 < len(each) <= longest for each in listed
    )
    if not fits or len(listed) > most:
        raise InvalidParameter(
            f"{name} must be a text, or up to {most} of them, each of 1 to {longest} characters.",
            name,
        )
    return tuple(listed)


def _kind(
    body: Body, name: str, kind: type[T], wanted: str, fits: Any = None, bounds: str = ""
) -> T | None:
    found = body.get(name)
    if found is None:
        return None
    # True is an int to Python and no number to anybody else.
    if (
        not isinstance(found, kind)
        or (kind is not bool and isinstance(found, bool))
        or (fits and not fits(found))
    ):
        raise InvalidParameter(
            f"{name} must be {wanted}{' of ' + bounds if bounds and kind is str else ' ' + bounds if bounds else ''}.",
            name,
        )
    return found


def _same(value: Any, neutral: Any) -> bool:
    # 1 and 1.0 are one number; True is none.
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _refuse(constant: str) -> Never:
    raise ValueError(constant)


def _finite(written: str) -> float:
    value = float(written)
    if not math.isfinite(value):
        raise ValueError("too large")
    return value
