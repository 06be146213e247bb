"""Read JSON bodies and their fields strictly.

Invariants: NaN, infinities and numbers too large for a float are refused. Unknown fields are
refused by name. No message repeats a value that was sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Never, TypeAlias, TypeVar

from annotated_types import Ge, Le, Len
from flask import request
from pydantic import ValidationError
from werkzeug.exceptions import BadRequest, UnsupportedMediaType

from personalpeft_app.http.api_v1.serialization import adapter
from personalpeft_app.http.error_responses import InvalidParameter

Body: TypeAlias = Mapping[str, Any]

LARGEST = 4 * 2**20
"""The most bytes of a body."""
LARGEST_FILE = 256 * 2**20
"""The most bytes of a body that is a file."""
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
    """Return the JSON object of this request. Raises ``BadRequest``, ``UnsupportedMediaType``."""
    if request.mimetype != "application/json":
        raise UnsupportedMediaType("Send JSON, with Content-Type: application/json.")
    try:
        found = json.loads(
            request.get_data().decode("utf-8"), parse_constant=_refuse, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise BadRequest("The body must be valid JSON.") from error
    if not isinstance(found, dict):
        raise BadRequest("The body must be a JSON object.")
    return found


def check_names(
    body: Body,
    *,
    known: Collection[str],
    ignored: Collection[str] = (),
    neutral: Mapping[str, Any] | None = None,
) -> None:
    """Refuse fields that are neither known nor ignored.

    A ``neutral`` field may be null or have the value that changes nothing.
    """
    neutral = neutral or {}
    for name, value in body.items():
        if name in known or name in ignored or value is None:
            continue
        if name in neutral and _same(value, neutral[name]):
            continue
        shown = ascii(name)[1:-1][:_LONGEST_NAME]
        value_part = " with this value" if name in neutral else ""
        raise InvalidParameter(f"The parameter {shown} is not supported{value_part}.", shown)


def read_text(body: Body, name: str, *, longest: int = 100_000) -> str | None:
    """Return a string, or None without one."""
    return _read(body, name, Annotated[str, Len(0, longest)])


def read_bool(body: Body, name: str, default: bool = False) -> bool:
    """Return a boolean."""
    found = _read(body, name, bool)
    return default if found is None else bool(found)


def read_int(body: Body, name: str, *, least: int, most: int) -> int | None:
    """Return an integer within bounds, or None without one."""
    return _read(body, name, Annotated[int, Ge(least), Le(most)])


def read_float(body: Body, name: str, *, least: float, most: float) -> float | None:
    """Return a number within bounds, or None without one."""
    return _read(body, name, Annotated[float, Ge(least), Le(most)])


def read_texts(body: Body, name: str, *, most: int, longest: int = 1000) -> tuple[str, ...]:
    """Return a list of texts that are not empty, or one text as a list of it."""
    text = Annotated[str, Len(1, longest)]
    found = _read(body, name, text | Annotated[list[text], Len(0, most)])
    return (found,) if isinstance(found, str) else tuple(found or ())


def _read(body: Body, name: str, kind: Any) -> Any:
    found = body.get(name)
    if found is None:
        return None
    try:
        return adapter(kind).validate_python(found, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[-1]["msg"]
        raise InvalidParameter(f"{name}: {problem}.", name) from None


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
