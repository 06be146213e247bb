"""Each face gives each user the reply that they get alone, while all users ask at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from backend_makers import random_adapter
from flask import Flask
from http_makers import Caller, admin_caller, user_caller
from prometheus_client.parser import text_string_to_metric_families
from runtime_makers import quick_card

import personalpeft
from personalpeft import Runtime, Serving
from personalpeft.adapters.formats.peft import export_peft
from personalpeft_app.http.api_v1.blueprint import ApiV1
from personalpeft_app.http.server import make_app

USERS = ("ada", "bo", "cy", "di")
ROUNDS = 4
Ask: TypeAlias = Callable[[Caller, str], str]


def _post(caller: Caller, path: str, body: dict[str, Any]) -> Any:
    answer = caller.post(path, {"temperature": 0, **body})
    assert answer.status_code == 200, answer.get_data(as_text=True)
    return answer.get_json()


def _chat(caller: Caller, user: str) -> str:
    messages = [{"role": "user", "content": "Hello"}]
    found = _post(caller, "/v1/chat/completions", {"model": user, "messages": messages})
    return str(found["choices"][0]["message"]["content"])


def _stream(caller: Caller, user: str) -> str:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": user, "messages": messages, "temperature": 0, "stream": True}
    answer = caller.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.get_data(as_text=True)
    events = answer.get_data(as_text=True).split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if "{" in event]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def _response(caller: Caller, user: str) -> str:
    found = _post(caller, "/v1/responses", {"model": user, "input": "Hello"})
    return str(found["output"][0]["content"][0]["text"])


def _message(caller: Caller, user: str) -> str:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": user, "messages": messages, "max_tokens": 64}
    return str(_post(caller, "/v1/messages", body)["content"][0]["text"])


def _management(caller: Caller, user: str) -> str:
    return str(_post(caller, f"/api/v1/users/{user}/chat", {"prompt": "Hello"})["text"])


FACES: dict[str, Ask] = {
    "chat completions": _chat,
    "streamed chat completions": _stream,
    "responses": _response,
    "messages": _message,
    "management": _management,
}


@pytest.fixture(
    params=[
        "fake",
        pytest.param("torch", marks=pytest.mark.exhaustive),
        pytest.param("llamacpp", marks=pytest.mark.exhaustive),
    ]
)
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runtime]:
    """A runtime on each backend, the real ones with the tiny base. Users compete for two slots."""
    base: str | Path = "fake"
    if request.param != "fake":
        request.getfixturevalue("tiny_base")
        base = quick_card(tmp_path)
    serving = Serving(slots=2, max_batch=3)
    with personalpeft.open(tmp_path / "home", base, request.param, serving=serving) as opened:
        yield opened


@pytest.fixture
def app(runtime: Runtime) -> Iterator[Flask]:
    """All faces."""
    api = ApiV1(runtime)
    yield make_app(runtime, more=[api.blueprint])
    api.close()


@pytest.fixture
def callers(runtime: Runtime, app: Flask, tmp_path: Path) -> dict[str, Caller]:
    """Users whose rules differ, with a model also their layers, so that every reply differs too."""
    found = {}
    for number, user in enumerate(USERS):
        one = runtime.user(user)
        if runtime.base().card.name != "fake":
            one.import_peft(_peft_folder(runtime, tmp_path, seed=number))
        one.feedback(one.chat("Hello", temperature=0), comment=f"Call me {user.upper()}.")
        found[user] = user_caller(runtime, app, user)
    return found


def _peft_folder(runtime: Runtime, folder: Path, *, seed: int) -> Path:
    """Return a PEFT folder of random weights."""
    adapter = random_adapter(runtime.engine().backend, seed)
    base = runtime.base()
    folder = folder / f"adapter-{seed}"
    export_peft(adapter, base.architecture, folder, base_name=base.card.name)
    return folder


def test_replies_under_load_are_those_of_a_user_alone(callers: dict[str, Caller]) -> None:
    wanted = {
        (face, user): ask(callers[user], user) for face, ask in FACES.items() for user in USERS
    }
    for face in FACES:
        assert len({wanted[face, user] for user in USERS}) == len(USERS)
    jobs = [*wanted] * ROUNDS
    with ThreadPoolExecutor(len(USERS) * 2) as pool:
        found = list(pool.map(lambda job: FACES[job[0]](callers[job[1]], job[1]), jobs))
    assert found == [wanted[job] for job in jobs]


def test_no_face_answers_for_another_user(callers: dict[str, Caller]) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}),
    ):
        theirs = callers["bo"].post(path, {"model": "ada", **body})
        nobody = callers["bo"].post(path, {"model": "no-such-user", **body})
        assert (theirs.status_code, nobody.status_code) == (404, 404)
        # The answers do not tell whether the user exists.
        assert theirs.get_data(as_text=True).replace("ada", "no-such-user") == nobody.get_data(
            as_text=True
        )


@pytest.mark.parametrize("runtime", ["torch", "llamacpp"], indirect=True)
def test_a_prompt_is_cached_for_its_user_and_stack_alone(
    runtime: Runtime, app: Flask, tmp_path: Path
) -> None:
    """So the time of a reply does not tell what other users asked."""
    folder = _peft_folder(runtime, tmp_path, seed=1)
    callers = {user: user_caller(runtime, app, user) for user in ("ada", "bo")}
    for user in callers:
        runtime.user(user).import_peft(folder)
    admin = admin_caller(runtime, app)

    def count_hits() -> float:
        """Return how many prompt tokens were found in the cache so far."""
        families = text_string_to_metric_families(admin.get("/metrics").get_data(as_text=True))
        (found,) = (each for each in families if each.name == "personalpeft:prefix_cache_hits")
        return found.samples[0].value

    def ask(user: str) -> float:
        """Return how many tokens of a long prompt were found in the cache."""
        before = count_hits()
        messages = [{"role": "user", "content": "x" * 300}]
        _post(callers[user], "/v1/chat/completions", {"model": user, "messages": messages})
        return count_hits() - before

    assert [ask("ada"), ask("bo")] == [0, 0]
    assert min(ask("ada"), ask("bo")) > 0
    runtime.user("ada").set_weight("style", 0.5)
    assert ask("ada") == 0
    assert ask("ada") > 0
