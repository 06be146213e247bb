"""The OpenAPI 3.1 document of our own API, made from the table of operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from personalpeft.errors import ERROR_CODES, PersonalPeftError
from personalpeft_app.http.api_v1.operations import (
    OPERATIONS,
    PARAMETERS,
    PERSONAL,
    PREFIX,
    Operation,
)
from personalpeft_app.http.api_v1.schemas import Refusal
from personalpeft_app.http.api_v1.serialization import fields_of, schema_of, schemas, to_json

# What a server says before or beside the table: no token, another's data, too large, not JSON, too many at once.
GUARDED = {
    401: "There is no token that is known.",
    403: "The token is for another user, or the request is from elsewhere.",
    413: "The body is larger than is taken.",
    415: "The body is not JSON.",
    429: "Too many wait; Retry-After says in how many seconds to try again.",
}


def document(version: str) -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(f"{PREFIX}{operation.path}", {})[operation.method.lower()] = _operation(
            operation
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "personalpeft",
            "version": version,
            "description": "A model of one's own: talk to it, correct it, have it learn from that, and take back what one does not like.",
        },
        "security": [{"token": []}],
        "tags": [{"name": name} for name in dict.fromkeys(each.section for each in OPERATIONS)],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas(
                [
                    Refusal,
                    *(each.answer for each in OPERATIONS if each.answer not in (None, bytes)),
                    *_events(),
                ],
                [each.body for each in OPERATIONS if each.body is not None],
            ),
        },
    }


def statuses(operation: Operation) -> dict[int, str]:
    """Every status that is an error, and what it means there."""
    said: dict[int, list[str]] = {}
    for error in operation.errors:
        said.setdefault(ERROR_CODES[error].http_status, []).append(_first_sentence(error))
    guarded = {
        code: text
        for code, text in GUARDED.items()
        if operation.body or operation.upload or code not in (413, 415)
    }
    return dict(
        sorted({**guarded, **{code: " ".join(texts) for code, texts in said.items()}}.items())
    )


def _operation(operation: Operation) -> dict[str, Any]:
    known: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.section],
        "summary": operation.text.partition(". ")[0].rstrip("."),
        "description": operation.text,
        "parameters": [*_in_path(operation.parameters), *_in_query(operation.query)],
        "responses": {
            str(operation.status): _answer(operation),
            **{
                str(code): {
                    "description": text,
                    "content": {"application/json": {"schema": schema_of(Refusal)}},
                }
                for code, text in statuses(operation).items()
            },
        },
    }
    if operation.body is not None:
        needed = any(needed for _, _, needed, _ in fields_of(operation.body))
        known["requestBody"] = {
            "required": needed,
            "content": {"application/json": {"schema": schema_of(operation.body)}},
        }
    if operation.upload:
        known["requestBody"] = {"required": True, "content": {PERSONAL: {"schema": {}}}}
    return known


def _answer(operation: Operation) -> dict[str, Any]:
    if operation.events:
        # Each event, since the stream has no end of its own: its name, and JSON as its data.
        told = [
            {
                "properties": {
                    "event": {"const": name},
                    "data": {
                        "contentMediaType": "application/json",
                        "contentSchema": schema_of(kind),
                    },
                }
            }
            for name, kind in operation.events.items()
        ]
        event = {
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
            "required": ["event", "data"],
            "oneOf": told,
        }
        return {
            "description": "Server-sent events.",
            "content": {"text/event-stream": {"schema": event}},
        }
    if operation.download:
        return {
            "description": f"{operation.file.capitalize()}.",
            "content": {PERSONAL: {"schema": {}}},
        }
    if operation.answer is bytes:
        return {"description": "The file.", "content": {PERSONAL: {"schema": {}}}}
    if operation.answer is None:
        return {"description": "It is done."}
    schema = schema_of(operation.answer)
    if operation.paged:
        after = {
            "type": ["string", "null"],
            "description": "The `after` of the page that follows; null on the last one.",
        }
        schema = {
            "type": "object",
            "properties": {"items": {"type": "array", "items": schema}, "next": after},
            "required": ["items", "next"],
            "additionalProperties": False,
        }
    return {"description": "It is done.", "content": {"application/json": {"schema": schema}}}


def _in_path(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        kind, text = PARAMETERS[name]
        yield {
            "name": name,
            "in": "path",
            "required": True,
            "description": text,
            "schema": schema_of(kind),
        }


def _in_query(query: type) -> Iterator[dict[str, Any]]:
    for name, kind, needed, default in fields_of(query):
        schema = schema_of(kind)
        # An address has no null: what is not there is not asked for.
        if schema.get("anyOf", [{}])[-1] == {"type": "null"}:
            schema = schema["anyOf"][0]
        if default is not None:
            schema = {**schema, "default": to_json(default)}
        yield {"name": name, "in": "query", "required": needed, "schema": schema}


def _events() -> Iterator[type]:
    for operation in OPERATIONS:
        yield from operation.events.values()


def _first_sentence(error: type[PersonalPeftError]) -> str:
    return " ".join((error.__doc__ or "").split()).partition(". ")[0].rstrip(".") + "."
