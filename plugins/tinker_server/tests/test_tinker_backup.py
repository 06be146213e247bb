"""Backups of a home have what the server keeps, and an encrypted home encrypts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tinker_makers import TinkerServer, datum

import personalpeft

TRACE = list(b"a sentence that only ada has")


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSONALPEFT_KEYS", str(tmp_path / "keys"))


def _losses(server: TinkerServer, path: str) -> list[float]:
    run = server.session("ada").run()
    run.call("load_weights", path=path, optimizer=True)
    return run.train(2, [datum(TRACE)])


def _train(server: TinkerServer) -> str:
    run = server.session("ada").run()
    run.train(1, [datum(TRACE)])
    return run.save("mine")


@pytest.mark.exhaustive
def test_saved_weights_come_back_with_a_restored_home(
    start: Callable[[], TinkerServer], tmp_path: Path
) -> None:
    server = start()
    path = _train(server)
    server.runtime.maintenance.back_up(tmp_path / "copies")
    # As an earlier version named the folder.
    files = tmp_path / "home" / "tinker" / "files"
    files.rename(files.with_name("weights"))
    server = start()
    losses = _losses(server, path)
    server.extension.close()
    server.runtime.close()
    personalpeft.restore(tmp_path / "copies", tmp_path / "home", replace=True)
    assert _losses(start(), path) == losses


def test_an_encrypted_home_shows_no_training_data(
    start: Callable[[], TinkerServer], tmp_path: Path
) -> None:
    pytest.importorskip("sqlcipher3")
    home = tmp_path / "home"
    personalpeft.encrypt(home, "file")
    server = start()
    path = _train(server)
    losses = _losses(server, path)
    trace = f"[{TRACE[0]}, {TRACE[1]}, {TRACE[2]}".encode()
    files = [each for each in (home / "tinker").rglob("*") if each.is_file()]
    assert sum(each.parent.name == "files" for each in files) >= 2
    for each in files:
        data = each.read_bytes()
        assert trace not in data
        assert b"exp_avg" not in data
        assert b"SQLite format 3" not in data
    assert _losses(start(), path) == losses
