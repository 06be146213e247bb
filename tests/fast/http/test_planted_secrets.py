"""Words of a user, API keys and secrets of the environment stay where they belong.

They are planted, and then looked for in logs, errors, metrics, temporary files, the JSON of commands
about the program, and the titles of processes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from flask import Flask
from http_makers import Caller, user_caller
from runtime_makers import correct, open_runtime

from personalpeft import PersonalPeftError, Runtime, host
from personalpeft_app.cli import cli
from personalpeft_app.http.api_v1.routes import ApiV1
from personalpeft_app.http.server import make_app

WORDS = "Biscuit-the-dog-9172"
ENVIRONMENT_KEY = "sk-planted-51d0"


@pytest.fixture
def app(runtime: Runtime) -> Iterator[Flask]:
    """All faces."""
    api = ApiV1(runtime)
    yield make_app(runtime, more=[api.blueprint])
    api.close()


@pytest.fixture(autouse=True)
def planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Path:
    """Plant a key in the environment, log everything, and return the folder of temporary files."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("OPENAI_API_KEY", ENVIRONMENT_KEY)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def holders(folder: Path, *secrets: str) -> list[Path]:
    """Return the files below a folder that hold one of the secrets."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and any(each.encode() in path.read_bytes() for each in secrets)
    ]


# Each request is refused, and each names the words somewhere.
REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a wrong body": ("POST", "/v1/chat/completions", {"json": {"model": WORDS, "messages": 3}}),
    "an unknown model": (
        "POST",
        "/v1/chat/completions",
        {"json": {"model": "ada", "messages": [{"role": WORDS, "content": WORDS}]}},
    ),
    "malformed JSON": ("POST", "/v1/responses", {"data": f'{{"input": "{WORDS}"'}),
    "a wrong type": ("POST", "/v1/messages", {"json": {"model": "ada", "messages": WORDS}}),
    "a wrong value": ("POST", "/api/v1/users/ada/chat", {"json": {"prompt": [WORDS]}}),
    "a file of another type": ("POST", "/api/v1/import", {"data": WORDS}),
    "an adapter that is none": (
        "POST",
        "/api/v1/users/ada/peft?layer=style",
        {"data": WORDS, "content_type": "application/octet-stream"},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_request_repeats_no_word_and_no_key(
    case: str, runtime: Runtime, app: Flask, caplog: pytest.LogCaptureFixture
) -> None:
    method, path, body = REFUSED[case]
    caller = user_caller(runtime, app)
    answer = caller.ask(method, path, **body)
    assert 400 <= answer.status_code < 500
    assert WORDS not in answer.get_data(as_text=True)
    for each in (WORDS, str(caller.secret), ENVIRONMENT_KEY):
        assert each not in caplog.text


def test_secrets_of_a_session_stay_in_the_ledger(
    runtime: Runtime,
    app: Flask,
    admin: Caller,
    planted: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caller = user_caller(runtime, app)
    ada = runtime.user("ada")
    ada.remember(f"My dog is called {WORDS}.")
    ada.feedback(ada.chat(WORDS, temperature=0), comment=f"Say {WORDS} often.")
    correct(ada)
    ada.learn()
    sent = caller.post(
        "/v1/chat/completions",
        {"model": "ada", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 2},
    )
    assert sent.status_code == 200
    file = ada.export(tmp_path / "ada.personal").path
    with pytest.raises(PersonalPeftError) as caught:
        runtime.import_user(file)
    secrets = (WORDS, str(caller.secret), ENVIRONMENT_KEY)
    metrics = admin.get("/metrics").get_data(as_text=True)
    for each in secrets:
        assert each not in caplog.text
        assert each not in metrics
        assert each not in f"{caught.value.message} {caught.value.hint}"
    assert list(planted.iterdir()) == []
    # A key itself is stored nowhere, and the user's words in the database only.
    assert holders(runtime.settings.home, str(caller.secret), ENVIRONMENT_KEY) == []
    names = {path.name.partition("-")[0] for path in holders(runtime.settings.home, WORDS)}
    assert len(names) == 1, names


def test_files_of_users_that_are_sent_and_fetched_lie_in_memory(
    runtime: Runtime, app: Flask, admin: Caller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = host.shared_memory()
    if memory is None or shutil.disk_usage(memory).free < 1 << 30:
        pytest.skip("there is no room in memory for files")
    runtime.user("ada").remember(f"My dog is called {WORDS}.")
    # A file in the temporary folder would be an error.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    before = set(memory.iterdir())
    sent = admin.get("/api/v1/users/ada/export")
    assert sent.status_code == 200
    answer = admin.ask(
        "POST", "/api/v1/import?as_user=bo", data=sent.data, content_type="application/octet-stream"
    )
    assert answer.status_code == 201
    large = admin.ask(
        "POST", "/api/v1/import", data=bytes(1 << 20), content_type="application/octet-stream"
    )
    assert large.status_code == 422
    assert not [each for each in set(memory.iterdir()) - before if "private" in each.name]


@pytest.mark.parametrize("command", ["doctor", "models", "stack", "revisions"])
def test_json_about_the_program_holds_no_secret(command: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        ada.remember(f"My dog is called {WORDS}.")
        correct(ada)
        ada.learn()
        key = runtime.api_keys.create("ada")[1]
    environment = {"PERSONALPEFT_HOME": str(home), "PERSONALPEFT_USER": "ada"}
    found = CliRunner().invoke(cli, ["--backend", "fake", "--json", command], env=environment)
    json.loads(found.stdout)
    for each in (WORDS, key, ENVIRONMENT_KEY):
        assert each not in found.output


@pytest.mark.skipif(sys.platform != "linux", reason="lists /proc")
def test_titles_of_child_processes_hold_no_secret(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    start = subprocess.Popen.__init__

    def noted(self: Any, arguments: Any, *more: Any, **options: Any) -> None:
        start(self, arguments, *more, **options)
        titles.append(f"{arguments} {options.get('env') or os.environ}")

    monkeypatch.setattr(subprocess.Popen, "__init__", noted)
    monkeypatch.delenv("OPENAI_API_KEY")
    ada = runtime.user("ada")
    ada.feedback(ada.chat(WORDS, temperature=0), edit=f"Say {WORDS}.")
    correct(ada)
    ada.learn()
    file = ada.export(tmp_path / "ada.personal").path
    runtime.import_user(file, as_user="bo")
    assert not any(WORDS in each for each in titles)
    assert WORDS not in Path("/proc/self/cmdline").read_text("utf-8")
