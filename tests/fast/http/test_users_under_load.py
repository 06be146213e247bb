"""Each face gives each user the reply that they get alone, while all users ask at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import pytest
from flask import Flask
from http_makers import Caller, user_caller

from personalpeft import Runtime
from personalpeft_app.http.api_v1.routes import ApiV1
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
    "responses": _response,
    "messages": _message,
    "management": _management,
}


@pytest.fixture
def app(runtime: Runtime) -> Iterator[Flask]:
    """All faces."""
    api = ApiV1(runtime)
    yield make_app(runtime, more=[api.blueprint])
    api.close()


@pytest.fixture
def callers(runtime: Runtime, app: Flask) -> dict[str, Caller]:
    """Users whose rules differ, so that every reply differs too."""
    found = {}
    for user in USERS:
        one = runtime.user(user)
        one.feedback(one.chat("Hello", temperature=0), comment=f"Call me {user.upper()}.")
        found[user] = user_caller(runtime, app, user)
    return found


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
