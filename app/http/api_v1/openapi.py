"""The OpenAPI 3.1 document of the API, made from the table of operations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from personalpeft.errors import ERROR_CODES, PersonalPeftError
from personalpeft_app.http.api_v1.operations import (
    OPERATIONS,
    PARAMETERS,
    PERSONAL,
    PREFIX,
    Operation,
)
from personalpeft_app.http.api_v1.schemas import ErrorResponse
from personalpeft_app.http.api_v1.serialization import query_properties, schemas

# What the server answers before an operation begins.
GUARDED = {
    401: "The API key is missing or unknown.",
    403: "The API key is for another user, or the request is of another origin.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests wait. Retry-After says in how many seconds to try again.",
}


def document() -> dict[str, Any]:
    described, definitions = described_types()
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(f"{PREFIX}{operation.path}", {})[operation.method.lower()] = _operation(
            operation, described
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "personalpeft",
            "version": version("personalpeft"),
            "description": "A model for each user that learns from feedback and can be undone.",
        },
        "security": [{"api_key": []}],
        "tags": [{"name": name} for name in dict.fromkeys(each.section for each in OPERATIONS)],
        "paths": paths,
        "components": {
            "securitySchemes": {"api_key": {"type": "http", "scheme": "bearer"}},
            "schemas": definitions,
        },
    }


def statuses(operation: Operation) -> dict[int, str]:
    """Return every status that is an error, and its meaning."""
    texts: dict[int, list[str]] = {}
    for error in operation.errors:
        texts.setdefault(ERROR_CODES[error].http_status, []).append(_first_sentence(error))
    guarded = {
        code: text
        for code, text in GUARDED.items()
        if operation.body or operation.upload or code not in (413, 415)
    }
    return dict(
        sorted({**guarded, **{code: " ".join(each) for code, each in texts.items()}}.items())
    )


@cache
def described_types() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the schemas of each operation's answer, events and body, and their definitions."""
    answers: dict[str, Any] = {"refusal": ErrorResponse}
    bodies: dict[str, Any] = {}
    for operation in OPERATIONS:
        if operation.answer not in (None, bytes):
            answers[operation.name] = operation.response
        for name, kind in operation.events.items():
            answers[f"{operation.name} {name}"] = kind
        if operation.body is not None:
            bodies[f"{operation.name} body"] = operation.body
    for name, (kind, _) in PARAMETERS.items():
        bodies[f"path {name}"] = kind
    return schemas(answers, bodies)


def _operation(operation: Operation, described: Mapping[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": described["refusal"]}}
    in_path = (
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": PARAMETERS[name][1],
            "schema": described[f"path {name}"],
        }
        for name in operation.parameters
    )
    in_query = (
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in query_properties(operation.query).items()
    )
    found: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.section],
        "summary": operation.text.partition(". ")[0].rstrip("."),
        "description": operation.text,
        "parameters": [*in_path, *in_query],
        "responses": {
            str(operation.status): _answer(operation, described),
            **{
                str(code): {"description": text, "content": error}
                for code, text in statuses(operation).items()
            },
        },
    }
    if operation.body is not None:
        found["requestBody"] = {
            "required": operation.needs_body,
            "content": {"application/json": {"schema": described[f"{operation.name} body"]}},
        }
    if operation.upload:
        found["requestBody"] = {"required": True, "content": {PERSONAL: {"schema": {}}}}
    return found


def _answer(operation: Operation, described: Mapping[str, Any]) -> dict[str, Any]:
    text, media, schema = "It is done.", "application/json", described.get(operation.name)
    if operation.events:
        # OpenAPI describes one event, since the stream has no end of its own.
        events = [
            {
                "properties": {
                    "event": {"const": name},
                    "data": {
                        "contentMediaType": "application/json",
                        "contentSchema": described[f"{operation.name} {name}"],
                    },
                }
            }
            for name in operation.events
        ]
        text, media = "Server-sent events.", "text/event-stream"
        schema = {
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
            "required": ["event", "data"],
            "oneOf": events,
        }
    elif operation.download or operation.answer is bytes:
        text, media, schema = f"{operation.download or 'The file'}.".capitalize(), PERSONAL, {}
    elif operation.answer is None:
        return {"description": text}
    return {"description": text, "content": {media: {"schema": schema}}}


def _first_sentence(error: type[PersonalPeftError]) -> str:
    return " ".join((error.__doc__ or "").split()).partition(". ")[0].rstrip(".") + "."
