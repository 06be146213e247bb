"""What a trial of the processor's own order of weights ended in decides how they are kept, and is remembered where it is certain."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from personalpeft.backends.llamacpp.cpu_probe import probe_cpu


class Trials:
    """In place of the child process: ends as it is told to; ``made`` counts."""

    def __init__(self) -> None:
        self.made = 0
        self.ends: int | Exception = 0

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        self.made += 1
        if isinstance(self.ends, Exception):
            raise self.ends
        return subprocess.CompletedProcess(command, self.ends, b"", b"what it said")


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    trials = Trials()
    monkeypatch.setattr("personalpeft.backends.llamacpp.cpu_probe.subprocess.run", trials)
    return trials


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    return tmp_path / "model.gguf"


@pytest.mark.parametrize(
    ("ends", "extra"), [(0, True), (-signal.SIGSEGV, False), (-signal.SIGILL, False)]
)
def test_what_a_trial_shows_of_the_processor_is_kept(
    tmp_path: Path, file: Path, trials: Trials, ends: int, extra: bool
) -> None:
    trials.ends = ends
    first = probe_cpu(file, tmp_path)
    assert (first.repack, probe_cpu(file, tmp_path)) == (extra, first)
    assert trials.made == 1


@pytest.mark.parametrize(
    "ends",
    [
        -signal.SIGKILL,
        1,
        subprocess.TimeoutExpired("python", 300),
        FileNotFoundError(2, "no such program"),
    ],
    ids=["killed", "an error", "too slow", "no program"],
)
def test_what_may_be_of_the_moment_is_on_the_safe_side_and_tried_again(
    tmp_path: Path, file: Path, trials: Trials, ends: int | Exception
) -> None:
    trials.ends = ends
    assert not probe_cpu(file, tmp_path).repack
    trials.ends = 0
    assert probe_cpu(file, tmp_path).repack
    assert trials.made == 2


@pytest.mark.parametrize("harm", ["", "{", "[]", json.dumps({"extra": True})])
def test_a_damaged_note_of_it_is_none(
    tmp_path: Path, file: Path, trials: Trials, harm: str
) -> None:
    probe_cpu(file, tmp_path)
    (kept,) = (tmp_path / "llamacpp").iterdir()
    kept.write_text(harm)
    trials.ends = -signal.SIGSEGV
    assert not probe_cpu(file, tmp_path).repack


def test_another_processor_version_or_file_is_tried_anew(
    tmp_path: Path, file: Path, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_cpu(file, tmp_path)
    with monkeypatch.context() as other:
        other.setattr(
            "personalpeft.backends.llamacpp.cpu_probe._cpu_features", lambda: "flags: none"
        )
        probe_cpu(file, tmp_path)
    with monkeypatch.context() as other:
        other.setattr("personalpeft.backends.llamacpp.cpu_probe.version", lambda _: "99")
        probe_cpu(file, tmp_path)
    file.write_bytes(b"GGUF, another one")
    probe_cpu(file, tmp_path)
    probe_cpu(file, tmp_path)
    assert trials.made == 4
