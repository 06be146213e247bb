"""Requests generated from OpenAPI documents get documented responses and no 5xx.

The routes of OpenAI's and Anthropic's clients have no document of their own, so one is written here.
``--schema-cases N`` draws N cases over all operations, in place of a few of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from example_counts import examples
from flask import Flask
from http_makers import admin_caller
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode, openapi
from schemathesis.checks import (
    content_type_conformance,
    ignored_auth,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

import personalpeft
from personalpeft import Runtime
from personalpeft_app.http.api_v1.operations import OPERATIONS, PREFIX, Operation
from personalpeft_app.http.api_v1.routes import ApiV1
from personalpeft_app.http.server import make_app

MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
KNOWN = {"user": "ada", "turn": "last", "layer": "style"}
# Skipped: event streams, which only a real server writes; jobs, which would train; and erasing Ada.
ELSEWHERE = {
    *("follow", "follow_any", "stream", "learn", "learn_many", "practice", "forget", "rebase"),
    "forget_user",
}
FUZZED = [each for each in OPERATIONS if each.name not in ELSEWHERE]


def _of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


_TEXT = {"type": "string"}
_MODEL = {"enum": ["ada", "bo", "no such model"]}
_TEXTS = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 3}]}
_CONTENT = {
    "anyOf": [
        _TEXT,
        {"type": "array", "maxItems": 3, "items": _of(type={"enum": ["text"]}, text=_TEXT)},
    ]
}
_ROLE = {"enum": ["system", "user", "assistant", "tool", "developer"]}
_CALL = _of(id=_TEXT, type=_TEXT, function=_of(name=_TEXT, arguments=_TEXT))
_MESSAGE = _of(
    role=_ROLE,
    content=_CONTENT,
    tool_calls={"type": "array", "items": _CALL, "maxItems": 2},
    tool_call_id=_TEXT,
)
_MESSAGES = {"type": "array", "items": _MESSAGE, "maxItems": 4}
_TOOL = _of(
    type={"enum": ["function"]},
    name=_TEXT,
    function=_of(name=_TEXT, description=_TEXT, parameters={"type": "object"}),
)
_SAMPLING = {
    "model": _MODEL,
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "seed": {"type": "integer"},
    "tools": {"type": "array", "items": _TOOL, "maxItems": 2},
    "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, _TOOL]},
}
_FEW = {"type": "integer", "minimum": 1, "maximum": 8}
# The bodies of the routes that clients of other systems use. Streams need a real server.
CLIENT_ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _of(
        **_SAMPLING,
        messages=_MESSAGES,
        max_tokens=_FEW,
        max_completion_tokens=_FEW,
        n={"type": "integer", "maximum": 3},
        stop=_TEXTS,
        logprobs={"type": "boolean"},
        top_logprobs={"type": "integer"},
    ),
    "/v1/completions": _of(
        **_SAMPLING, prompt=_TEXTS, max_tokens=_FEW, stop=_TEXTS, echo={"type": "boolean"}
    ),
    "/v1/responses": _of(
        **_SAMPLING,
        input={"anyOf": [_TEXT, _MESSAGES]},
        instructions=_TEXT,
        max_output_tokens=_FEW,
    ),
    "/v1/embeddings": _of(model=_TEXT, input=_TEXTS, encoding_format=_TEXT),
    "/v1/messages": _of(**_SAMPLING, messages=_MESSAGES, system=_CONTENT, max_tokens=_FEW),
    "/v1/messages/count_tokens": _of(model=_MODEL, messages=_MESSAGES, system=_CONTENT),
}
CLIENTS = {
    "openapi": "3.1.0",
    "info": {"title": "clients of other systems", "version": "1"},
    "paths": {
        path: {
            "post": {
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": body}},
                },
                "responses": {"default": {"description": "any"}},
            }
        }
        for path, body in CLIENT_ROUTES.items()
    },
}


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """A home in which Ada has a style layer to weigh, roll back and compare."""
    with personalpeft.open(
        tmp_path_factory.mktemp("fuzzed") / "home", backend="fake", observing="kept"
    ) as opened:
        ada = opened.user("ada")
        for number in range(5):
            ada.feedback(
                ada.chat(f"question {number}", temperature=0), edit=f"Ahoy! Answer {number}. Arrr!"
            )
        ada.learn()
        yield opened
        # The home passes its integrity check after all requests of all pytest processes.
        assert opened.verify() == ()


@pytest.fixture(scope="module")
def app(runtime: Runtime) -> Iterator[Flask]:
    api = ApiV1(runtime)
    yield make_app(runtime, more=[api.blueprint])
    api.close()


@pytest.fixture(scope="module")
def token(app: Flask, runtime: Runtime) -> dict[str, str]:
    return {"Authorization": f"Bearer {admin_caller(runtime, app).secret}"}


@pytest.fixture(scope="module")
def schema(app: Flask, token: dict[str, str]) -> Any:
    return openapi.from_wsgi(f"{PREFIX}/openapi.json", app, headers=token)


@pytest.fixture(scope="module")
def clients_schema(app: Flask) -> Any:
    found = openapi.from_dict(CLIENTS)
    found.app = app
    return found


@pytest.fixture(scope="module")
def drawn(request: pytest.FixtureRequest) -> settings:
    """How many cases of each operation are drawn."""
    total = request.config.getoption("--schema-cases")
    more: dict[str, Any] = {
        "database": None,
        "derandomize": True,
        "phases": [Phase.generate],
        "suppress_health_check": list(HealthCheck),
    }
    if total is None:
        return examples(3, **more)
    return settings(max_examples=-(-total // (len(FUZZED) + len(CLIENT_ROUTES))), **more)


@pytest.mark.parametrize(
    "operation",
    FUZZED,
    ids=lambda each: str(each.name),
)
def test_generated_requests_get_documented_responses(
    schema: Any, token: dict[str, str], operation: Operation, drawn: settings
) -> None:
    described = schema[PREFIX + operation.path][operation.method]
    both = st.one_of(*(described.as_strategy(generation_mode=mode) for mode in MODES))

    @drawn
    @given(case=both, known=st.booleans())
    def sent(case: Any, known: bool) -> None:
        if known:
            case.path_parameters.update(
                {name: KNOWN[name] for name in case.path_parameters.keys() & KNOWN.keys()}
            )
        case.call_and_validate(
            headers=token,
            checks=[
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
                ignored_auth,
            ],
        )

    sent()


@pytest.mark.parametrize("path", CLIENT_ROUTES)
def test_generated_requests_of_other_clients_get_no_server_error(
    clients_schema: Any, token: dict[str, str], path: str, drawn: settings
) -> None:
    described = clients_schema[path]["POST"]
    both = st.one_of(*(described.as_strategy(generation_mode=mode) for mode in MODES))

    @drawn
    @given(case=both)
    def sent(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body.pop("stream", None)
        case.call_and_validate(headers=token, checks=[not_a_server_error])

    sent()
