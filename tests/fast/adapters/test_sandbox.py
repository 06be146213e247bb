"""A reader of untrusted files that crashes, never ends or takes too much ends a child only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from personalpeft.errors import AdapterError, PersonalFileError
from personalpeft.sandbox import Limits, run_reader

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")

GIB = 1 << 30


def run(reader: str, *, seconds: int = 20, **arguments: Any) -> dict[str, str]:
    limits = Limits(memory=GIB, seconds=seconds)
    found = run_reader(
        f"sandbox_readers:{reader}", arguments, limits, source="file", error=PersonalFileError
    )
    return dict(found)


@pytest.mark.parametrize("reader", ["crash", "fail", "answer_nonsense", "no_such_reader"])
def test_child_without_an_answer_is_an_error_and_the_next_call_works(reader: str) -> None:
    with pytest.raises(PersonalFileError) as caught:
        run(reader)
    assert caught.value.message.startswith("file: ")
    assert caught.value.hint
    # What the reader had read is not repeated.
    assert "Biscuit" not in str(caught.value)
    assert run("take_memory", count=1) == {"taken": "1"}


def test_endless_reader_is_stopped_by_its_processor_time() -> None:
    with pytest.raises(PersonalFileError):
        run("never_end", seconds=1)


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not enforce RLIMIT_AS")
def test_reader_gets_no_more_memory_than_its_limit() -> None:
    with pytest.raises(PersonalFileError):
        run("take_memory", count=2 * GIB)


def test_refusal_of_a_reader_is_raised_as_it_is() -> None:
    with pytest.raises(AdapterError) as caught:
        run("refuse")
    assert (caught.value.message, caught.value.hint) == ("x: is refused.", "Get another.")


def test_child_inherits_no_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_API_KEY", "sk-planted")
    assert "sk-planted" not in run("list_environment").values()
    assert "PLANTED_API_KEY" not in run("list_environment")


@pytest.mark.skipif(sys.platform != "linux", reason="lists /proc")
def test_child_inherits_no_descriptor(tmp_path: Path) -> None:
    with (tmp_path / "private").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        found = run("list_descriptors")
    others = {each for each in found.values() if each != "/dev/null"}
    # The pipe of the answer, and the folder that is being listed.
    assert all(each.startswith(("pipe:", "/proc/")) for each in others), others
    assert len(found) <= 5


def test_child_writes_no_bytes_to_files(tmp_path: Path) -> None:
    with pytest.raises(PersonalFileError):
        run("write", path=str(tmp_path / "evil"))
    assert not (tmp_path / "evil").exists() or (tmp_path / "evil").read_bytes() == b""


def test_calls_of_threads_get_their_own_answers() -> None:
    found: dict[int, dict[str, str]] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: run("take_memory", count=n)}))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: {"taken": str(n)} for n in range(8)}


def test_frozen_program_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", "/the/program")
    assert run("take_memory", count=1) == {"taken": "1"}
    with pytest.raises(AdapterError):
        run("refuse")


@pytest.mark.exhaustive
def test_process_that_was_forked_while_a_thread_reads_has_a_server_of_its_own() -> None:
    run("take_memory", count=1)
    reading = threading.Thread(target=run, args=("wait",), kwargs={"seconds_to_wait": 2})
    reading.start()
    time.sleep(0.5)
    child = os.fork()
    if child == 0:
        # In the parent's lock it would wait for ever.
        signal.alarm(15)
        os._exit(0 if run("take_memory", count=2) == {"taken": "2"} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    reading.join()
    assert run("take_memory", count=3) == {"taken": "3"}


# What Windows lacks, taken away from the program and from the processes that it starts.
_WITHOUT_FORK = """
import os, sys
del os.fork, os.killpg
sys.modules["resource"] = sys.modules["fcntl"] = None
"""
_CALLS = """
from personalpeft.errors import PersonalFileError
from personalpeft.sandbox import Limits, run_reader

def run(reader, **arguments):
    limits = Limits(1 << 30, 20)
    reader = f"sandbox_readers:{reader}"
    return run_reader(reader, arguments, limits, source="file", error=PersonalFileError)

print(run("take_memory", count=1), run("take_memory", count=2))
try:
    run("crash")
except PersonalFileError as error:
    print(error.message)
"""


def test_system_without_fork_reads_in_a_new_process_for_each_call(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_WITHOUT_FORK)
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", _CALLS], env=environment, capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert first == "{'taken': '1'} {'taken': '2'}"
    assert second.startswith("file: the process that read it ended")
