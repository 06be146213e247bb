"""Read the JSON bodies of requests, and those of OpenAI's and Anthropic's routes as models.

Invariants: NaN, infinities and numbers too large for a float are refused. Unknown fields of a body
are refused by name. No message repeats a value that was sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

from annotated_types import Len
from flask import request
from pydantic import AfterValidator, ConfigDict, ValidationError, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError
from werkzeug.exceptions import BadRequest, UnsupportedMediaType

from personalpeft.types import parse_strict_json
from personalpeft_app.http.api_v1.serialization import (
    RequestModel,
    format_path,
    format_problem,
    locate_error,
)
from personalpeft_app.http.error_responses import InvalidParameter

LARGEST = 4 * 2**20
"""The most bytes of a body."""
LARGEST_FILE = 256 * 2**20
"""The most bytes of a body that is a file."""

LongText: TypeAlias = Annotated[str, Len(1, 100_000)]

B = TypeVar("B", bound="Body")


def read_object() -> dict[str, Any]:
    """Return the JSON object of this request. Raises ``BadRequest``, ``UnsupportedMediaType``."""
    if request.mimetype != "application/json":
        raise UnsupportedMediaType("Send JSON, with Content-Type: application/json.")
    try:
        found = parse_strict_json(request.get_data().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadRequest("The body must be valid JSON.") from error
    if not isinstance(found, dict):
        raise BadRequest("The body must be a JSON object.")
    return found


class Body(RequestModel):
    """The base of the bodies of OpenAI's and Anthropic's routes. Null is the same as no value."""

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class Part(Body):
    """The base of the objects in a body. Clients send them with fields that nothing here needs."""

    model_config = ConfigDict(extra="ignore")


Ignored: TypeAlias = Annotated[Any, WithJsonSchema({"description": "ignored"})]
"""A field that concerns billing, caching or routing, and changes no reply."""


def only(value: Any) -> tuple[Any, ...]:
    """Return the constraints of a field that may only have the value which changes nothing."""

    def check(given: Any) -> Any:
        # 1 and 1.0 are equal; True is not a number.
        if given != value or isinstance(given, bool) != isinstance(value, bool):
            raise PydanticCustomError("unsupported", "is not supported with this value")
        return given

    return AfterValidator(check), WithJsonSchema({"const": value})


def parse(kind: type[B], given: Mapping[str, Any]) -> B:
    """Return a body from JSON data. Raises ``InvalidParameter``."""
    try:
        return kind.model_validate_json(json.dumps(given))
    except ValidationError as error:
        path, details = locate_error(error, given)
        raise InvalidParameter(format_path(path), format_problem(details)) from None
    except RecursionError:
        raise InvalidParameter("", "is nested too deeply") from None


def read_body(kind: type[B]) -> B:
    """Return the body of this request. Raises as ``read_object`` and ``parse``."""
    return parse(kind, read_object())
