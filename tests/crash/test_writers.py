"""Many programs write to one home at once, beside readers and checkpoints, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from crash_makers import check_heads, find_problems
from crash_operations import open_home

import personalpeft
from personalpeft.store.error_mapping import sqlite3
from personalpeft.store.home import DATABASE

USERS = ("ada", "bo")


@contextmanager
def disturbing(home: Path) -> Iterator[list[Exception]]:
    """Read and checkpoint a home until the block ends. Yield the errors."""
    stop, errors = threading.Event(), list[Exception]()

    def read() -> None:
        last = 0
        while not stop.wait(0.2):
            with personalpeft.open(home, backend="fake", read_only=True) as runtime:
                turns = sum(len(runtime.user(each).turns()) for each in USERS)
                assert turns >= last
                last = turns

    def checkpoint() -> None:
        with closing(sqlite3.connect(home / DATABASE)) as db:
            while not stop.wait(0.05):
                db.execute("pragma wal_checkpoint(truncate)").fetchall()

    def run(what: object) -> None:
        try:
            what()  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - the test shows it
            errors.append(error)

    threads = [threading.Thread(target=run, args=[what]) for what in (read, read, checkpoint)]
    for each in threads:
        each.start()
    try:
        yield errors
    finally:
        stop.set()
        for each in threads:
            each.join()


@pytest.mark.parametrize(
    ("writers", "count"), [(2, 12), pytest.param(8, 200, marks=pytest.mark.exhaustive)]
)
def test_nothing_that_writers_of_one_home_were_promised_is_lost(
    tmp_path: Path, writers: int, count: int
) -> None:
    with open_home(tmp_path) as runtime:
        for user in USERS:
            runtime.user(user)
    script = Path(__file__).with_name("writer.py")
    promised: list[set[tuple[str, str]]] = []
    with disturbing(tmp_path / "home") as errors:
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(tmp_path), USERS[n % 2], f"w{n}", str(count)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for n in range(writers)
        ]
        # The first is killed amid its work.
        assert processes[0].stdout
        begun = "".join(processes[0].stdout.readline() for _ in range(count // 2))
        processes[0].kill()
        for n, each in enumerate(processes):
            if n == 0:
                # What was read ahead lies in the file object, which ``communicate`` passes over.
                out, error = processes[0].stdout.read(), ""
            else:
                out, error = each.communicate(timeout=3600)
            assert n == 0 or each.returncode == 0, error
            lines = (begun * (n == 0) + out).splitlines()
            promised.append({(kind, what) for kind, what in map(str.split, lines)})
    assert errors == []
    assert [len(each) for each in promised[1:]] == [count] * (writers - 1)
    with open_home(tmp_path) as runtime:
        assert find_problems(runtime) == []
        check_heads(runtime)
        kept = {
            pair
            for user in map(runtime.user, USERS)
            for pair in (
                *(("turn", each.id) for each in user.turns()),
                *(("signal", each.id) for each in user.signals(current=False)),
            )
        }
    acknowledged = set[tuple[str, str]]().union(*promised)
    assert acknowledged <= kept
    # One act of the killed writer may be durable and not acknowledged yet.
    assert len(kept - acknowledged) <= 1
