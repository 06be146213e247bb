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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from flask import Flask
from http_makers import Caller, user_caller
from runtime_makers import correct, open_runtime

from personalpeft import PersonalPeftError, Runtime, file_system
from personalpeft_app.cli import cli
from personalpeft_app.http.api_v1.blueprint import ApiV1
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
    monkeypatch.setattr(file_system, "shared_memory", lambda: folder)
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
    memory = file_system.shared_memory()
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


@dataclass(frozen=True)
class Planted:
    """A home with words and a key in it, files beside it, and ids of what holds the words."""

    folder: Path
    ids: dict[str, str]
    key: str

    def run(self, arguments: str, stdin: str | None = None) -> Result:
        """Run a command with ``--json`` on the fake backend. ``{name}`` is an id or a path."""
        environment = {
            "PERSONALPEFT_HOME": str(self.folder / "home"),
            "PERSONALPEFT_CACHE": str(self.folder / "cache"),
            "PERSONALPEFT_USER": "ada",
        }
        given = [each.format(**self.ids, folder=self.folder) for each in arguments.split()]
        return CliRunner().invoke(
            cli, ["--backend", "fake", "--json", *given], input=stdin, env=environment
        )


@pytest.fixture(scope="module")
def planted_home(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    folder = tmp_path_factory.mktemp("planted")
    with open_runtime(folder / "home") as runtime:
        ada = runtime.user("ada")
        ada.remember(f"My dog is called {WORDS}.")
        ada.teach(f"Who is {WORDS}?", f"{WORDS} is a dog.", skill="dogs")
        correct(ada)
        edit = ada.feedback(ada.chat(WORDS, temperature=0), edit=f"Ahoy! {WORDS}. Arrr!")
        ada.learn()
        ada.export(folder / "ada.personal")
        ada.export_peft(folder / "peft")
        runtime.maintenance.back_up(folder / "copies")
        ids = {
            "turn": ada.turns()[0].id,
            "revision": ada.revisions()[0].id,
            "edit": edit,
        }
        return Planted(folder, ids, runtime.api_keys.create("ada")[1])


# All commands whose task is not to print words, in an order in which each finds what it needs.
COMMANDS = (
    "stack",
    "revisions",
    "users",
    "models",
    "models list",
    "doctor",
    "verify",
    "rebuild --check {revision}",
    "set-weight style 0.5",
    "scope style near",
    "set-training on",
    "rollback style",
    "rollback style --to {revision}",
    "publish --to {folder}/published",
    "api-key list",
    "backup {folder}/copies",
    "gc",
    "path",
    "export {folder}/new.personal",
    "export-peft {folder}/new-peft",
    "import {folder}/ada.personal --as bo",
    "import-peft {folder}/peft --layer skill.other",
    "daemon status",
    "daemon run-once",
    "forget {edit} --yes --later --certificate {folder}/erased.json",
    "verify-certificate {folder}/erased.json",
    "forget-user bo --yes",
    "completion bash",
)
# These fail, and what they were given or found holds the words. The second part is standard input.
FAILING = {
    "import {folder}/ada.personal": "",
    "import-peft {folder}/home": "",
    "import-gguf {folder}/ada.personal": "",
    "export {folder}/ada.personal": "",
    "export-gguf {folder}/lora.gguf": "",
    "export-merged {folder}/peft": "",
    "restore {folder}/copies": "",
    "rollback nosuch": "",
    "rebuild --check nosuch": "",
    "rebase --to nosuch": "",
    "practice nosuch": "",
    "ask --max-tokens 0 -": WORDS,
    "ask --system x --user bo! -": WORDS,
    "remember -": f"{WORDS} " * 20_000,
    "teach - {turn}{turn} --skill Not-a-skill": WORDS,
    "feedback nosuch --edit -": WORDS,
    "feedback {turn} --edit -": "\0" + WORDS,
    "forget s_nosuch --yes": "",
    "encrypt --key paper": "",
    "verify-certificate {folder}/ada.personal": "",
}
# They print words: that is what they are for. Or they run until they are stopped.
PRINT_WORDS = {
    "chat",
    "compare",
    "learn",
    "memory",
    "activity",
    "retract",
    "signals",
    "turns",
    "why",
}
RUN_ON = {"bench", "demo", "serve", "tui"}


def test_every_command_is_tried_or_is_there_to_print_words() -> None:
    tried = {line.split()[0] for line in (*COMMANDS, *FAILING)}
    assert tried | PRINT_WORDS | RUN_ON == cli.commands.keys()


def test_commands_about_the_program_print_no_secret(planted_home: Planted) -> None:
    for command in COMMANDS:
        found = planted_home.run(command)
        assert found.exit_code == 0, (command, found.output)
        for each in (WORDS, planted_home.key, ENVIRONMENT_KEY):
            assert each not in found.output, command


def test_failing_commands_print_no_secret(planted_home: Planted) -> None:
    for command, stdin in FAILING.items():
        found = planted_home.run(command, stdin)
        assert found.exit_code not in (0, 1), (command, found.output)
        assert json.loads(found.stderr)["error"]["message"], command
        for each in (WORDS, planted_home.key, ENVIRONMENT_KEY):
            assert each not in found.output, command


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
