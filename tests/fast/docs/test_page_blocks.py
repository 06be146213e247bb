"""Every command and Python block of a page runs, on the fake backend and in a temporary home.

The shell blocks run in bash, where ``personalpeft`` is a function that asks this process. The
tables below name what does not run, each with its reason.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import anthropic
import openai
import pytest
from click.testing import CliRunner

import personalpeft
from personalpeft import NothingToLearn, Runtime
from personalpeft.errors import ERROR_CODES
from personalpeft_app.cli import cli
from personalpeft_app.http.api_v1.blueprint import ApiV1
from personalpeft_app.http.concurrency import limiter_of
from personalpeft_app.http.server import make_app
from personalpeft_app.http.wsgi_server import Server

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or shutil.which("bash") is None, reason="the shell blocks need bash"
)

ROOT = Path(__file__).parents[3]
GENERATED = {"commands.md", "python.md"}
SEPARATE = {
    "own-base.md": "test_examples.py runs it on real engines, with models that it makes",
    "flask-thumbs.md": "test_examples.py sends requests to its app",
    "replicate.md": "test_litestream.py runs it with Litestream",
    "world-model.md": "the plugin's test_world_how_to.py runs it with TextWorld",
}
PAGES = [
    page
    for page in sorted(
        [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "plugins").rglob("README.md")]
    )
    if re.search(r"^```(sh|bash|console|python)$", page.read_text("utf-8"), re.MULTILINE)
    and not {page.name} & {*GENERATED, *SEPARATE}
    and "world_model" not in page.parts
]
PROGRAMS = {
    "pip": "needs a package registry",
    "make": "installs an environment of its own",
    "python": "starts a vLLM server, or asks for the path of a base's weights",
    "vllm": "needs a GPU or minutes; tests marked vllm run it",
    "ray": "starts a cluster",
    "serve": "starts Ray Serve",
    "personalpeft-ray-updates": "needs Ray's cluster; the plugin's own tests start one",
    "aws": "needs an account of a cloud",
    "curl": "asks a server; pages in SERVED have one, and curl runs there",
    "sudo": "changes the users of this system",
    "systemctl": "starts a service of the system",
}
COMMANDS = {
    "adopt": "needs weights that a client saved; test_tinker_adopt.py runs it",
    "serve": "runs until it is stopped; test_app_serve.py runs it",
    "daemon run": "runs until it is stopped; test_daemon_processes.py runs it",
    "demo": "needs the real base",
    "export-gguf": "the fake has no weights; test_llamacpp_runtime.py exports a tiny model",
    "export-merged": "the fake has no weights; test_llamacpp_runtime.py exports a tiny model",
    "practice": "needs a plugin, or a model that can solve a task; tests of practice run it",
}
# They write PEFT folders, and importing PEFT takes most of the time of this test.
LONG = {
    "check-and-repair.md",
    "engines.md",
    "family-server.md",
    "fleet.md",
    "move-a-user.md",
    "vllm-fleet.md",
}
BLOCKS = {
    "learn_on_cluster": "starts a cluster of Ray",
    ".venv-vllm/bin": "needs the environment that make vllm-env installs",
}
LANGUAGES = ("sh", "bash", "console", "python")

_NOTHING_TO_LEARN = ERROR_CODES[NothingToLearn].exit_code
_BASH = r"""
set -euo pipefail
personalpeft() {
  local variables=() name code
  for name in ${!PERSONALPEFT_@}; do variables+=("$name=${!name}"); done
  printf '%s\0' $((${#variables[@]} + $#)) "${variables[@]}" "$@" >&$REQUESTS
  read -r code <&$REPLIES
  cat "$OUTPUT"
  return "$code"
}
"""


def fences(page: Path) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def earlier_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home in which ada corrected replies, taught a skill and learned."""
    home = tmp_path_factory.mktemp("pages") / "home"
    with personalpeft.open(home, backend="fake") as runtime:
        ada = runtime.user("ada")
        for n in range(5):
            ada.feedback(ada.chat(f"question {n}"), edit=f"the answer to question {n}")
            ada.teach(f"mail {n}", f"Dear friend {n}", skill="email")
        ada.learn()
        ada.remember("My cat is called Crumpet.")
        ada.feedback(ada.chat("question 9"), edit="the answer to question 9")
    return home


class Reader:
    """A person who runs the blocks of a page, one after another, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "own-home"
        self.names: dict[str, Any] = {"__name__": "page"}

    def run(self, language: str, block: str) -> None:
        text = self._with_own_values(block)
        if language == "python":
            exec(compile(text, "block", "exec"), self.names)
        else:
            typed = re.findall(r"^\$ (.*)", text, re.MULTILINE)
            text = "\n".join(typed) if language == "console" else text
            if "personalpeft import " in text:
                # On another machine, in a shell of its own.
                text = f"(export PERSONALPEFT_HOME={tempfile.mkdtemp(dir=self.folder)}\n{text})"
            self._run_shell(text)

    def _with_own_values(self, text: str) -> str:
        """Put the ids of this home and folders of this test in place of the page's examples."""
        text = re.sub(r"(?<=[\s\"'=])/(?=(srv|mnt|var|tmp)/)", f"{self.folder}/", text)
        with personalpeft.open(self.home, backend="fake") as runtime:
            ada = runtime.user("ada")
            for signal in ada.signals()[:1]:
                text = re.sub(r"\bs_[0-9a-z]{4,}", signal.id, text)
            for revision in ada.revisions():
                text = re.sub(rf"\b{revision.layer}@[0-9a-f]+", revision.id, text)
        return text

    def _run_shell(self, text: str) -> None:
        state, output = self.folder / ".state", self.folder / ".output"
        state.touch()
        (read_request, requests), (replies, write_reply) = os.pipe(), os.pipe()
        stubs = "".join(f"{name}() {{ :; }}\n" for name in PROGRAMS)
        if address := self.names.get("address"):
            stubs += 'curl() { command curl --fail "$@"; }\n'
            text = text.replace("localhost:8080", address.removeprefix("http://"))
        pipes = f'REQUESTS={requests} REPLIES={replies} OUTPUT="{output}"'
        script = f'. "{state}"\n{pipes}\n{_BASH}{stubs}{text}\nexport -p > "{state}"\n'
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder,
            pass_fds=(requests, replies),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(requests)
        os.close(replies)
        failed = []
        with os.fdopen(read_request, "rb") as asked, os.fdopen(write_reply, "w") as answered:
            for arguments in _requests(asked):
                code, printed, errors = self._run_command(arguments)
                output.write_text(printed, "utf-8")
                failed += [errors] if code else []
                print(code, file=answered, flush=True)
        errors = process.communicate(timeout=20)[1]
        assert not failed, "\n".join(failed)
        assert process.returncode == 0, f"{text}\n{errors}"

    def _run_command(self, arguments: list[str]) -> tuple[int, str, str]:
        own = [each for each in arguments if re.match(r"PERSONALPEFT_\w+=", each)]
        words = arguments[len(own) :]
        if any(words[: len(each)] == each for each in map(str.split, COMMANDS)):
            return 0, "", ""
        if "--backend" in words:
            at = words.index("--backend")
            del words[at : at + 2]
        environment = dict(each.split("=", 1) for each in own)
        ended = CliRunner().invoke(cli, ["--backend", "fake", *words], env=environment)
        nothing_new = words[0] == "learn" and ended.exit_code == _NOTHING_TO_LEARN
        code = 0 if nothing_new else ended.exit_code
        return code, ended.stdout, f"{words}: {ended.output or repr(ended.exception)}"


def _requests(pipe: IO[bytes]) -> Iterator[list[str]]:
    """Yield the variables and arguments of each command, until bash has ended."""
    while count := _read_record(pipe):
        yield [_read_record(pipe) for _ in range(int(count))]


def _read_record(pipe: IO[bytes]) -> str:
    return b"".join(iter(lambda: pipe.read(1).strip(b"\0"), b"")).decode()


# These pages have a running server, whose address their blocks use.
SERVED = {"http-api.md", "serve-openai-clients.md"}


@contextmanager
def serve(home: Path) -> Iterator[dict[str, Any]]:
    """Serve a home, and yield what the clients of the page know of the server."""
    runtime = personalpeft.open(home, backend="fake")
    runtime.api_keys.ensure_admin_key()
    api, limiter = ApiV1(runtime), limiter_of(runtime)
    app = make_app(runtime, limiter=limiter, more=[api.blueprint])
    server = Server(app, limiter, host="127.0.0.1", port=0)

    def close() -> None:
        api.close()
        runtime.close()

    thread = threading.Thread(target=lambda: server.run(grace=5, close=close))
    thread.start()
    try:
        yield {
            "openai": openai,
            "anthropic": anthropic,
            "address": f"http://127.0.0.1:{server.port}",
            "api_key": runtime.api_keys.admin_key_file.read_text().strip(),
        }
    finally:
        server.stop()
        thread.join(20)


# What a fragment takes from the program around it.
GIVEN: dict[str, Callable[[Runtime], dict[str, Any]]] = {
    "daemon.md": lambda runtime: {"runtime": runtime, "my_app_is_busy": lambda: False},
    "embed.md": lambda runtime: {
        "personalpeft": personalpeft,
        "tmp_path": runtime.settings.home.parent / "test",
        "tools": [_TOOL],
        "weather": lambda city: f"sunny in {city}",
    },
    "practice.md": lambda runtime: {"ada": runtime.user("ada")},
    "ray-workers.md": lambda runtime: {
        "personalpeft": personalpeft,
        "ada": runtime.user("ada"),
        "base": personalpeft.DEFAULT_BASE,
    },
    "scrub.md": lambda runtime: {"ada": runtime.user("ada")},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.exhaustive) if page.name in LONG else page
        for page in PAGES
    ],
    ids=lambda page: page.name,
)
def test_every_block_of_a_page_runs(
    page: Path, earlier_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(tmp_path)
    for home in (reader.home, tmp_path / "home", tmp_path / "srv/personal"):
        shutil.copytree(earlier_home, home)
    monkeypatch.setenv("PERSONALPEFT_HOME", str(reader.home))
    monkeypatch.setenv("PERSONALPEFT_USER", "ada")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    real_open = personalpeft.open

    def open_fake(
        home: str | Path | None = None,
        base: str = personalpeft.DEFAULT_BASE,
        backend: str = "",
        **more: Any,
    ) -> Runtime:
        return real_open(home, base, "fake", **more)

    monkeypatch.setattr(personalpeft, "open", open_fake)
    with ExitStack() as stack:
        if page.name in SERVED:
            reader.names |= stack.enter_context(serve(reader.home))
        if page.name in GIVEN:
            reader.names |= GIVEN[page.name](stack.enter_context(open_fake()))
        for language, block in fences(page):
            if language in LANGUAGES and not any(each in block for each in BLOCKS):
                reader.run(language, block)
        for value in reader.names.values():
            if isinstance(value, Runtime):
                value.close()


@pytest.mark.parametrize("block", ["personalpeft nope", "nope", "false", "echo 'open"])
def test_a_failing_block_is_found(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSONALPEFT_HOME", str(tmp_path / "own-home"))
    with pytest.raises(AssertionError):
        Reader(tmp_path).run("sh", block)


def test_the_tables_name_pages_that_exist() -> None:
    names = {page.name for page in (ROOT / "docs").rglob("*.md")}
    assert names >= {*GENERATED, *SEPARATE, *LONG, *SERVED, *GIVEN}
