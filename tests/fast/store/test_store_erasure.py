"""An erasure leaves no byte of the erased data in the home, and all other data stays valid."""

from __future__ import annotations

import random
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from store_makers import BASE, add_fact, add_revision, add_turn, beside, opened, output
from test_store_durability import SEEDS, killed_after

from personalpeft.errors import Forgotten
from personalpeft.store.database import JOURNAL_MODE
from personalpeft.store.erasure import delete_pending_files, erase, erase_user
from personalpeft.store.integrity import verify
from personalpeft.store.store import Store
from personalpeft.store.types import Erasure
from personalpeft.types import Json, Message, SignalKind

SECRET = "Zorblax the quiet"


def holds(home: Path, text: str = SECRET) -> list[str]:
    """Return the files of the home that contain the text."""
    return [
        str(p.relative_to(home))
        for p in home.rglob("*")
        if p.is_file() and text.encode() in p.read_bytes()
    ]


def fill_user(store: Store, user: str = "ada") -> Erasure:
    """Add data to erase in every table of a user, and return its erasure."""
    for number in range(30):
        add_turn(store, user, reply=f"Before, number {number}.")
    turn = add_turn(store, user, reply=f"{SECRET}.")
    kept, fact = add_fact(store, user), add_fact(store, user, text=f"My dog is {SECRET}.")
    edit = store.ledger.add_signal(user, SignalKind.EDIT, {"text": SECRET * 200}, turn=turn.id)
    again = store.ledger.add_signal(user, SignalKind.EDIT, {"text": "Boil it."}, turn=turn.id)
    store.ledger.retract(user, fact.id)
    store.catalog.add_vectors(
        user, "m", {fact.id: np.ones(4, np.float32), kept.id: np.ones(4, np.float32)}
    )
    first = add_revision(store, b"first " + user.encode(), user=user, signals={kept.id: "trained"})
    second = add_revision(
        store,
        f"{user} {SECRET}".encode(),
        user=user,
        signals={fact.id: "trained"},
        parent=first.id,
        reason=SECRET,
    )
    store.catalog.move_head(user, "style", first.id, base=BASE, cause="rollback")
    store.catalog.move_head(user, "style", second.id, base=BASE, cause="rollback")
    store.catalog.add_report(user, {"lines": SECRET, "kept": "this"})
    store.save_checkpoint(user, "style", SECRET.encode())
    later = add_turn(store, user, reply=f"As I lines, {SECRET}.")
    assert again.supersedes == edit.id
    return Erasure(
        turns=frozenset(),
        signals=frozenset({fact.id, edit.id}),
        revisions=frozenset({second.id}),
        emptied={turn.id: (Message("user", "Who?"),), later.id: later.messages},
        redact_json=_redact_secret,
    )


def _redact_secret(lines: Json) -> Json:
    return {key: value for key, value in lines.items() if value != SECRET}


def test_no_byte_of_the_erased_data_stays_and_other_data_is_valid(home: Path) -> None:
    with opened(home) as store:
        for user in ("ada", "bob"):
            fill_user(store, user)
            assert holds(home)
        ada, bob = fill_user(store, "eve"), store.ledger.turns("bob")
        for user in ("ada", "bob"):
            again = fill_user(store, user)
            erase(store, user, again)
        erase(store, "eve", ada)
        assert len(bob) == 32
    with opened(home) as store:
        assert verify(store) == ()


@pytest.fixture
def erasure(store: Store) -> Erasure:
    erasure = fill_user(store)
    destroyed = erase(store, "ada", erasure)
    assert (destroyed.reports, destroyed.files, destroyed.complete) == (1, 1, True)
    return erasure


def test_remaining_data_does_not_quote_the_erased(
    home: Path, store: Store, erasure: Erasure
) -> None:
    assert holds(home) == []
    assert verify(store) == ()
    assert store.catalog.reports("ada")[-1] == {"kept": "this"}
    assert store.load_checkpoint("ada", "style") is None
    assert set(store.catalog.vectors("ada", "m")).isdisjoint(erasure.signals)


def test_head_follows_the_remaining_moves(store: Store, erasure: Erasure) -> None:
    (layer,) = store.catalog.layers("ada")
    (first,) = store.catalog.revisions("ada")
    assert layer.head == first.id
    assert [move.after for move in store.catalog.head_moves("ada")] == [first.id]


@pytest.mark.parametrize("is_other", [True, False])
def test_head_of_another_base_does_not_come_back(home: Path, is_other: bool) -> None:
    with opened(home) as store:
        store.catalog.ensure_user("ada")
        first = add_revision(store, b"first", base="a" * 64 if is_other else BASE)
        second = add_revision(store, b"second")
        erased = erase(store, "ada", Erasure(revisions=frozenset({second.id})))
        head = None if is_other else first.id
        assert erased.heads == {"style": head}
        assert store.catalog.layers("ada")[0].head == head
        assert verify(store) == ()


def test_id_of_erased_data_raises_forgotten(store: Store, erasure: Erasure) -> None:
    for signal in erasure.signals:
        for wanted in (signal, signal[:-2]):
            with pytest.raises(Forgotten, match="2026-01-02"):
                store.ledger.signal("ada", wanted)
        with pytest.raises(Forgotten):
            store.ledger.retract("ada", signal)
    (revision,) = erasure.revisions
    with pytest.raises(Forgotten):
        store.catalog.revision("ada", revision)
    with pytest.raises(LookupError) as error:
        store.ledger.signal("bob", signal)
    assert not isinstance(error.value, Forgotten)


def test_superseding_signal_stays_and_supersedes_nothing(store: Store, erasure: Erasure) -> None:
    edits = store.ledger.signals("ada", kinds=[SignalKind.EDIT])
    assert [(edit.payload["text"], edit.supersedes) for edit in edits] == [("Boil it.", None)]


def test_turn_whose_reply_used_erased_data_keeps_its_request(
    store: Store, erasure: Erasure
) -> None:
    emptied = [turn for turn in store.ledger.turns("ada") if turn.id in erasure.emptied]
    assert [(turn.reply, turn.messages) for turn in emptied] == [
        ("", erasure.emptied[turn.id]) for turn in emptied
    ]


def test_same_revision_can_be_built_again(store: Store, erasure: Erasure) -> None:
    built = add_revision(store, f"ada {SECRET}".encode())
    assert {built.id} == erasure.revisions
    assert store.catalog.revision("ada", built.id).digest == built.digest
    assert store.blobs.read(built.digest)
    assert verify(store) == ()


def test_blob_of_another_user_stays(home: Path, store: Store) -> None:
    erasure = fill_user(store)
    store.catalog.ensure_user("bob")
    theirs = add_revision(store, f"ada {SECRET}".encode(), user="bob")
    assert erase(store, "ada", erasure).files == 0
    assert store.blobs.read(theirs.digest)
    assert verify(store) == ()


def test_tombstones_cannot_be_forged(home: Path, store: Store, erasure: Erasure) -> None:
    store.close()
    for change in (
        "update tombstone set at = '2020-01-01T00:00:00.000000Z'",
        "delete from tombstone",
        "insert into tombstone (user, seq, kind, at) values ('ada', 1, 'turn', '2020')",
    ):
        with closing(sqlite3.connect(home / "personalpeft.db")) as database:
            before = home.joinpath("personalpeft.db").read_bytes()
            database.execute(change)
            database.commit()
        with opened(home) as again:
            assert verify(again) != ()
        home.joinpath("personalpeft.db").write_bytes(before)


def test_turn_begun_before_an_erasure_is_not_added_after_it(store: Store) -> None:
    erasure = fill_user(store)
    began = store.ledger.erasure_mark("ada")
    turn = add_turn(store, erasure_mark=began)
    assert store.ledger.erasure_mark("ada") == began
    erase(store, "ada", erasure)
    before = store.ledger.turns("ada"), store.ledger.signals("ada")
    with pytest.raises(Forgotten):
        add_turn(store, erasure_mark=began)
    with pytest.raises(Forgotten):
        store.ledger.add_signal(
            "ada", SignalKind.COMMENT, {"text": SECRET}, turn=turn.id, erasure_mark=began
        )
    assert (store.ledger.turns("ada"), store.ledger.signals("ada")) == before
    assert add_turn(store, erasure_mark=store.ledger.erasure_mark("ada"))
    assert add_turn(store, "bob", erasure_mark=None)


_FORGETS = """
from test_store_erasure import fill_user
store = opened(home)
print("ready", flush=True)
while True:
    removal = fill_user(store)
    print("filled", flush=True)
    erase(store, "ada", removal)
    print("forgotten", flush=True)
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_erasure_is_complete_or_absent_and_finished_at_the_next_open(
    home: Path, seed: int
) -> None:
    moment = random.Random(seed)
    lines = killed_after(beside(_FORGETS, home), 2, moment.uniform(0, 0.06))
    with opened(home) as store:
        left = [p for p in verify(store) if "Harmless" not in p.remedy]
        assert left == []
        whole = any(
            SECRET in str(signal.payload) for signal in store.ledger.signals("ada", current=False)
        )
        assert lines[-1] in ("filled", "forgotten")
        if not whole:
            found = holds(home)
            # The next iteration may have written a file that no row names yet.
            assert all(name.startswith(("blobs/", "sessions/")) for name in found) or any(
                SECRET in turn.reply for turn in store.ledger.turns("ada")
            )


def test_files_left_by_a_kill_are_deleted_at_the_next_open(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(home) as store:
        erasure = fill_user(store)
        # As after a kill: the rows are deleted and the files are not.
        monkeypatch.setattr("personalpeft.store.erasure.delete_pending_files", lambda *some: False)
        assert not erase(store, "ada", erasure).complete
        assert holds(home)
    monkeypatch.undo()
    with opened(home, read_only=True):
        assert holds(home)
    opened(home).close()
    assert holds(home) == []


@pytest.mark.skipif(JOURNAL_MODE != "wal", reason="without a WAL readers and writers take turns")
def test_reader_of_an_older_snapshot_delays_the_erasure_and_does_not_prevent_it(home: Path) -> None:
    script = """
store = opened(home)
with store.database.read_transaction() as db:
    db.execute("select count(*) from turn").fetchone()
    print("reading", flush=True)
    sys.stdin.read()
"""
    with opened(home, timeout=0.2) as store:
        erasure = fill_user(store)
        reader = beside(script, home)
        assert reader.stdout is not None
        reader.stdout.readline()
        try:
            complete = erase(store, "ada", erasure).complete
            # Opening does not wait for it: a replication reads without end.
            began = time.monotonic()
            opened(home).close()
            assert time.monotonic() - began < 8
        finally:
            output(reader)
        assert complete in (True, False)
        assert verify(store) == ()
    opened(home).close()
    assert holds(home) == []


def test_full_disk_leaves_everything_unchanged(home: Path) -> None:
    script = """
import resource
from personalpeft.errors import HomeError
from test_store_erasure import fill_user
store = opened(home)
removal = fill_user(store)
size = (home / "personalpeft.db").stat().st_size
largest = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, largest))
try:
    erase(store, "ada", removal)
except HomeError as error:
    print(error.message)
resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
print(len(store.ledger.signals("ada", current=False)), verify(store) == ())
erase(store, "ada", removal)
print(verify(store) == ())
"""
    refusal, before, after = output(beside(script, home)).splitlines()
    assert "nothing was changed" in refusal
    assert (before, after) == ("4 True", "True")
    assert holds(home) == []


# Whole users


_FORGETS_USERS = """
from test_store_erasure import fill_user
store = opened(home)
print("ready", flush=True)
while True:
    fill_user(store)
    print("filled", flush=True)
    erase_user(store, "ada")
    delete_pending_files(store)
    print("forgotten", flush=True)
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_erasure_of_a_user_is_complete_or_absent_and_finished_at_the_next_open(
    home: Path, seed: int
) -> None:
    moment = random.Random(seed)
    printed = killed_after(beside(_FORGETS_USERS, home), 2, moment.uniform(0, 0.06))
    assert printed[-1] in ("filled", "forgotten")
    with opened(home) as store:
        assert [p for p in verify(store) if "Harmless" not in p.remedy] == []
        is_gone = not store.catalog.users()
    if is_gone:
        # The next iteration may have written a file that no row names yet.
        assert all(name.startswith(("blobs/", "sessions/")) for name in holds(home))


def test_user_files_left_by_a_kill_are_deleted_at_the_next_open(home: Path) -> None:
    with opened(home) as store:
        fill_user(store)
        with store.leases.acquire("learn-ada"), store.leases.acquire("publish-ada"):
            # As after a kill: the rows are deleted and the files are not.
            erase_user(store, "ada")
        assert holds(home)
    with opened(home, read_only=True):
        assert holds(home)
    opened(home).close()
    assert holds(home) == holds(home, "ada") == []
    assert not list((home / "locks").iterdir())


def test_blob_shared_with_another_user_stays(store: Store) -> None:
    fill_user(store)
    store.catalog.ensure_user("bob")
    theirs = add_revision(store, f"ada {SECRET}".encode(), user="bob")
    erase_user(store, "ada")
    assert delete_pending_files(store)
    assert store.blobs.read(theirs.digest)
    assert verify(store) == ()


def test_turn_begun_before_a_user_was_erased_is_not_added_after_it(store: Store) -> None:
    fill_user(store)
    began = store.ledger.erasure_mark("ada")
    erase_user(store, "ada")
    for _ in range(2):
        with pytest.raises(Forgotten):
            add_turn(store, erasure_mark=began)
        store.catalog.ensure_user("ada")
    assert store.ledger.turns("ada") == ()
