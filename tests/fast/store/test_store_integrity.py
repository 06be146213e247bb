"""``verify`` finds changes that were made without the store."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from store_makers import add_fact, add_revision, add_turn, beside, opened, output

from personalpeft.errors import Damaged
from personalpeft.store.integrity import verify
from personalpeft.store.types import Problem
from personalpeft.types import SignalKind


@pytest.fixture(scope="module")
def full_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a closed home with data of each kind."""
    home = tmp_path_factory.mktemp("full") / "home"
    with opened(home) as store:
        for user in ("ada", "bob"):
            turn = add_turn(store, user)
            store.ledger.add_signal(user, SignalKind.RATING, {"value": 1}, turn=turn.id)
            store.ledger.add_signal(user, SignalKind.RATING, {"value": -1}, turn=turn.id)
            fact, question = add_fact(store, user), add_fact(store, user)
            store.ledger.retract(user, add_fact(store, user).id)
            signals = {fact.id: "trained", question.id: "held_out"}
            first = add_revision(store, b"first", user=user, signals=signals)
            add_revision(store, b"second", user=user, parent=first.id)
            add_revision(store, b"memory", user=user, layer="memory")
            store.catalog.add_report(user, {"verdict": "abstained"})
        assert verify(store) == ()
    return home


@pytest.fixture
def full(full_home: Path, home: Path) -> Path:
    """Return a copy of ``full_home``."""
    shutil.copytree(full_home, home)
    return home


def tampered(home: Path, *statements: str) -> None:
    """Change the closed home with plain SQLite, foreign keys off, as a user with an editor would."""
    with closing(sqlite3.connect(home / "personalpeft.db")) as database:
        for statement in statements:
            assert database.execute(statement).rowcount != 0, statement
        database.commit()


def problems(home: Path) -> tuple[Problem, ...]:
    with opened(home) as store:
        return verify(store)


CHANGES = {
    "a reply": "update turn set reply = 'Fry it.' where user = 'ada'",
    "a prompt": "update turn set messages = replace(messages, 'boil', 'fry') where user = 'ada'",
    "the stack of a turn": 'update turn set stack = \'{"base":"x","entries":[]}\' where user = \'ada\'',
    "when a turn was": "update turn set at = '2020-01-01T00:00:00.000000Z' where user = 'ada'",
    "a payload": "update signal set payload = '{\"value\":5}' where user = 'ada' and supersedes is not null",
    "what is superseded": "update signal set supersedes = null where user = 'ada' and supersedes is not null",
    "a turn that is gone": "delete from turn where user = 'ada'",
    "a signal that is gone": "delete from signal where user = 'ada' and kind = 'fact' and seq = 6",
    "a retraction that is gone": "delete from retraction where user = 'ada'",
    "a retraction that moved": "update retraction set signal = (select id from signal where user = 'ada' limit 1) where user = 'ada'",
    "a recipe": "update revision set recipe = '{\"rank\":9}' where user = 'ada'",
    "a verdict": "update judgement set verdict = 'refused' where user = 'ada'",
    "a judgement that is gone": "delete from judgement where user = 'ada' and seq = (select max(seq) from judgement where user = 'ada')",
    "a report": "update report set body = '{}' where user = 'ada'",
    "a cause": "update move set cause = 'chance' where user = 'ada'",
    "a digest": "update entry set digest = chain where user = 'ada' and seq = 2",
    "a chain": "update entry set chain = digest where user = 'ada' and seq = 2",
    "an entry that is gone": "delete from entry where user = 'ada' and seq = 3",
    "a head": "update layer set head = null where user = 'ada' and name = 'style'",
    "a head that is nowhere": "update layer set head = 'style@000000000000' where user = 'ada' and name = 'style'",
    "a head of another layer": "update layer set head = (select head from layer where user = 'ada' and name = 'memory')"
    " where user = 'ada' and name = 'style'",
    "provenance": "update provenance set role = 'trained' where user = 'ada'",
    "provenance that is gone": "delete from provenance where user = 'ada' and role = 'held_out'",
    "the tail": "update user set entries = entries - 1 where id = 'ada'",
    "a user": "delete from user where id = 'ada'",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_change_is_found_and_located(full: Path, change: str) -> None:
    tampered(full, change)
    found = problems(full)
    assert found
    assert all("bob" not in problem.where for problem in found)
    assert all(problem.fault and problem.remedy for problem in found)


def test_deleting_the_last_signals_with_their_entry_is_found(full: Path) -> None:
    tampered(
        full,
        "delete from report where user = 'ada' and seq = (select entries from user where id = 'ada')",
        "delete from entry where user = 'ada' and seq = (select entries from user where id = 'ada')",
    )
    assert any("ada" in problem.where for problem in problems(full))


def test_missing_signal_of_a_revision_is_found(full: Path) -> None:
    tampered(
        full,
        "delete from signal where user = 'ada' and id in (select signal from provenance where user = 'ada')",
    )
    assert any("s_" in problem.fault for problem in problems(full))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("hurt", "fault"),
    [
        (_flip, "not match its digest"),
        (lambda path: path.write_bytes(b""), "not match its digest"),
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.rename(path.with_name("0" * 64)), "missing"),
    ],
    ids=["a bit", "all of it", "gone", "renamed"],
)
def test_damaged_blob_is_found(full: Path, hurt: Callable[[Path], object], fault: str) -> None:
    blob = min((full / "blobs").glob("*/*"))
    hurt(blob)
    assert any(fault in problem.fault for problem in problems(full))


def test_leftover_files_are_harmless(full: Path) -> None:
    with opened(full) as store:
        store.blobs.put("ada", b"nobody names me")
    folder = min((full / "blobs").iterdir())
    (folder / ".0123-xyz.part").write_bytes(b"half")
    found = problems(full)
    assert sorted(problem.fault for problem in found) == [
        "It is not a blob.",
        "No revision names it.",
    ]
    assert all("Harmless" in problem.remedy for problem in found)


def test_overwritten_pages_are_a_problem_without_a_traceback(full: Path) -> None:
    database = full / "personalpeft.db"
    with closing(sqlite3.connect(database)) as plain:
        (page,) = plain.execute("select rootpage from sqlite_master where name = 'turn'").fetchone()
        (size,) = plain.execute("pragma page_size").fetchone()
    data = bytearray(database.read_bytes())
    data[(page - 1) * size : (page - 1) * size + 64] = b"\xff" * 64
    database.write_bytes(data)
    assert problems(full)
    with opened(full) as store, pytest.raises(Damaged):
        store.ledger.turns("ada")


@pytest.mark.parametrize(
    "text", ["cast(x'ff22' as text)", "'{'", "'[]'"], ids=["bytes", "half JSON", "a list"]
)
def test_unreadable_text_is_a_problem_without_a_traceback(full: Path, text: str) -> None:
    tampered(full, f"update judgement set signals = {text} where user = 'ada'")
    assert problems(full)
    tampered(full, f"update turn set used = {text} where user = 'ada'")
    assert problems(full)


def test_concurrent_writes_are_no_problem(home: Path) -> None:
    script = """
store = opened(home)
store.catalog.ensure_user(sys.argv[2])
for number in range(30):
    signal = add_fact(store, sys.argv[2])
    add_revision(store, f"{sys.argv[2]} {number}".encode(), user=sys.argv[2], signals={signal.id: "trained"})
"""
    opened(home).close()
    writers = [beside(script, home, user) for user in ("ada", "bob")]
    times = 0
    with opened(home) as store:
        while any(writer.poll() is None for writer in writers):
            assert verify(store) == ()
            times += 1
    for writer in writers:
        output(writer)
    assert times > 3


def test_problem_of_one_user_does_not_hide_that_of_the_next(full: Path) -> None:
    tampered(full, "update turn set used = cast(x'ff22' as text) where user = 'ada'")
    tampered(full, "update report set body = '{}' where user = 'bob'")
    assert {problem.where.split(",")[0] for problem in problems(full)} == {"ada", "bob"}


def test_verify_changes_nothing(full: Path) -> None:
    _flip(min((full / "blobs").glob("*/*")))
    before = {path: path.read_bytes() for path in full.rglob("*") if path.is_file()}
    assert problems(full)
    assert {path: path.read_bytes() for path in full.rglob("*") if path.is_file()} == before
