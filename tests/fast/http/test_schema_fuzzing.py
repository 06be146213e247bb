"""What a machine makes of the OpenAPI document, right and wrong, is answered as the document says: no 5xx, nothing undocumented."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from example_counts import examples
from flask import Flask
from http_makers import administration
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
# Where each answer ends a stream of events, which only a real server writes; and jobs, which would train for each case.
ELSEWHERE = {"follow", "follow_any", "stream", "learn", "learn_many", "practice", "forget"}


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """A home in which Ada has a style that she can weigh, roll back and compare."""
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
        # The home is whole after all that was sent, whichever process of pytest sent it.
        assert opened.verify() == ()


@pytest.fixture(scope="module")
def app(runtime: Runtime) -> Iterator[Flask]:
    api = ApiV1(runtime)
    yield make_app(runtime, more=[api.blueprint])
    api.close()


@pytest.fixture(scope="module")
def token(app: Flask, runtime: Runtime) -> dict[str, str]:
    return {"Authorization": f"Bearer {administration(runtime, app).secret}"}


@pytest.fixture(scope="module")
def schema(app: Flask, token: dict[str, str]) -> Any:
    return openapi.from_wsgi(f"{PREFIX}/openapi.json", app, headers=token)


@pytest.mark.parametrize(
    "operation",
    [each for each in OPERATIONS if each.name not in ELSEWHERE],
    ids=lambda each: str(each.name),
)
def test_whatever_is_sent_is_answered_as_the_document_says(
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
