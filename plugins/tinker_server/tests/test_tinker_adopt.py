"""Saved weights become a layer of a user: by the gate, or because the user accepts them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tinker_makers import BASE, TinkerServer, datum, declare_entry_points

from personalpeft import Runtime, plugins
from personalpeft.base_models.chat_template import render_chat
from personalpeft.types import Message
from personalpeft_app.cli import cli

Start = Callable[[], TinkerServer]
LAYER = "skill.harbour"
QUESTIONS = [f"What do you say to guest {number}?" for number in range(12)]
ANSWER = "Ahoy, and welcome aboard!"


@pytest.fixture
def server(start: Start, monkeypatch: pytest.MonkeyPatch) -> TinkerServer:
    """A server on a home of the test's own, and the commands that pyproject.toml declares."""
    declare_entry_points(monkeypatch, plugins.COMMANDS)
    opened = start()
    monkeypatch.setenv("PERSONALPEFT_HOME", str(opened.runtime.settings.home))
    monkeypatch.setenv("PERSONALPEFT_BASE", BASE)
    return opened


def lessons(runtime: Runtime, *, away: bool = False) -> list[Any]:
    """Return some of the lessons as a client sends them, or to train away from them."""
    base, encode = runtime.base(), runtime.learning_engine().backend.encode
    data = []
    for question in QUESTIONS[:4]:
        prompt = encode(render_chat(base, [Message("user", question)]))
        answer = encode(ANSWER + base.stop_tokens[0])
        weights = [0.0] * (len(prompt) - 1) + [-1.0 if away else 1.0] * len(answer)
        data.append(datum([*prompt, *answer], weights=weights))
    return data


def adopt(path: str, *options: str, user: str = "ada") -> Any:
    """Run the command, and return its JSON, or the message of its error."""
    line = ["adopt", path, "--layer", LAYER, "--user", user, "--json", *options]
    done = CliRunner().invoke(cli, line)
    return json.loads(done.stdout) if done.exit_code == 0 else done.stderr


def live(runtime: Runtime, user: str = "ada") -> list[str]:
    return [entry.revision for entry in runtime.user(user).stack().entries]


def test_the_gate_promotes_weights_that_answer_unseen_lessons_better(
    server: TinkerServer,
) -> None:
    """While the server runs."""
    user = server.runtime.user("ada")
    for question in QUESTIONS:
        user.teach(question, ANSWER, skill=LAYER.removeprefix("skill."))
    run = server.session("ada").run(rank=8)
    run.train(10, lessons(server.runtime, away=True))
    worse = run.save("away")
    other = server.session("ada").run(rank=8)
    other.train(10, lessons(server.runtime))
    better = other.save("towards", "save_weights_for_sampler")
    refused = adopt(worse)
    assert (refused["outcome"], refused["live"]) == ("refused", False)
    assert live(server.runtime) == []
    promoted = adopt(better)
    assert (promoted["outcome"], promoted["live"]) == ("promoted", True)
    assert live(server.runtime) == [promoted["revision"]]
    assert {promoted["revision"], refused["revision"]} == {each.id for each in user.revisions()}
    run.train(1)


@pytest.mark.exhaustive
def test_without_lessons_the_user_can_accept_the_weights(server: TinkerServer) -> None:
    server.runtime.user("ada")
    run = server.session("ada").run()
    run.train(2)
    path = run.save("good")
    assert adopt(path)["outcome"] == "abstained"
    assert live(server.runtime) == []
    accepted = adopt(path, "--accept")
    assert accepted["accepted"]
    assert live(server.runtime) == [accepted["revision"]]


@pytest.mark.exhaustive
def test_weights_that_cannot_be_adopted_are_named(server: TinkerServer, start: Start) -> None:
    server.runtime.user("ada")
    server.runtime.user("bo")
    session = server.session("ada")
    run = session.run()
    path = run.save("mine")
    body = {"tinker_path": path, "user": "ada", "layer": "bogus layer"}
    refused = session.client.ask("POST", "personal/adopt", body)
    assert (refused.status_code, "bogus layer" in refused.text) == (400, True)
    assert "no weights" in adopt("tinker://nowhere/weights/mine")
    assert "no user" in adopt(path, user="carl").lower()
    adopt(path, "--accept")
    run.call("load_weights", path=f"personalpeft://ada/{LAYER}", optimizer=False)
    assert "trained from a layer of ada" in adopt(run.save("second"), "--accept", user="bo")
    assert live(server.runtime, "bo") == []
    server.runtime.forget_user("ada")
    # The server has not noticed yet.
    assert "no weights" in adopt(path, "--accept", user="bo")
    assert live(server.runtime, "bo") == []


def test_a_home_that_no_client_used_has_nothing_to_adopt(
    server: TinkerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSONALPEFT_HOME", str(tmp_path / "other"))
    assert "no home" in adopt("tinker://run/weights/mine").lower()
    done = CliRunner().invoke(cli, ["remember", "I like tea.", "--user", "ada"])
    assert done.exit_code == 0
    assert "No client has saved weights" in adopt("tinker://run/weights/mine")
    assert not (tmp_path / "other" / "tinker").exists()
