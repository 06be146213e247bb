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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner

import personalpeft
from personalpeft import Runtime
from personalpeft_app.cli import cli

ROOT = Path(__file__).parents[3]
GENERATED = {"commands.md", "python.md", "http-api.md"}
SEPARATE = {
    "own-base.md": "test_examples.py runs it on real engines, with models that it makes",
    "flask-thumbs.md": "test_examples.py sends requests to its app",
    "serve-openai-clients.md": "test_docs.py runs its clients against a server",
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
    "curl": "asks the server that the page starts; test_docs.py runs such a server",
    "systemctl": "starts a service of the system",
}
COMMANDS = {
    "serve": "runs until it is stopped; test_app_serve.py runs it",
    "daemon run": "runs until it is stopped; test_daemon_processes.py runs it",
    "demo": "needs the real base; a slow test runs it",
}
BLOCKS = {"learn_on_cluster": "starts a cluster of Ray"}

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
        ada.chat("question 9")
    return home


class Reader:
    """A person who runs the blocks of a page, one after another, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.names: dict[str, Any] = {"__name__": "page"}

    def run(self, language: str, block: str) -> None:
        text = self._with_own_values(block)
        if language == "python":
            exec(compile(text, "block", "exec"), self.names)
        else:
            self._run_shell(re.sub(r"^\$ ", "", text, flags=re.MULTILINE))

    def _with_own_values(self, text: str) -> str:
        """Put the ids of this home and folders of this test in place of the page's examples."""
        text = re.sub(r"(?<=[\s\"'=])/(?=(srv|mnt|var|tmp)/)", f"{self.folder}/", text)
        with personalpeft.open(self.home, backend="fake") as runtime:
            ada = runtime.user("ada")
            signals, revisions = ada.signals(), ada.revisions("style")
        if signals:
            text = re.sub(r"\bs_[0-9a-z]{4,}", signals[-1].id, text)
        if revisions:
            text = re.sub(r"\bstyle@[0-9a-f]+", revisions[-1].id, text)
        return text

    def _run_shell(self, text: str) -> None:
        state, output = self.folder / ".state", self.folder / ".output"
        state.touch()
        (read_request, requests), (replies, write_reply) = os.pipe(), os.pipe()
        stubs = "".join(f"{name}() {{ :; }}\n" for name in PROGRAMS)
        script = f'{_BASH}{stubs}. "{state}"\n{text}\nexport -p > "{state}"\n'
        variables = {"REQUESTS": str(requests), "REPLIES": str(replies), "OUTPUT": str(output)}
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder,
            env={**os.environ, **variables},
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
                if code:
                    failed.append(f"{' '.join(arguments)}: {errors}")
                print(code, file=answered, flush=True)
        errors = process.communicate(timeout=20)[1]
        assert not failed, "\n".join(failed)
        assert process.returncode == 0, f"{text}\n{errors}"

    def _run_command(self, arguments: list[str]) -> tuple[int, str, str]:
        own = [each for each in arguments if re.match(r"PERSONALPEFT_\w+=", each)]
        words = arguments[len(own) :]
        if any(" ".join(words).startswith(each) for each in COMMANDS):
            return 0, "", ""
        if "--backend" in words:
            at = words.index("--backend")
            del words[at : at + 2]
        environment = dict(each.split("=", 1) for each in own)
        ended = CliRunner().invoke(cli, ["--backend", "fake", *words], env=environment)
        return ended.exit_code, ended.stdout, ended.stderr or repr(ended.exception)


def _requests(pipe: IO[bytes]) -> Iterator[list[str]]:
    """Yield the variables and arguments of each command, until bash has ended."""
    while count := _read_record(pipe):
        yield [_read_record(pipe) for _ in range(int(count))]


def _read_record(pipe: IO[bytes]) -> str:
    return b"".join(iter(lambda: pipe.read(1).strip(b"\0"), b"")).decode()


# What a fragment takes from the program around it.
GIVEN: dict[str, Callable[[Runtime], dict[str, Any]]] = {
    "daemon.md": lambda runtime: {"runtime": runtime, "my_app_is_busy": lambda: False},
    "embed.md": lambda runtime: {
        "personalpeft": personalpeft,
        "tmp_path": runtime.settings.home.parent / "test",
        "tools": [_TOOL],
        "weather": lambda city: f"sunny in {city}",
    },
    "learning.md": lambda runtime: {"ada": runtime.user("ada")},
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


@pytest.mark.skipif(sys.platform == "win32", reason="the shell blocks are for a POSIX shell")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_a_page_runs(
    page: Path, earlier_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(tmp_path)
    shutil.copytree(earlier_home, reader.home)
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
    with open_fake() as runtime:
        reader.names |= GIVEN.get(page.name, lambda runtime: {})(runtime)
        for language, block in fences(page):
            if language in ("sh", "bash", "console", "python") and not any(
                each in block for each in BLOCKS
            ):
                reader.run(language, block)
        for value in reader.names.values():
            if isinstance(value, Runtime):
                value.close()
