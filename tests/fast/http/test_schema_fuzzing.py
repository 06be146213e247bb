"""Requests generated from OpenAPI documents get documented responses and no 5xx.

The routes of OpenAI's and Anthropic's clients, of the page and of Tinker's clients have no document
of their own, so one is written here. ``--schema-cases N`` draws N cases over all operations, in
place of a few of each, and prints how many were sent.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import count
from typing import Any

import pytest
from example_counts import examples
from flask import Flask
from http_makers import Caller, admin_caller
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
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
from personalpeft.base_models.types import Base
from personalpeft_app.http import security
from personalpeft_app.http.api_v1.blueprint import ApiV1
from personalpeft_app.http.api_v1.operations import OPERATIONS, PREFIX, Operation
from personalpeft_app.http.server import make_app
from personalpeft_app.web import page
from personalpeft_app.web.sign_in import SignInCodes
from personalpeft_tinker_server import TinkerExtension, models
from personalpeft_tinker_server.routes import PREFIX as TINKER_PREFIX

MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
# These learn, erase or begin jobs, so they get a user whom nothing else needs.
SPENDING = {
    *("learn", "learn_many", "practice", "forget", "rebase", "forget_user", "stream"),
    *("follow", "follow_any"),
}
KNOWN = {"user": "ada", "turn": "last", "layer": "style"}
OTHER_KNOWN = {"user": "eve", "users": ["eve"], "item": "last", "verifier": "sums"}


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
# The other routes: methods and paths. Parameters of a path are texts.
OTHER_ROUTES = (
    ("GET", "/healthz"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/"),
    ("GET", "/web/{of}/{name}"),
    ("POST", "/web/session"),
)
_PAGING = ("limit", "after", "after_id", "before_id")
# The routes of Tinker's clients, with what they read.
TINKER_ROUTES: Mapping[tuple[str, str], type[BaseModel] | None] = {
    ("POST", "client/config"): None,
    ("POST", "auth/token"): None,
    ("POST", "create_session"): models.CreateSession,
    ("POST", "session_heartbeat"): models.SessionRef,
    ("POST", "telemetry"): models.Telemetry,
    ("GET", "get_server_capabilities"): None,
    ("GET", "healthz"): None,
    ("POST", "create_model"): models.CreateModel,
    ("POST", "get_info"): models.ModelRef,
    ("POST", "forward_backward"): models.ForwardBackward,
    ("POST", "forward"): models.ForwardBackward,
    ("POST", "optim_step"): models.OptimStep,
    ("POST", "save_weights"): models.SaveWeights,
    ("POST", "save_weights_for_sampler"): models.SaveWeightsForSampler,
    ("POST", "load_weights"): models.LoadWeights,
    ("POST", "weights_info"): models.WeightsInfo,
    ("POST", "create_sampling_session"): models.CreateSampler,
    ("POST", "asample"): models.Sample,
    ("POST", "retrieve_future"): models.RetrieveFuture,
    ("POST", "mint/checkpoints/interpolate"): models.Interpolate,
    ("POST", "mint/forward_backward_reverse_kl"): models.ReverseKL,
    ("POST", "personal/adopt"): models.Adopt,
    ("GET", "samplers/{sampler}"): None,
    ("GET", "sessions"): None,
    ("GET", "sessions/{session}"): None,
    ("GET", "checkpoints"): None,
    ("GET", "training_runs"): None,
    ("GET", "training_runs/{run}"): None,
    ("GET", "training_runs/{run}/checkpoints"): None,
    ("GET", "training_runs/{run}/checkpoints/{kind}/{name}/archive"): None,
    ("POST", "training_runs/{run}/checkpoints/{kind}/{name}/publish"): None,
    ("DELETE", "training_runs/{run}/checkpoints/{kind}/{name}/publish"): None,
    ("PUT", "training_runs/{run}/checkpoints/{kind}/{name}/ttl"): models.SetTtl,
    ("GET", "downloads/{key}"): None,
    # These end what the others know.
    ("POST", "cancel_future"): models.RetrieveFuture,
    ("DELETE", "training_runs/{run}/checkpoints/{kind}/{name}"): None,
    ("POST", "unload_model"): models.ModelRef,
    ("POST", "sessions/{session}/finish"): None,
}
OPERATION_COUNT = len(OPERATIONS) + len(CLIENT_ROUTES) + len(OTHER_ROUTES) + len(TINKER_ROUTES)


def _route(path: str, body: Any, *queries: str) -> dict[str, Any]:
    """Describe a route with any answer."""
    where = [(name, "path", True) for name in re.findall(r"{(\w+)}", path)]
    where += [(name, "query", False) for name in queries]
    described: dict[str, Any] = {
        "parameters": [
            {"name": name, "in": place, "required": needed, "schema": _TEXT}
            for name, place, needed in where
        ],
        "responses": {"default": {"description": "any"}},
    }
    if body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    return described


def _document(
    routes: Mapping[tuple[str, str], dict[str, Any]], **components: Any
) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), described in routes.items():
        paths.setdefault(path, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "routes without a document", "version": "1"},
        "paths": paths,
        "components": {"schemas": components},
    }


def _tinker_document() -> dict[str, Any]:
    kinds = sorted(
        {kind for kind in TINKER_ROUTES.values() if kind}, key=lambda kind: kind.__name__
    )
    found, definitions = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    schemas = definitions["$defs"]
    # So that a call takes no minute.
    schemas["SamplingParams"]["properties"]["max_tokens"] = _FEW
    schemas["Sample"]["properties"]["num_samples"] = _FEW
    return _document(
        {
            (method, f"{TINKER_PREFIX}/{path}"): _route(path, kind and found[kind, "validation"])
            for (method, path), kind in TINKER_ROUTES.items()
        },
        **schemas,
    )


CLIENTS = _document(
    {
        **{("POST", path): _route(path, body) for path, body in CLIENT_ROUTES.items()},
        **{route: _route(route[1], None, *_PAGING) for route in OTHER_ROUTES},
    }
)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """A home in which Ada has a style layer to weigh, roll back and compare, and Eve lessons."""
    with personalpeft.open(
        tmp_path_factory.mktemp("fuzzed") / "home", backend="fake", implicit_feedback="kept"
    ) as opened:
        for name in ("ada", "eve"):
            user = opened.user(name)
            for number in range(5):
                user.feedback(
                    user.chat(f"question {number}", temperature=0),
                    edit=f"Ahoy! Answer {number}. Arrr!",
                )
        opened.user("ada").learn()
        yield opened
        # The home passes its integrity check after all requests of all pytest processes.
        assert opened.verify() == ()


@pytest.fixture(scope="module")
def app(runtime: Runtime) -> Iterator[Flask]:
    api = ApiV1(runtime)
    web = page.blueprint(SignInCodes(runtime.api_keys))
    app = make_app(runtime, more=[api.blueprint, web])
    yield app
    jobs = _ended_jobs(admin_caller(runtime, app))
    assert [job for job in jobs if (job["error"] or {}).get("kind") == "Bug"] == []
    api.close()


def _ended_jobs(admin: Caller) -> list[dict[str, Any]]:
    """Return all jobs, after a while in which they may end."""
    end = time.monotonic() + 60
    while True:
        jobs: list[dict[str, Any]] = admin.get(f"{PREFIX}/jobs?limit=1000").get_json()["items"]
        if time.monotonic() > end or all(job["ended_at"] for job in jobs):
            return jobs
        time.sleep(0.1)


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
def sent(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """How many cases of each operation were sent."""
    counted: Counter[str] = Counter()
    yield counted
    if request.config.getoption("--schema-cases") is not None:
        line = f"sent {counted.total():,} generated requests to {len(counted)} operations"
        request.config.get_terminal_writer().line(f"\n{line}")


Fuzz = Callable[[str, Any, Callable[[Any, bool], object]], None]


@pytest.fixture(scope="module")
def fuzz(request: pytest.FixtureRequest, sent: Counter[str]) -> Fuzz:
    """Send cases of a described operation: a few, or its share of all that are asked for."""
    total = request.config.getoption("--schema-cases")
    more: dict[str, Any] = {
        "database": None,
        "derandomize": True,
        "phases": [Phase.generate],
        "suppress_health_check": list(HealthCheck),
    }
    few = examples(3, **more)
    asked = few.max_examples if total is None else -(-total // OPERATION_COUNT)

    def fuzz(name: str, described: Any, send: Callable[[Any, bool], object]) -> None:
        cases = st.one_of(*(described.as_strategy(generation_mode=mode) for mode in MODES))
        # Where hypothesis finds no further case, it begins again with another seed.
        for number in count():
            before = sent[name]

            @seed(number)
            @settings(few, max_examples=asked - before)
            @given(case=cases, known=st.booleans())
            def draw(case: Any, known: bool) -> None:
                sent[name] += 1
                send(case, known)

            draw()
            if total is None or not before < sent[name] < asked:
                return

    return fuzz


def _set_known(case: Any, known: Mapping[str, Any]) -> None:
    """Give parameters of a case's path and body values that the server knows."""
    case.path_parameters.update({each: known[each] for each in case.path_parameters.keys() & known})
    if isinstance(case.body, dict):
        case.body.update({each: known[each] for each in case.body.keys() & known})


@pytest.mark.parametrize(
    "operation",
    OPERATIONS,
    ids=lambda each: str(each.name),
)
def test_generated_requests_get_documented_responses(
    schema: Any, token: dict[str, str], operation: Operation, fuzz: Fuzz, runtime: Runtime
) -> None:
    described = schema[PREFIX + operation.path][operation.method]
    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        ignored_auth,
        # A document describes one event, and an answer has several.
        *([] if operation.events else [response_schema_conformance]),
    ]

    def send(case: Any, known: bool) -> None:
        if operation.name in SPENDING:
            runtime.user("eve")
            _set_known(case, OTHER_KNOWN if known else {})
        elif known:
            case.path_parameters.update(
                {name: KNOWN[name] for name in case.path_parameters.keys() & KNOWN.keys()}
            )
        case.call_and_validate(headers=token, checks=checks)

    fuzz(operation.name, described, send)


@pytest.mark.parametrize(
    ("method", "path"), [*(("POST", path) for path in CLIENT_ROUTES), *OTHER_ROUTES]
)
def test_generated_requests_of_other_clients_get_no_server_error(
    clients_schema: Any, token: dict[str, str], method: str, path: str, fuzz: Fuzz
) -> None:
    def send(case: Any, known: bool) -> None:
        if isinstance(case.body, dict):
            # Streams need a real server.
            case.body.pop("stream", None)
        case.call_and_validate(headers=token, checks=[not_a_server_error])

    fuzz(f"{method} {path}", clients_schema[path][method], send)


@pytest.fixture(scope="module")
def tinker(tmp_path_factory: pytest.TempPathFactory, tiny_base: Base) -> Iterator[tuple[Any, Any]]:
    """A server of Tinker's API as a schema, with the headers of a client and what it knows."""
    home = tmp_path_factory.mktemp("tinker") / "home"
    with (
        personalpeft.open(home, base="tiny-random", backend="torch") as runtime,
        closing(TinkerExtension(runtime, security.plugin_host())) as extension,
    ):
        app = make_app(runtime, more=[extension.blueprint])
        secret = runtime.api_keys.create("ada")[1]
        headers = {"X-Api-Key": f"tml-{secret}"}

        def post(route: str, **body: Any) -> dict[str, Any]:
            answer = app.test_client().post(
                f"{TINKER_PREFIX}/{route}", json=body, headers={**headers, "Host": "127.0.0.1"}
            )
            assert answer.status_code == 200, answer.get_data()
            found: dict[str, Any] = answer.get_json()
            return found

        session = post("create_session")["session_id"]
        made = post("create_model", session_id=session, model_seq_id=0, base_model="tiny-random")
        post("retrieve_future", request_id=made["request_id"])
        saved = post("save_weights", model_id=made["model_id"], path="mine")
        path = post("retrieve_future", request_id=saved["request_id"])["path"]
        schema = openapi.from_dict(_tinker_document())
        schema.app = app
        known = {
            "session": session,
            "session_id": session,
            "run": made["model_id"],
            "model_id": made["model_id"],
            "request_id": saved["request_id"],
            **dict.fromkeys(("path", "model_path", "tinker_path", "reference_model_path"), path),
            "kind": "weights",
            "name": "mine",
            "base_model": "tiny-random",
            "user": "ada",
            "layer": "style",
        }
        yield schema, (headers, known)
    with closing(sqlite3.connect(home / "tinker" / "server.sqlite3")) as db:
        wrong = "select kind, error from calls where category not in ('user')"
        assert db.execute(wrong).fetchall() == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("method", "path"), TINKER_ROUTES)
def test_generated_requests_of_tinkers_clients_get_no_server_error(
    tinker: tuple[Any, Any], method: str, path: str, fuzz: Fuzz
) -> None:
    schema, (headers, values) = tinker

    def send(case: Any, known: bool) -> None:
        _set_known(case, values if known else {})
        case.call_and_validate(headers=headers, checks=[not_a_server_error])

    fuzz(f"{method} {path}", schema[f"{TINKER_PREFIX}/{path}"][method], send)


def test_every_route_is_described(app: Flask) -> None:
    described = {path for _, path in OTHER_ROUTES} | CLIENT_ROUTES.keys()
    described |= {PREFIX + operation.path for operation in OPERATIONS} | {f"{PREFIX}/openapi.json"}
    described |= {PREFIX + each.former_path for each in OPERATIONS if each.former_path}
    rules = {re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule) for rule in app.url_map.iter_rules()}
    assert rules == described


@pytest.mark.exhaustive
def test_every_route_of_tinkers_clients_is_described(tinker: tuple[Any, Any]) -> None:
    schema, _ = tinker
    found = {
        (method, re.sub(r"<(\w+)>", r"{\1}", rule.rule.removeprefix(f"{TINKER_PREFIX}/")))
        for rule in schema.app.url_map.iter_rules()
        if rule.rule.startswith(TINKER_PREFIX)
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }
    assert found == TINKER_ROUTES.keys()


def test_as_many_requests_were_sent_as_asked_for(
    request: pytest.FixtureRequest, sent: Counter[str]
) -> None:
    total = request.config.getoption("--schema-cases")
    if total is None or "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("no number was asked for, or another process sent a part of them")
    assert sent.total() >= total
