"""Homes for the command line, and helpers that run commands on them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

import personalpeft
from personalpeft_app.cli import cli

# The command line with a slowed fake model, so that a test can interrupt it.
_SLOWLY = """
import sys, time
from personalpeft.backends import fake
seconds = float(sys.argv.pop(1))
learn, write = fake.FakeSession.step, fake.FakeBackend.step
def slow_learn(self, *args):
    time.sleep(seconds)
    return learn(self, *args)
def slow_write(self):
    time.sleep(seconds)
    return write(self)
fake.FakeSession.step, fake.FakeBackend.step = slow_learn, slow_write
from personalpeft_app.cli import main
main()
"""


@dataclass(frozen=True)
class Shell:
    """A home and a cache of the test, and ways to run commands on them."""

    home: Path
    cache: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PERSONALPEFT_HOME": str(self.home),
            "PERSONALPEFT_CACHE": str(self.cache),
            "PERSONALPEFT_USER": "ada",
            "PERSONALPEFT_BASE": "",
            "NO_COLOR": "",
        }

    def run(
        self, *args: str, stdin: str | bytes | None = None, backend: str = "fake", **env: str
    ) -> Result:
        """Run a command in this process."""
        runner = CliRunner()
        return runner.invoke(
            cli, ["--backend", backend, *args], input=stdin, env={**self.environment, **env}
        )

    def spawn(
        self, *args: str, slowly: float | None = None, stderr: int = subprocess.PIPE, **env: str
    ) -> subprocess.Popen[bytes]:
        """Start a command in a process of its own, with pipes."""
        program = (
            [sys.executable, "-P", "-c", _SLOWLY, str(slowly)]
            if slowly
            else [sys.executable, "-c", _PLAIN]
        )
        return subprocess.Popen(
            [*program, "--backend", "fake", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
            env={**os.environ, **self.environment, **env},
            # Shells let background jobs ignore interrupts, so restore the default handler.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
        )

    def snapshot(self) -> Any:
        """Return all state that a command could have changed, or None without a home."""
        if not self.home.exists():
            return None
        with personalpeft.open(self.home, backend="fake", read_only=True) as runtime:
            return [
                (
                    summary,
                    user.turns(),
                    user.signals(current=False),
                    user.items(),
                    user.layers(),
                    user.history(),
                )
                for summary in runtime.users()
                for user in [runtime.user(summary.id, create=False)]
            ]


_PLAIN = "from personalpeft_app.cli import main; main()"


def correct_replies(shell: Shell, count: int) -> None:
    with personalpeft.open(shell.home, backend="fake") as runtime:
        ada = runtime.user("ada")
        for number in range(count):
            ada.feedback(ada.chat(f"question {number}"), edit=f"the answer to question {number}")


def wait_for(happened: Callable[[], bool], what: str, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.02)


def lines(text: str) -> Sequence[str]:
    return text.rstrip("\n").split("\n")


def read_json(process: subprocess.Popen[bytes]) -> Any:
    """Return the JSON that a running process printed first."""
    assert process.stdout is not None
    text = ""
    while not text.rstrip().endswith("}"):
        line = process.stdout.readline().decode()
        assert line, text
        text += line
    return json.loads(text)


def read_to_end(process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """Wait for the process and return the rest of stdout and stderr."""
    out, errors = process.communicate(timeout=20)
    return out.decode(), errors.decode()
