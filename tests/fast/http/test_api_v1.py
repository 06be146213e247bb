"""The v1 API follows its operation table, validates strictly, and runs learns as jobs."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from flask import Flask
from http_makers import Caller, admin_caller, user_caller

import personalpeft
from personalpeft import Runtime
from personalpeft.adapters.formats import published
from personalpeft.errors import ERROR_CODES
from personalpeft_app.cli import cli
from personalpeft_app.http.api_v1.blueprint import ApiV1
from personalpeft_app.http.api_v1.ephemeral_state import MAX_PER_USER
from personalpeft_app.http.api_v1.handlers import HANDLERS
from personalpeft_app.http.api_v1.operations import OPERATIONS, PREFIX
from personalpeft_app.http.server import make_app

ADA = f"{PREFIX}/users/ada"


@pytest.fixture
def api(runtime: Runtime) -> Iterator[ApiV1]:
    api = ApiV1(runtime)
    yield api
    api.close()


@pytest.fixture
def app(runtime: Runtime, api: ApiV1) -> Flask:
    return make_app(runtime, more=[api.blueprint])


@pytest.fixture
def ready(ada: Caller, runtime: Runtime) -> Caller:
    """Ada with enough signals for a learn."""
    user = runtime.user("ada")
    for number in range(5):
        user.feedback(
            user.chat(f"question {number}", temperature=0), edit=f"Ahoy! Answer {number}. Arrr!"
        )
    return ada


def wait_for_job(caller: Caller, job: dict[str, Any]) -> dict[str, Any]:
    for _ in range(600):
        found: dict[str, Any] = caller.get(f"{ADA}/jobs/{job['id']}").get_json()
        if found["ended_at"]:
            return found
        time.sleep(0.02)
    raise AssertionError(found)


def events(text: str) -> list[tuple[str, Any]]:
    blocks = [block for block in text.split("\n\n") if block.startswith("event: ")]
    return [(block.split("\n")[0][7:], json.loads(block.split("\n")[1][6:])) for block in blocks]


# Operations


def test_every_operation_has_a_route_and_a_handler(app: Flask) -> None:
    rules = {
        (method, rule.rule) for rule in app.url_map.iter_rules() for method in rule.methods or ()
    }
    for operation in OPERATIONS:
        assert (
            operation.method,
            (PREFIX + operation.path).replace("{", "<").replace("}", ">"),
        ) in rules
        assert callable(HANDLERS[operation.name])
    assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS)


def test_the_openapi_document_lists_every_operation_and_error_status(ada: Caller) -> None:
    document = ada.get(f"{PREFIX}/openapi.json").get_json()
    assert document["openapi"] == "3.1.0"
    for operation in OPERATIONS:
        told = document["paths"][PREFIX + operation.path][operation.method.lower()]
        assert told["operationId"] == operation.name
        assert set(told["responses"]) >= {
            str(ERROR_CODES[error].http_status) for error in operation.errors
        }
        assert "401" in told["responses"]


def test_every_route_needs_an_api_key_and_refuses_other_methods(app: Flask, admin: Caller) -> None:
    anonymous = Caller(app, None)
    for operation in OPERATIONS:
        path = PREFIX + operation.path.replace("{user}", "ada").replace("{", "").replace("}", "")
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"):
            assert anonymous.ask(method, path).status_code == 401
        assert admin.ask("OPTIONS", path).status_code == 405
    assert anonymous.get(f"{PREFIX}/openapi.json").status_code == 401


def test_a_users_api_key_grants_nothing_of_another_user(
    runtime: Runtime, app: Flask, ready: Caller
) -> None:
    bob = user_caller(runtime, app, "bob")
    for operation in OPERATIONS:
        path = PREFIX + operation.path.replace("{user}", "ada").replace("{", "").replace("}", "")
        answer = bob.ask(operation.method, path, json={})
        if operation.name == "whoami":
            assert answer.get_json()["user"] == "bob"
        elif operation.name == "bases":
            assert answer.status_code == 200  # It holds nothing of any user.
        else:
            assert answer.status_code == 403, path
    assert [user.id for user in runtime.users()] == ["ada"]


# Validation

WRONG = {
    "an unknown key": ({"prompt": "Hi", "temprature": 1}, "temprature"),
    "a missing key": ({}, "prompt"),
    "a number as text": ({"prompt": "Hi", "seed": "1"}, "seed"),
    "a truth as a number": ({"prompt": "Hi", "seed": True}, "seed"),
    "out of bounds": ({"prompt": "Hi", "temperature": 11}, "temperature"),
    "an unknown key inside": (
        {"prompt": [{"role": "user", "content": "Hi", "name": "x"}]},
        "prompt[0].name",
    ),
    "an unknown role": ({"prompt": [{"role": "robot", "content": "Hi"}]}, "prompt[0].role"),
    "not text": ({"prompt": "Hi", "stop": ["\0"]}, "stop[0]"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_invalid_body_names_the_field_and_creates_no_user(
    ada: Caller, runtime: Runtime, wrong: str
) -> None:
    body, named = WRONG[wrong]
    answer = ada.post(f"{ADA}/chat", body)
    assert answer.status_code == 400
    error = answer.get_json()["error"]
    assert named in error["message"]
    assert error["kind"] == "InvalidInput"
    assert error["hint"]
    assert runtime.users() == ()


def test_no_error_repeats_the_request(ready: Caller) -> None:
    secret = "my secret is 4711"
    for path, body in (
        ("chat", {"prompt": secret, "temperature": secret}),
        ("chat", {"prompt": secret * 5000}),
        ("turns/last/feedback", {"rating": secret}),
        ("turns/last/feedback", {"comment": secret * 500}),
        ("teach", {"prompt": secret, "answer": 5}),
        ("remember", {"text": secret, "answer": secret}),
    ):
        answer = ready.post(f"{ADA}/{path}", body)
        assert answer.status_code == 400
        assert secret not in answer.text


def test_query_parameters_are_validated_as_strictly(ready: Caller) -> None:
    for query in (
        "limit=0",
        "limit=ten",
        "limit=1&limit=2",
        "curent=false",
        "current=yes",
        "limit=1e3000",
        "after=%00",
    ):
        assert ready.get(f"{ADA}/signals?{query}").status_code in (400, 404), query
    assert len(ready.get(f"{ADA}/signals?limit=2&current=false").get_json()["items"]) == 2


def test_a_last_page_of_users_that_is_full_names_no_next_one(app: Flask, runtime: Runtime) -> None:
    for user in ("ada", "bo", "cy"):
        runtime.user(user)
    admin = admin_caller(runtime, app)
    for limit, following in ((2, "bo"), (3, None), (4, None)):
        page = admin.get(f"{PREFIX}/users?limit={limit}").get_json()
        assert page["next"] == following
        assert len(page["items"]) == min(limit, 3)


@pytest.mark.parametrize(("method", "status"), [("GET", 404), ("PATCH", 405)])
def test_an_unknown_address_is_an_error_with_a_hint(ada: Caller, method: str, status: int) -> None:
    path = f"{ADA}/nothing" if status == 404 else ADA
    refused = ada.ask(method, path)
    assert refused.status_code == status
    assert refused.get_json()["error"]["hint"]


@pytest.mark.parametrize("path", ["turns", "conversations", "signals", "signal-statuses"])
def test_pages_continue_to_the_end(ready: Caller, path: str) -> None:
    whole = ready.get(f"{ADA}/{path}").get_json()
    assert whole["next"] is None
    pages: list[Any] = []
    after = ""
    while True:
        page = ready.get(f"{ADA}/{path}?limit=2{after}").get_json()
        pages += page["items"]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert pages == whole["items"]
    assert len(pages) == 5


def test_the_command_line_prints_what_the_api_answers(
    ready: Caller, runtime: Runtime, app: Flask
) -> None:
    user = runtime.user("ada")
    user.remember("My dog is called Biscuit.")
    user.learn()
    turn = user.chat("And now?").turn_id
    admin, where = admin_caller(runtime, app), ["--home", str(runtime.settings.home)]

    def shown(*command: str) -> Any:
        result = CliRunner().invoke(
            cli, [*command, *where, "--backend=fake", "--user=ada", "--json"]
        )
        return json.loads(result.stdout)

    def answered(path: str) -> Any:
        return admin.get(f"{PREFIX}{path}").get_json()

    assert shown("why", turn) == answered(f"/users/ada/turns/{turn}/why")
    assert shown("signals")["signals"] == answered("/users/ada/signal-statuses")["items"]
    assert shown("memory")["items"] == answered("/users/ada/items")["items"]
    assert shown("stack")["pending"] == answered("/users/ada/pending")["triggers"]
    assert shown("users") == {"users": (page := answered("/users"))["items"], "next": page["next"]}
    (printed,), activity = shown("activity")["users"], answered("/users/ada/activity")
    period = {"since": activity["since"], "until": activity["until"]}
    assert {**printed, **period} == activity
    assert activity["undo"]
    for name in ("turns", "revisions"):
        # The command adds the feedback on a turn, and whether a revision is live.
        wanted = answered(f"/users/ada/{name}")["items"]
        pairs = zip(shown(name)[name], wanted, strict=True)
        assert all(printed.items() >= known.items() for printed, known in pairs)
    body = {"prompt": "What else?", "a": "live", "b": "base"}
    blind = ready.post(f"{ADA}/comparisons", body).get_json()
    compared = shown("compare", "What else?", "live", "base")
    assert {(each["name"], each["text"]) for each in compared["answers"]} == {
        (each["name"], each["text"]) for each in blind["answers"]
    }
    assert {*compared} - {"choice"} == {*blind} - {"id"}


# Jobs


def test_a_learn_is_a_job_with_progress_events(ready: Caller, runtime: Runtime) -> None:
    begun = ready.post(f"{ADA}/learns", {})
    assert begun.status_code == 202
    job = begun.get_json()
    assert begun.headers["Location"] == f"{ADA}/jobs/{job['id']}"
    told = events(ready.get(f"{begun.headers['Location']}/events").text)
    assert {name for name, _ in told} == {"job"}
    last = told[-1][1]
    assert (last["state"], last["report"]["live"]) == ("done", True)
    assert last == wait_for_job(ready, job)
    assert [each["id"] for each in ready.get(f"{ADA}/jobs").get_json()["items"]] == [job["id"]]
    assert runtime.user("ada").stack().entries[0].revision == last["report"]["revision"]


def test_a_failed_learn_reports_its_reason_in_the_job(ada: Caller, runtime: Runtime) -> None:
    runtime.user("ada")
    job = wait_for_job(ada, ada.post(f"{ADA}/learns", {"layer": "style"}).get_json())
    assert (job["state"], job["error"]["kind"], job["report"]) == ("failed", "NothingToLearn", None)


def test_former_names_of_fields_are_sent_for_one_release(ready: Caller) -> None:
    pending = ready.get(f"{ADA}/pending").get_json()
    job = wait_for_job(ready, ready.post(f"{ADA}/forgets", {"item": "last"}).get_json())
    assert (job["ended"], job["forgotten"]) == (job["ended_at"], job["forget_report"])
    assert pending["news"] == pending["triggers"] != []
    assert pending.keys() >= {"learned", "last_learned_at", "seconds", "mean_build_seconds"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"{PREFIX}/token", f"{PREFIX}/whoami"),
        (f"{ADA}/lessons", f"{ADA}/signal-statuses"),
        (f"{ADA}/learning", f"{ADA}/training-status"),
        (f"{ADA}/digest?until=2026-01-01T00:00:00Z", f"{ADA}/activity?until=2026-01-01T00:00:00Z"),
    ],
)
def test_former_paths_are_answered_for_one_release(ready: Caller, old: str, new: str) -> None:
    assert ready.get(old).status_code == 200
    assert ready.get(old).get_json() == ready.get(new).get_json()


def test_former_path_of_the_review_of_a_probation_is_answered(ready: Caller) -> None:
    answers = [ready.post(f"{ADA}/{path}") for path in ("review", "review-probation")]
    assert {each.status_code for each in answers} == {200}


def test_former_path_and_field_of_implicit_feedback_work_for_one_release(ready: Caller) -> None:
    for path, field in (("observe", "seen"), ("implicit-feedback", "event")):
        answer = ready.post(f"{ADA}/turns/last/{path}", {field: "copied"})
        assert answer.get_json() == {"signal": None}


@pytest.mark.parametrize("name", ["max_memory_mb", "memory"])
def test_the_memory_budget_accepts_its_former_name_for_one_release(
    ready: Caller, name: str
) -> None:
    job = wait_for_job(ready, ready.post(f"{ADA}/learns", {name: 0.001}).get_json())
    assert [each["code"] for each in job["report"]["reasons"]] == ["memory_budget"]


def test_a_job_can_be_cancelled_and_another_users_is_not_found(
    ready: Caller, runtime: Runtime, app: Flask, admin: Caller
) -> None:
    job = ready.post(f"{ADA}/practices", {"skill": "sums", "verifier": "sums"}).get_json()
    runtime.user("bob")
    assert admin.get(f"{PREFIX}/users/bob/jobs/{job['id']}").status_code == 404
    second = ready.post(f"{ADA}/learns", {})
    assert (second.status_code, second.get_json()["error"]["kind"]) == (423, "Busy")
    assert ready.ask("DELETE", f"{ADA}/jobs/{job['id']}").get_json()["state"] in (
        "stopping",
        "done",
        "cancelled",
    )
    assert wait_for_job(ready, job)["state"] in ("cancelled", "done")


def test_a_learn_of_several_users_is_an_administrators_job(
    ready: Caller, runtime: Runtime, admin: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.user("bob")
    learn_many = Runtime.learn_many

    def slowly(
        runtime: Runtime, users: object, layer: object, *, cancelled: Any, **asked: Any
    ) -> Any:
        while not cancelled():
            time.sleep(0.005)
        return learn_many(runtime, users, layer, **asked)

    monkeypatch.setattr(Runtime, "learn_many", slowly)
    begun = admin.post(f"{PREFIX}/learns", {"users": ["bob", "ada"]})
    job = begun.get_json()
    assert (begun.status_code, job["user"], job["users"]) == (202, None, ["bob", "ada"])
    assert begun.headers["Location"] == f"{PREFIX}/jobs/{job['id']}"
    # It is each user's job as well, and none of them sees the others in it.
    assert ready.post(f"{ADA}/learns", {}).status_code == 423
    assert admin.post(f"{PREFIX}/learns", {"users": ["cy"]}).status_code == 423
    assert ready.get(f"{ADA}/jobs").get_json()["items"] == []
    assert ready.get(f"{ADA}/jobs/{job['id']}").status_code == 404
    assert ready.get(begun.headers["Location"]).status_code == 403
    assert admin.ask("DELETE", begun.headers["Location"]).get_json()["state"] == "stopping"
    last = events(admin.get(f"{begun.headers['Location']}/events").text)[-1][1]
    assert (last["state"], [each["error"] for each in last["reports"]]) == (
        "done",
        ["NothingToLearn", ""],
    )
    assert [each["id"] for each in admin.get(f"{PREFIX}/jobs").get_json()["items"]] == [job["id"]]
    wait_for_job(ready, ready.post(f"{ADA}/forgets", {"item": "last"}).get_json())
    assert admin.get(begun.headers["Location"]).status_code == 404


def test_the_administrator_sees_and_cancels_any_job(ready: Caller, admin: Caller) -> None:
    job = ready.post(f"{ADA}/practices", {"skill": "sums", "verifier": "sums"}).get_json()
    assert admin.get(f"{PREFIX}/jobs").get_json()["items"][0]["user"] == "ada"
    assert admin.ask("DELETE", f"{PREFIX}/jobs/{job['id']}").status_code == 200
    assert wait_for_job(ready, job)["state"] in ("cancelled", "done")


def test_a_bug_in_a_learn_reveals_no_details(
    ready: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = "what Ada said, number 4711"

    def broken(self: object, layer: str | None, **asked: object) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(personalpeft.User, "learn", broken)
    job = wait_for_job(ready, ready.post(f"{ADA}/learns", {}).get_json())
    assert (job["state"], job["error"]["kind"]) == ("failed", "Bug")
    assert "4711" not in json.dumps(job) + caplog.text
    assert "RuntimeError" in caplog.text


def test_a_stack_file_is_cacheable_by_its_requester_only(admin: Caller, runtime: Runtime) -> None:
    files = {"adapter_config.json": b"{}\n", "adapter_model.safetensors": b"tensors"}
    stack = published.PublishedAdapter(published.compute_digest(files), 8, files)
    with closing(
        published.PublishedAdapterFolder(runtime.settings.cache / "served", "kept")
    ) as folders:
        folders.put(stack)
        answer = admin.get(f"{PREFIX}/published/{stack.digest}/adapter_model.safetensors")
    assert (answer.status_code, answer.data, answer.mimetype) == (
        200,
        b"tensors",
        "application/octet-stream",
    )
    assert answer.headers["Content-Length"] == "7"
    assert answer.headers["Cache-Control"] == "private, max-age=31536000, immutable"
    gone = admin.get(f"{PREFIX}/published/{stack.digest}/adapter_model.safetensors")
    assert (gone.status_code, gone.headers["Cache-Control"]) == (404, "no-store")


def test_a_workers_api_key_reads_stacks_and_nothing_else(admin: Caller, runtime: Runtime) -> None:
    worker = replace(admin, secret=runtime.api_keys.create(None, worker=True)[1])
    files = {"adapter_config.json": b"{}\n", "adapter_model.safetensors": b"tensors"}
    stack = published.PublishedAdapter(published.compute_digest(files), 8, files)
    with closing(
        published.PublishedAdapterFolder(runtime.settings.cache / "served", "kept")
    ) as folders:
        folders.put(stack)
        assert worker.get(f"{PREFIX}/published/{stack.digest}/adapter_config.json").data == b"{}\n"
    for rule in admin.app.url_map.iter_rules():
        path = re.sub("<[^>]*>", "ada", rule.rule)
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}:
            anonymous = replace(admin, secret=None).ask(method, path).status_code
            if anonymous == 401 and not re.search("/(published|served)/", path):
                assert worker.ask(method, path).status_code == 403, (method, path)


# Streams and comparisons


def test_a_stream_starts_with_its_id_and_ends_with_its_turn(ada: Caller, runtime: Runtime) -> None:
    told = events(ada.post(f"{ADA}/chat/stream", {"prompt": "Hello", "temperature": 0}).text)
    assert [name for name, _ in told][:2] == ["begun", "piece"]
    name, last = told[-1]
    assert name == "ended"
    assert last["reply"]["turn_id"] == runtime.user("ada").turns()[0].id
    assert (
        "".join(value["text"] for kind, value in told if kind == "piece") == last["reply"]["text"]
    )
    assert ada.ask("DELETE", f"{ADA}/streams/{told[0][1]['stream']}").get_json() == {
        "stopped": False
    }


def test_an_error_before_the_first_chunk_has_a_status(ada: Caller) -> None:
    assert ada.post(f"{ADA}/chat/stream", {"prompt": "word " * 15_000}).status_code == 400


def test_a_disconnected_reader_leaves_a_cancelled_turn(
    ada: Caller, runtime: Runtime, app: Flask
) -> None:
    headers = {"Authorization": f"Bearer {ada.secret}"}
    answer = app.test_client().post(
        f"{ADA}/chat/stream",
        json={"prompt": "Tell me of ducks and geese."},
        headers=headers,
        buffered=False,
    )
    assert b"begun" in next(answer.response)  # type: ignore[call-overload]
    assert b"piece" in next(answer.response)  # type: ignore[call-overload]
    answer.close()
    assert [turn.finish_reason for turn in runtime.user("ada").turns()] == ["cancelled"]


def test_a_comparison_reveals_its_answers_only_after_the_choice(
    ready: Caller, runtime: Runtime
) -> None:
    head = runtime.user("ada").learn().revision
    answer = ready.post(f"{ADA}/comparisons", {"prompt": "How do I boil an egg?"})
    assert answer.status_code == 201
    assert str(head) not in answer.text
    found = answer.get_json()
    choice = ready.post(f"{ADA}/comparisons/{found['id']}/choice", {"which": 2})
    assert {choice.get_json()["chosen"], choice.get_json()["other"]} == {head, "base"}
    signals = len(runtime.user("ada").signals())
    again = ready.post(f"{ADA}/comparisons/{found['id']}/choice", {"which": 1})
    assert again.status_code == 404
    assert len(runtime.user("ada").signals()) == signals


def test_a_comparison_can_be_chosen_after_a_mistake_and_old_ones_are_dropped(
    ready: Caller, runtime: Runtime
) -> None:
    assert runtime.user("ada").learn().live
    asked = {"prompt": "How do I boil an egg?"}
    first, second = (ready.post(f"{ADA}/comparisons", asked).get_json()["id"] for _ in range(2))
    assert ready.post(f"{ADA}/comparisons/{first}/choice", {"which": "neither"}).status_code == 400
    assert ready.post(f"{ADA}/comparisons/{first}/choice", {"which": 1}).status_code == 201
    for _ in range(MAX_PER_USER):
        ready.post(f"{ADA}/comparisons", {**asked, "max_tokens": 1})
    assert ready.post(f"{ADA}/comparisons/{second}/choice", {"which": 2}).status_code == 404


def test_a_comparison_is_gone_once_its_user_has_forgotten_something(
    ready: Caller, runtime: Runtime
) -> None:
    assert runtime.user("ada").learn().live
    asked = {"prompt": "How do I boil an egg?"}
    name = ready.post(f"{ADA}/comparisons", asked).get_json()["id"]
    # As another process does.
    runtime.user("ada").forget(runtime.user("ada").turns()[-1].id)
    chosen = [
        ready.post(f"{ADA}/comparisons/{name}/choice", {"which": 1}).status_code for _ in range(2)
    ]
    assert chosen == [410, 404]


def test_the_former_module_of_the_blueprint_works_for_one_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "personalpeft_app.http.api_v1.routes"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(DeprecationWarning, match="blueprint"):
        former = importlib.import_module(name)
    assert former.ApiV1 is ApiV1


def test_an_api_key_of_a_new_user_names_no_other_user(
    app: Flask, admin: Caller, runtime: Runtime
) -> None:
    for name in ("cyrus", "cyan"):
        runtime.user(name)
    own = replace(admin, secret=runtime.api_keys.create("cy")[1])
    for rule in app.url_map.iter_rules():
        if "<user>" in rule.rule and "GET" in (rule.methods or ()):
            path = re.sub("<[^>]*>", "x1", rule.rule.replace("<user>", "cy"))
            got = own.get(path).get_data()
            assert b"cyrus" not in got, path
            assert b"cyan" not in got, path
    assert own.get("/api/v1/users/cy/turns").status_code == 200
