"""Requests generated from the OpenAPI document get documented responses and no 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from example_counts import examples
from flask import Flask
from http_makers import admin_caller
from hypothesis import HealthCheck, Phase, given
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


@pytest.mark.parametrize(
    "operation",
    [each for each in OPERATIONS if each.name not in ELSEWHERE],
    ids=lambda each: str(each.name),
)
def test_generated_requests_get_documented_responses(
    schema: Any, token: dict[str, str], operation: Operation
) -> None:
    described = schema[PREFIX + operation.path][operation.method]
    both = st.one_of(*(described.as_strategy(generation_mode=mode) for mode in MODES))

    @examples(
        5,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
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
