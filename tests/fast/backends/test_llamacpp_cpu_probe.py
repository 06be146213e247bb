"""The CPU probe decides how weights are stored, and certain results are cached."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from personalpeft.backends.llamacpp.cpu_probe import probe_cpu


class FakeProbes:
    """Replaces the child process: ends with a given code; ``made`` counts."""

    def __init__(self) -> None:
        self.made = 0
        self.ends: int | Exception = 0

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        self.made += 1
        if isinstance(self.ends, Exception):
            raise self.ends
        return subprocess.CompletedProcess(command, self.ends, b"", b"what it said")


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> FakeProbes:
    probes = FakeProbes()
    monkeypatch.setattr("personalpeft.backends.llamacpp.cpu_probe.subprocess.run", probes)
    return probes


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    return tmp_path / "model.gguf"


@pytest.mark.parametrize(
    ("ends", "extra"),
    # The last is an illegal instruction on Windows.
    [(0, True), (-signal.SIGSEGV, False), (-signal.SIGILL, False), (0xC000001D, False)],
)
def test_a_certain_probe_result_is_cached(
    tmp_path: Path, file: Path, probes: FakeProbes, ends: int, extra: bool
) -> None:
    probes.ends = ends
    first = probe_cpu(file, tmp_path)
    assert (first.repack, probe_cpu(file, tmp_path)) == (extra, first)
    assert probes.made == 1


def test_a_crash_is_one_on_a_system_without_bus_errors(
    tmp_path: Path, file: Path, probes: FakeProbes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(signal, "SIGBUS")
    probes.ends = -signal.SIGSEGV
    assert probe_cpu(file, tmp_path).conclusive


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
def test_an_uncertain_probe_result_is_conservative_and_probed_again(
    tmp_path: Path, file: Path, probes: FakeProbes, ends: int | Exception
) -> None:
    probes.ends = ends
    assert not probe_cpu(file, tmp_path).repack
    probes.ends = 0
    assert probe_cpu(file, tmp_path).repack
    assert probes.made == 2


@pytest.mark.parametrize("harm", ["", "{", "[]", json.dumps({"extra": True})])
def test_a_damaged_cached_result_is_ignored(
    tmp_path: Path, file: Path, probes: FakeProbes, harm: str
) -> None:
    probe_cpu(file, tmp_path)
    (kept,) = (tmp_path / "llamacpp").iterdir()
    kept.write_text(harm)
    probes.ends = -signal.SIGSEGV
    assert not probe_cpu(file, tmp_path).repack


def test_another_processor_version_or_file_is_probed_again(
    tmp_path: Path, file: Path, probes: FakeProbes, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_cpu(file, tmp_path)
    with monkeypatch.context() as other:
        other.setattr("personalpeft.host.cpu_flags", lambda: "flags: none")
        probe_cpu(file, tmp_path)
    with monkeypatch.context() as other:
        other.setattr("personalpeft.backends.llamacpp.cpu_probe.version", lambda _: "99")
        probe_cpu(file, tmp_path)
    file.write_bytes(b"GGUF, another one")
    probe_cpu(file, tmp_path)
    probe_cpu(file, tmp_path)
    assert probes.made == 4
