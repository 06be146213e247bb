"""Read JSON into frozen values, and describe their types, through pydantic.

Values become JSON by ``personalpeft.formatting.to_json``. A class of requests refuses unknown keys
and values of another type. A class of responses ignores keys that it does not know, so an older
client reads a newer server. No message repeats a value that was sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from pydantic_core import ErrorDetails

from personalpeft.deprecation import former_names
from personalpeft.errors import ERROR_CODES, InvalidInput, PersonalPeftError, suggest_nearest

ERROR_KINDS = {kind.__name__: kind for kind in ERROR_CODES}
_REF = "#/components/schemas/{model}"


class RequestModel(BaseModel):
    """The base of every body and query."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def from_json(kind: Any, value: Any, where: str = "The body") -> Any:
    """Return the value of a type from JSON data.

    Raises ``InvalidInput``, or the error that a name in ``schemas`` names.
    """
    try:
        return adapter(kind).validate_json(json.dumps(value))
    except ValidationError as error:
        raise _refusal(error, kind, value, where) from None
    except RecursionError:
        raise InvalidInput(f"{where} is nested too deeply.", hint="Send less depth.") from None


def from_query(kind: Any, texts: Mapping[str, str]) -> Any:
    """Return the value of a query's type from the texts of an address. Raises as ``from_json``."""
    properties = query_properties(kind)
    values = {name: _decode(text, properties.get(name, {})) for name, text in texts.items()}
    return from_json(kind, values, "The query")


@cache
def query_properties(kind: Any) -> Mapping[str, Any]:
    """Return the JSON Schema of each field of a query, without null: an address has none."""
    schema = adapter(kind).json_schema(schema_generator=_JsonSchema)
    found = {}
    for name, each in schema.get("properties", {}).items():
        kinds = [one for one in each.get("anyOf", ()) if one != {"type": "null"}]
        rest = {key: value for key, value in each.items() if key not in ("anyOf", "default")}
        default = {"default": each["default"]} if each.get("default") is not None else {}
        found[name] = {**(kinds[0] if kinds else {}), **rest, **default}
    return found


def schemas(
    answers: Mapping[str, Any], requests: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the schema of each of these types by its key, and the schemas that they refer to."""
    inputs: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = [
        *((name, "serialization", adapter(kind)) for name, kind in answers.items()),
        *((name, "validation", adapter(kind)) for name, kind in requests.items()),
    ]
    found, definitions = TypeAdapter.json_schemas(
        inputs, ref_template=_REF, schema_generator=_JsonSchema
    )
    return {name: schema for (name, _), schema in found.items()}, definitions["$defs"]


class _JsonSchema(GenerateJsonSchema):
    """JSON Schema without titles, where every answer has all of its keys and no other."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def field_is_required(self, field: Any, total: bool) -> bool:
        return self.mode == "serialization" or super().field_is_required(field, total)

    def model_schema(self, schema: Any) -> dict[str, Any]:
        found = super().model_schema(schema)
        found.pop("title", None)
        return found

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        kind = schema["cls"]
        found = super().dataclass_schema(schema)
        found.pop("title", None)
        found["additionalProperties"] = False
        if self.mode == "serialization":
            for name in getattr(kind, "json_properties", ()):
                hint = get_type_hints(getattr(kind, name).fget)["return"]
                described = self.generate_inner(adapter(hint).core_schema)
                found["properties"][name] = {**described, "readOnly": True}
                found["required"].append(name)
            for old, new in former_names(kind).items():
                found["properties"][old] = {**found["properties"][new], "deprecated": True}
                found["required"].append(old)
        return found


def _decode(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the number or boolean that a text of an address stands for, else the text."""
    if schema.get("type") not in ("integer", "number", "boolean"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _refusal(error: ValidationError, kind: Any, value: Any, where: str) -> PersonalPeftError:
    """Return our error for the most specific one of pydantic."""
    path, details = locate_error(error, value)
    place = format_path(path)
    hint = "GET /api/v1/openapi.json describes every field."
    if details["type"] == "extra_forbidden" and len(path) == 1 and kind.model_fields:
        hint = suggest_nearest(place, kind.model_fields, what="key")
    message = f"{place or where} {format_problem(details)}."
    return ERROR_KINDS.get(details["type"], InvalidInput)(message, hint=hint)


def locate_error(error: ValidationError, value: Any) -> tuple[tuple[str | int, ...], ErrorDetails]:
    """Return the path in ``value`` of the most specific error, and pydantic's details of it."""
    found = error.errors(include_url=False, include_context=True, include_input=False)
    return max(((_path(value, each), each) for each in found), key=lambda each: len(each[0]))


def format_path(path: tuple[str | int, ...]) -> str:
    """Return a path in JSON as a short text, such as ``messages[0].role``."""
    place = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path)
    return ascii(place.removeprefix("."))[1:-1][:160]


def format_problem(details: ErrorDetails) -> str:
    """Return what is wrong with a value, to follow its place. It does not repeat the value."""
    match details["type"]:
        case "missing":
            return "is missing"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return "is not supported"
        case "json_invalid":
            return "must be valid Unicode and not nested deeply"
        case "string_too_short" | "too_short" if details["ctx"]["min_length"] == 1:
            return "must not be empty"
        case "union_tag_invalid":
            return f"must be one of {details['ctx']['expected_tags']}"
    return re.sub("^(Input|String|Value|Tuple|List) should ", "must ", details["msg"])


def _path(value: Any, details: ErrorDetails) -> tuple[str | int, ...]:
    """Return where an error is. Pydantic's location names the members of unions too."""
    path: list[str | int] = []
    for step in details["loc"]:
        if isinstance(value, Mapping) and step in value:
            value = value[str(step)]
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step] if step < len(value) else None
        elif details["type"] != "missing" or step != details["loc"][-1]:
            continue
        path.append(step)
    return tuple(path)
