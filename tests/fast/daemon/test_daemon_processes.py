"""Daemons as processes: kills, two daemons, signals, and a server on the same home."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import personalpeft
from personalpeft_app.cli import cli

# The command line with a slowed fake model, so that a test can interrupt it.
_DAEMON = """
import sys, time
from personalpeft.backends import fake
seconds = float(sys.argv.pop(1))
learn = fake.FakeSession.step
def slow(self, *args):
    time.sleep(seconds)
    return learn(self, *args)
fake.FakeSession.step = slow
from personalpeft_app.cli import main
main()
"""
# Answers continuously and prints the stack that answered.
_SERVER = """
import sys, time, personalpeft
with personalpeft.open(sys.argv[1], base="fake", backend="fake") as runtime:
    ada = runtime.user("ada")
    while True:
        began = time.time()
        reply = ada.chat("hello", temperature=0, memory=False)
        print(began, ",".join(e.revision for e in reply.stack.entries) or "base", flush=True)
        time.sleep(0.05)
"""


@dataclass
class Home:
    """A home with signals to learn from, and the processes on it."""

    path: Path
    children: list[subprocess.Popen[str]] = field(default_factory=list)

    def correct(self, count: int) -> None:
        with personalpeft.open(self.path, base="fake", backend="fake") as runtime:
            ada = runtime.user("ada")
            for number in range(count):
                ada.feedback(
                    ada.chat(f"question {number}", temperature=0),
                    edit=f"Ahoy! Answer {number}. Arrr!",
                )
        self.mark_idle()

    def mark_idle(self) -> None:
        """Mark the last served request as long ago."""
        os.utime(self.path / "locks" / "serving", (1e9, 1e9))

    def spawn(
        self, *words: str, slowly: float = 0.0, program: str = _DAEMON
    ) -> subprocess.Popen[str]:
        first = (
            [str(slowly), "--backend", "fake", "--home", str(self.path)]
            if program is _DAEMON
            else [str(self.path)]
        )
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", program, *first, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
        )
        self.children.append(child)
        return child

    def run(self, *words: str) -> Result:
        """Run a command in this process."""
        return CliRunner().invoke(cli, ["--backend", "fake", "--home", str(self.path), *words])

    def revisions(self) -> list[str]:
        with personalpeft.open(self.path, base="fake", backend="fake") as runtime:
            assert runtime.verify() == () or all(
                "gc" in problem.remedy for problem in runtime.verify()
            )
            return [revision.id for revision in runtime.user("ada").revisions()]


class ServerProcess:
    """The server of a home, in a process of its own."""

    def __init__(self, home: Home) -> None:
        self.process = home.spawn("serve", "--port", "0", "--json")
        errors = ""
        assert self.process.stdout is not None
        while not errors.rstrip().endswith("}"):
            errors += self.process.stdout.readline()
        self._url = json.loads(errors)["url"]
        self._token = (home.path / "token").read_text().strip()

    def serving_revision(self) -> str:
        """Return the revision that serves ada."""
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions",
            json.dumps(
                {"model": "ada", "messages": [{"role": "user", "content": "hello"}]}
            ).encode(),
            {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return ",".join(json.load(answer)["personalpeft"]["revisions"]) or "bare base"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    path = tmp_path / "home"
    path.mkdir(mode=0o700)
    (path / "config.toml").write_text(
        '[daemon]\nload = 1\nrequire_ac_power = false\nbackup = ""\ntemperature = 999\n'
    )
    home = Home(path)
    yield home
    for child in home.children:
        if child.poll() is None:
            child.kill()
        child.communicate()


def wait_for(happened: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.01)


def wait_for_exit(child: subprocess.Popen[str], seconds: float = 60) -> tuple[str, str]:
    return child.communicate(timeout=seconds)


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "it wrote down that it learns": lambda home: '"keys"' in _text(home / "notes/daemon.json"),
    "two steps were made": lambda home: _steps_made(home) > 1,
    "the candidate is durable": lambda home: any(home.glob("blobs/*/*")),
}


def _steps_made(home: Path) -> int:
    """Return how many steps the running learn of ada has made."""
    with personalpeft.open(home, base="fake", backend="fake") as runtime:
        status = runtime.user("ada").training_status()
    return status.step if status else 0


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("it wrote down that it learns", marks=pytest.mark.exhaustive),
        pytest.param("two steps were made", marks=pytest.mark.exhaustive),
        "the candidate is durable",
    ],
)
def test_a_kill_at_any_moment_causes_no_second_learn(home: Home, moment: str) -> None:
    home.correct(9)
    child = home.spawn("daemon", "run-once", slowly=0.05)
    wait_for(lambda: MOMENTS[moment](home.path) or child.poll() is not None, moment)
    child.kill()
    wait_for_exit(child)
    for _ in range(2):
        again = home.run("daemon", "run-once", "--json")
        assert again.exit_code == 0, again.output
    (revision,) = home.revisions()
    assert revision.startswith("style@")
    assert json.loads(again.stdout)["did"] == []


@pytest.mark.exhaustive
def test_of_two_daemons_one_runs_and_the_other_waits_and_names_it(home: Home) -> None:
    home.correct(9)
    first = home.spawn("daemon", "run", slowly=0.05)
    wait_for(lambda: "keys" in _text(home.path / "notes/daemon.json"), "a learn")
    once = home.run("daemon", "run-once")
    assert once.exit_code == 6
    assert f"process {first.pid}" in once.stderr
    second = home.spawn("daemon", "run")
    assert second.stderr is not None
    assert f"process {first.pid}" in second.stderr.readline()
    status = home.run("daemon", "status", "--json").stdout
    assert f"process {first.pid}" in json.loads(status)["running"]
    wait_for(lambda: bool(home.revisions()), "a revision")
    first.kill()
    wait_for_exit(first)
    assert "Running on" in second.stderr.readline()
    second.send_signal(signal.SIGTERM)
    wait_for_exit(second)
    assert second.returncode == 0
    assert len(home.revisions()) == 1


@pytest.mark.exhaustive
def test_status_shows_the_progress_of_a_learn(home: Home) -> None:
    home.correct(9)
    home.spawn("daemon", "run", slowly=3)
    wait_for(lambda: MOMENTS["two steps were made"](home.path), "two steps")
    shown = json.loads(home.run("daemon", "status", "--json").stdout)
    assert shown["learning"] == ["ada"]
    assert (shown["underway"]["ada"]["layer"], shown["underway"]["ada"]["stage"]) == (
        "style",
        "Learning",
    )
    assert 0 < shown["underway"]["ada"]["step"] < shown["underway"]["ada"]["steps"]
    assert "ada learns (style: learning, " in home.run("daemon", "status").stdout


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)]
)
def test_a_signal_stops_a_learn_between_two_steps_and_the_next_run_resumes_it(
    home: Home, number: signal.Signals
) -> None:
    home.correct(9)
    child = home.spawn("daemon", "run", "--json", slowly=0.2)
    wait_for(lambda: _steps_made(home.path) > 1, "two steps")
    child.send_signal(number)
    out, errors = wait_for_exit(child)
    assert child.returncode == 0, errors
    assert "stopped" in [json.loads(line)["outcome"] for line in out.splitlines()]
    assert home.revisions() == []
    assert "promoted" in home.run("daemon", "run-once").stdout
    assert len(home.revisions()) == 1


def test_a_server_on_the_same_home_serves_a_new_revision_within_a_second(home: Home) -> None:
    home.correct(9)
    server = home.spawn(program=_SERVER)
    assert server.stdout is not None
    assert server.stdout.readline().split()[1] == "base"
    # Requests are being served all the time, so the daemon waits and reports that reason.
    status = home.run("daemon", "run-once", "--json")
    assert "serving" in [each["blocked_by"] for each in json.loads(status.stdout)["next"]]
    assert home.revisions() == []
    # Another process on the same home learns.
    with personalpeft.open(home.path, base="fake", backend="fake") as runtime:
        report = runtime.user("ada").learn()
        live_at = time.time()
    for line in server.stdout:
        began, stack = line.split()
        if stack != "base":
            break
    assert stack == report.revision
    assert float(began) - live_at < 1.0
    server.kill()


@pytest.mark.exhaustive
def test_a_killed_server_and_a_killed_daemon_end_with_the_new_revision_being_served(
    home: Home,
) -> None:
    home.correct(9)
    server = ServerProcess(home)
    assert server.serving_revision() == "bare base"
    # The daemon is killed between two steps while the server runs; then the server is killed during
    # a learn.
    home.mark_idle()
    daemon = home.spawn("daemon", "run", slowly=0.05)
    wait_for(lambda: _steps_made(home.path) > 1, "two steps")
    daemon.kill()
    wait_for_exit(daemon)
    assert server.serving_revision() == "bare base"
    home.mark_idle()
    daemon = home.spawn("daemon", "run", slowly=0.1)
    wait_for(
        lambda: '"times":2' in _text(home.path / "notes/daemon.json"), "the learn that goes on"
    )
    server.process.kill()
    wait_for_exit(server.process)
    server = ServerProcess(home)
    with personalpeft.open(home.path, base="fake", backend="fake") as runtime:
        ada = runtime.user("ada")
        wait_for(lambda: ada.layers()[0].head is not None if ada.layers() else False, "a head")
        live_at, live = time.monotonic(), ada.layers()[0].head
        assert server.serving_revision() == live
        ada.rollback("style")
        assert server.serving_revision() == "bare base"
        ada.rollback("style", to=live)
        assert server.serving_revision() == live
        # The machine is shared with other programs; unloaded, the first answer is on the new head.
        assert time.monotonic() - live_at < 20
    daemon.send_signal(signal.SIGTERM)
    wait_for_exit(daemon)
    assert len(home.revisions()) == 1
    assert server.serving_revision() == live


@pytest.mark.exhaustive
def test_a_missing_home_is_an_error(tmp_path: Path) -> None:
    home = Home(tmp_path / "nowhere")
    for words in (("daemon", "run-once"), ("daemon", "status")):
        child = home.spawn(*words)
        out, errors = wait_for_exit(child)
        assert (child.returncode, out) == (7, "")
        assert "Traceback" not in errors


@pytest.mark.exhaustive
@pytest.mark.parametrize(("implicit", "learns"), [("kept", 0), ("learned", 1)])
def test_implicit_feedback_is_learned_only_where_enabled(
    home: Home, implicit: str, learns: int
) -> None:
    with personalpeft.open(
        home.path, base="fake", backend="fake", implicit_feedback=implicit
    ) as runtime:
        ada = runtime.user("ada")
        for number in range(9):
            ada.record_implicit_feedback(ada.chat(f"question {number}", temperature=0), "copied")
    home.mark_idle()
    due, errors = wait_for_exit(home.spawn("daemon", "status", "--json"))
    assert ("ada" in str(json.loads(due)["due"])) == bool(learns), errors
    wait_for_exit(home.spawn("daemon", "run-once"))
    assert len(home.revisions()) == learns


@pytest.mark.exhaustive
def test_a_retracted_fact_is_a_reason_to_learn(home: Home) -> None:
    with personalpeft.open(home.path, base="fake", backend="fake") as runtime:
        ada = runtime.user("ada")
        fact = ada.remember("My dog is Biscuit.", questions=["Who is my dog?"], answer="Biscuit")
        ada.learn()
        ada.retract_item(fact)
        ada.chat("hello", temperature=0)
    home.mark_idle()
    settings = home.path / "config.toml"
    settings.write_text(settings.read_text() + "min_signals = 1\n")
    due, errors = wait_for_exit(home.spawn("daemon", "status", "--json"))
    assert "ada" in str(json.loads(due)["due"]), errors
    wait_for_exit(home.spawn("daemon", "run-once"))
    with personalpeft.open(home.path, base="fake", backend="fake") as runtime:
        assert runtime.user("ada").stack().entries == ()
    due, errors = wait_for_exit(home.spawn("daemon", "status", "--json"))
    assert "ada" not in str(json.loads(due)["due"]), errors


@pytest.mark.exhaustive
def test_broken_settings_are_reported_before_anything_runs(home: Home) -> None:
    home.correct(1)
    (home.path / "config.toml").write_text("[daemon]\nidel = 3\n")
    for words in (("daemon", "run"), ("daemon", "run-once"), ("daemon", "status")):
        child = home.spawn(*words)
        out, errors = wait_for_exit(child)
        assert (child.returncode, out) == (2, "")
        assert "idle" in errors
    assert not (home.path / "notes").exists()
