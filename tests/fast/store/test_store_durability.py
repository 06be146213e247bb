"""What returned an id survives a kill, a full disk and concurrent writers."""

from __future__ import annotations

import hashlib
import random
import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store_makers import BASE, add_fact, add_revision, beside, opened, output

from personalpeft.errors import Busy
from personalpeft.store.integrity import verify
from personalpeft.types import SignalKind

# Kills at five random times. One of them is enough for make test.
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 5))]


def killed_after(process: subprocess.Popen[str], lines: int, delay: float) -> list[str]:
    """Return the lines that a process printed before it was killed.

    The kill comes ``delay`` seconds after the first lines. An incomplete last line is left out.
    """
    assert process.stdout is not None
    printed = [process.stdout.readline() for _ in range(lines)]
    time.sleep(delay)
    process.kill()
    # ``communicate`` would lose lines that ``readline`` has buffered.
    assert process.stderr is not None
    rest, errors = process.stdout.read(), process.stderr.read()
    process.wait(timeout=60)
    assert errors == ""
    return [
        line.rstrip("\n")
        for line in printed + rest.splitlines(keepends=True)
        if line.endswith("\n")
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_acknowledged_signal_survives_a_kill(home: Path, seed: int) -> None:
    moment = random.Random(seed)
    script = "store = opened(home)\nwhile True: print(add_fact(store).id, flush=True)"
    process = beside(script, home)
    acknowledged = killed_after(process, moment.randint(1, 15), moment.uniform(0, 0.02))
    with opened(home) as store:
        kept = [signal.id for signal in store.ledger.signals("ada")]
        assert kept[: len(acknowledged)] == acknowledged
        assert len(kept) <= len(acknowledged) + 1
        assert verify(store) == ()
        add_fact(store)


@pytest.mark.parametrize("seed", SEEDS)
def test_acknowledged_revision_survives_a_kill_and_the_head_is_valid(home: Path, seed: int) -> None:
    moment = random.Random(100 + seed)
    script = """
store = opened(home)
store.catalog.ensure_user("ada")
number = 0
while True:
    number += 1
    print(add_revision(store, str(number).encode() * 200_000, signals={add_fact(store).id: "trained"}).id, flush=True)
"""
    acknowledged = killed_after(beside(script, home), moment.randint(1, 4), moment.uniform(0, 0.03))
    with opened(home) as store:
        kept = [revision.id for revision in store.catalog.revisions("ada")]
        assert kept[: len(acknowledged)] == acknowledged
        (head,) = store.catalog.stack("ada", BASE).entries
        assert head.revision == kept[-1]
        assert hashlib.sha256(store.blobs.read(head.digest)).hexdigest() == head.digest
        assert [
            problem.remedy for problem in verify(store) if "Harmless" not in problem.remedy
        ] == []
        add_revision(store, b"after")


def test_kill_while_a_home_is_created_leaves_one_that_can_be_created(home: Path) -> None:
    script = "from personalpeft.store import home as _; print('go', flush=True); opened(home); print('made', flush=True)"
    for delay in (0.0, 0.005, 0.02):
        killed_after(beside(script, home), 1, delay)
    with opened(home) as store:
        add_fact(store)
        assert verify(store) == ()


@pytest.mark.parametrize(
    "act",
    [
        "add_fact(store, text='x' * 3000).id",
        pytest.param(
            "add_revision(store, str(number).encode() * 30_000).id", marks=pytest.mark.exhaustive
        ),
        "add_revision(store, bytes(100_000 * number)).id",
    ],
)
def test_full_disk_loses_nothing_acknowledged(home: Path, act: str) -> None:
    script = f"""
import resource
from personalpeft.errors import HomeError
store = opened(home)
add_fact(store)
largest = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (450_000, largest))
number = 0
try:
    while number < 2000:
        number += 1
        print({act})
except HomeError as error:
    print("HomeError:", error.message, error.hint)
resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
print({act})
"""
    *acknowledged, refusal, afterwards = output(beside(script, home)).splitlines()
    assert refusal.startswith("HomeError:")
    assert "nothing was changed" in refusal
    assert len(acknowledged) > 1
    with opened(home) as store:
        kept = [signal.id for signal in store.ledger.signals("ada")][1:]
        kept = kept or [revision.id for revision in store.catalog.revisions("ada")]
        assert kept == [*acknowledged, afterwards]
        assert verify(store) == ()


def test_full_disk_during_a_backup_is_an_error_and_leaves_no_copy(home: Path) -> None:
    script = """
import resource
from personalpeft.errors import HomeError
from personalpeft.store.maintenance import Maintenance
store = opened(home)
for _ in range(100):
    add_fact(store, text="x" * 3000)
largest = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, largest))
try:
    Maintenance(store).back_up(home / "copies")
except HomeError as error:
    print("HomeError:", error.message, error.hint)
resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
print(len(list((home / "copies").glob("copy-*"))))
Maintenance(store).back_up(home / "copies")
print(len(list((home / "copies").glob("copy-*"))))
"""
    refusal, left, copies = output(beside(script, home)).splitlines()
    assert refusal.startswith("HomeError:")
    # Not even a part, which would leave no room for feedback.
    assert left == "0"
    assert copies == "1"


def test_writers_of_several_processes_all_succeed(home: Path) -> None:
    script = "store = opened(home)\nfor _ in range(15): print(add_fact(store, sys.argv[2]).id)"
    processes = [beside(script, home, user) for user in ("ada", "ada", "bob")]
    acknowledged = {line for process in processes for line in output(process).splitlines()}
    with opened(home) as store:
        kept = [signal.id for user in ("ada", "bob") for signal in store.ledger.signals(user)]
        assert len(kept) == 45
        assert set(kept) == acknowledged
        assert verify(store) == ()


def test_threads_read_and_write_concurrently(home: Path) -> None:
    with opened(home) as store:
        add_fact(store)

        def write() -> None:
            for _ in range(10):
                add_fact(store)

        def read() -> None:
            seen = 0
            for _ in range(50):
                now = len(store.ledger.signals("ada"))
                assert now >= seen
                seen = now

        with ThreadPoolExecutor(5) as threads:
            for work in [threads.submit(each) for each in (write, write, write, read, read)]:
                work.result()
        assert len(store.ledger.signals("ada")) == 31
        assert verify(store) == ()


# The clock is read once for the lock and again in the transaction. There this process stops until
# its input closes.
_STOPS_WHILE_WRITING = """
class Stopping(Clock):
    looks = 0
    def __call__(self):
        self.looks += 1
        if self.looks == 4:
            print("writing", flush=True)
            sys.stdin.read()
        return super().__call__()

import os
from personalpeft.store.home import open_store
opened(home).close()
store = open_store(home, now=Stopping(), entropy=os.urandom)
add_fact(store, text="first")
print(add_fact(store, text="second").id)
"""


def test_second_writer_gets_the_name_of_the_first_and_readers_continue(home: Path) -> None:
    process = beside(_STOPS_WHILE_WRITING, home)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    with opened(home, timeout=0.2) as store:
        assert [signal.payload["text"] for signal in store.ledger.signals("ada")] == ["first"]
        for write in (lambda: add_fact(store), lambda: store.blobs.put("ada", b"x")):
            begun = time.monotonic()
            with pytest.raises(Busy) as error:
                write()
            assert 0.15 < time.monotonic() - begun < 60
            assert f"process {process.pid} " in error.value.message
            assert "since 2026-01-02T" in error.value.message
        output(process)
        assert [signal.payload["text"] for signal in store.ledger.signals("ada")] == [
            "first",
            "second",
        ]
        add_fact(store)
        assert verify(store) == ()


def test_killed_transaction_leaves_neither_rows_nor_a_lock(home: Path) -> None:
    process = beside(_STOPS_WHILE_WRITING, home)
    assert killed_after(process, 1, 0) == ["writing"]
    with opened(home, timeout=0.2) as store:
        assert [signal.payload["text"] for signal in store.ledger.signals("ada")] == ["first"]
        add_fact(store)
        assert verify(store) == ()


def test_dead_process_is_not_named_as_the_lock_holder(home: Path) -> None:
    died = beside(_STOPS_WHILE_WRITING, home)
    killed_after(died, 1, 0)
    assert str(died.pid) in (home / "write.holder").read_text()
    nameless = beside(
        "from filelock import FileLock\nwith FileLock(home / 'write.lock'): print('held', flush=True); sys.stdin.read()",
        home,
    )
    assert nameless.stdout is not None
    assert nameless.stdout.readline() == "held\n"
    with opened(home, timeout=0.05) as store, pytest.raises(Busy) as error:
        add_fact(store)
    assert str(died.pid) not in error.value.message
    output(nameless)


def test_foreign_lock_on_the_database_is_waited_for_and_then_named(
    home: Path,
) -> None:
    opened(home).close()
    process = beside(
        "import sqlite3\nplain = sqlite3.connect(home / 'personalpeft.db')\nplain.execute('begin immediate')\n"
        "print('held', flush=True); sys.stdin.read()",
        home,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with opened(home, timeout=0.1) as store:
        with pytest.raises(Busy):
            add_fact(store)
        output(process)
        add_fact(store)


def test_lease_has_one_holder_with_a_name(home: Path) -> None:
    process = beside(
        "with opened(home) as store, store.leases.acquire('learn-ada'): print('held', flush=True); sys.stdin.read()",
        home,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with opened(home) as store:
        with pytest.raises(Busy) as error, store.leases.acquire("learn-ada"):
            pass
        assert f"process {process.pid} " in error.value.message
        with store.leases.acquire("learn-bob"):
            add_fact(store)
        process.kill()
        process.communicate(timeout=60)
        with store.leases.acquire("learn-ada"):
            with pytest.raises(Busy), store.leases.acquire("learn-ada"):
                pass
            refused: list[str] = []

            def take() -> None:
                try:
                    with store.leases.acquire("learn-ada"):
                        pass
                except Busy as error:
                    refused.append(error.message)

            thread = threading.Thread(target=take)
            thread.start()
            thread.join()
            assert len(refused) == 1
        with store.leases.acquire("learn-ada"):
            pass


def test_blob_is_visible_whole_or_not_at_all(home: Path) -> None:
    process = beside(
        "store = opened(home)\nfor number in range(40): print(store.blobs.put('ada', str(number).encode() * 500_000))",
        home,
    )
    seen = 0
    while process.poll() is None:
        for path in (home / "blobs").glob("*/*"):
            if re.fullmatch("[0-9a-f]{64}", path.name):
                assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
                seen += 1
    acknowledged = output(process).split()
    assert seen
    with opened(home) as store:
        assert all(store.blobs.read(digest) for digest in acknowledged)
        assert len(verify(store)) == len(acknowledged)


def test_signals_keep_their_order_of_acknowledgement_when_the_clock_goes_back(
    home: Path,
) -> None:
    with opened(home) as store:
        add_fact(store, text="one")
    with opened(home) as store:  # This clock starts at its beginning again.
        store.ledger.add_signal("ada", SignalKind.FACT, {"text": "two"})
        store.ledger.add_signal("ada", SignalKind.FACT, {"text": "three"})
        assert [signal.payload["text"] for signal in store.ledger.signals("ada")] == [
            "one",
            "two",
            "three",
        ]
