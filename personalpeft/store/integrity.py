"""Derives everything again that the home vouches for, and says what does not hold.

Invariant: nothing is changed, and one fault does not hide the next: after a broken link the chain is followed from what is stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import sqlite_utils

from personalpeft.errors import Damaged
from personalpeft.store import hash_chain
from personalpeft.store.base import Problem
from personalpeft.store.blobs import FileBlobs
from personalpeft.store.database import Database, Row, row, rows
from personalpeft.store.error_mapping import home_faults
from personalpeft.store.gc import turn, unnamed
from personalpeft.store.id_lookup import has_tombstones

_RESTORE = "Restore the home from a backup; what this entry says cannot be trusted."
_LEFTOVER = "Harmless: what a write that was cut short left behind. Run gc: it takes away what has lain there for a day."
_PAGE = 200


def verify(database: Database, blobs: FileBlobs, home: Path) -> tuple[Problem, ...]:
    """Every problem of the home; empty when all is well.

    Writers go on beside it: each user is seen at one moment, and a file that no revision names is looked at again in the writer's turn
    before it is called a leftover. A home that is open for reading only is checked without that, and what a writer is just adding
    may then be called one. Memory grows with one user's history and with what is wrong. Raises ``Busy``, ``HomeError``.
    """
    found: list[Problem] = []
    for problems in (
        _database_problems(database),
        _user_problems(database, home),
        _missing_blob_problems(database, blobs),
        _file_problems(database, blobs, home),
    ):
        try:
            with home_faults(home):
                found.extend(problems)
        except Damaged as error:
            found.append(Problem(database.path.name, error.message, error.hint))
    return tuple(found)


def _database_problems(database: Database) -> Iterator[Problem]:
    with database.reading() as db:
        for (said,) in db.conn.execute("pragma integrity_check").fetchall():
            if said != "ok":
                yield Problem(
                    "personalpeft.db",
                    f"SQLite finds the file damaged: {said}",
                    "Restore it from a backup.",
                )
        dangling: dict[tuple[str, str], int] = {}
        with closing(db.conn.execute("pragma foreign_key_check")) as broken:
            for table, _, parent, _ in broken:
                dangling[table, parent] = dangling.get((table, parent), 0) + 1
    for (table, parent), count in dangling.items():
        yield Problem(table, f"{count} of its rows name a {parent} that is not there.", _RESTORE)


def _user_problems(database: Database, home: Path) -> Iterator[Problem]:
    """What is wrong with each user's entries, provenance and heads, a page of users at a time."""
    after = ""
    while True:
        # A page, not all: a moment that is held for long keeps SQLite from clearing its journal.
        with database.reading() as db:
            page = [
                each["id"]
                for each in rows(
                    db, "select id from user where id > ? order by id limit ?", after, _PAGE
                )
            ]
            for user in page:
                try:
                    with home_faults(home):
                        yield from _chain_problems(db, user)
                        yield from _provenance_problems(db, user)
                        yield from _head_problems(db, user)
                except Damaged as error:
                    yield Problem(user, error.message, error.hint)
        if len(page) < _PAGE:
            return
        after = page[-1]


def _chain_problems(db: sqlite_utils.Database, user: str) -> Iterator[Problem]:
    contents, stones = _contents(db, user), _stones(db, user)
    before, expected = hash_chain.BEFORE_THE_FIRST, 1
    for entry in rows(
        db, "select seq, kind, digest, chain from entry where user = ? order by seq", user
    ):
        seq, kind = entry["seq"], entry["kind"]
        where = f"{user}, entry {seq} ({kind})"
        if seq != expected:
            yield Problem(user, f"Entries {expected} to {seq - 1} are gone.", _RESTORE)
        elif hash_chain.link(before, seq, kind, entry["digest"]) != entry["chain"]:
            yield Problem(
                where,
                "It does not follow from the entry before: one of the two was changed.",
                _RESTORE,
            )
        content, stone = contents.pop((kind, seq), None), stones.pop((kind, seq), None)
        if stone is not None:
            if hash_chain.row_digest(hash_chain.TOMBSTONE, stone) != entry["digest"]:
                yield Problem(
                    where,
                    f"That it was forgotten is not what was recorded{_named(stone)}.",
                    _RESTORE,
                )
            if content is not None:
                contents[kind, seq] = content
        elif content is None:
            yield Problem(where, "What it says is gone.", _RESTORE)
        elif hash_chain.row_digest(kind, content) != entry["digest"]:
            yield Problem(where, f"What it says was changed{_named(content)}.", _RESTORE)
        before, expected = entry["chain"], seq + 1
    for (kind, seq), content in (*contents.items(), *stones.items()):
        yield Problem(
            f"{user}, {kind} {seq}", f"It is not an entry of the ledger{_named(content)}.", _RESTORE
        )
    tail = row(db, "select entries, chain from user where id = ?", user)
    if tail is not None and (tail["entries"], tail["chain"]) != (expected - 1, before):
        yield Problem(
            user,
            f"The ledger should end with entry {tail['entries']} and ends with {expected - 1}.",
            _RESTORE,
        )


def _contents(db: sqlite_utils.Database, user: str) -> dict[tuple[str, int], Row]:
    return {
        (kind, content["seq"]): content
        for kind in hash_chain.KINDS
        for content in rows(db, f"select * from {kind} where user = ?", user)
    }


def _stones(db: sqlite_utils.Database, user: str) -> dict[tuple[str, int], Row]:
    if not has_tombstones(db):
        return {}
    found = rows(db, f"select * from {hash_chain.TOMBSTONE} where user = ?", user)
    return {(stone["kind"], stone["seq"]): stone for stone in found}


def _named(content: Row) -> str:
    name = (
        content.get("id")
        or content.get("revision")
        or content.get("signal")
        or content.get("layer")
    )
    return f" ({name})" if name else ""


def _provenance_problems(db: sqlite_utils.Database, user: str) -> Iterator[Problem]:
    judged: dict[str, dict[str, str]] = {}
    for each in rows(
        db, "select revision, signals from judgement where user = ? order by seq", user
    ):
        known = judged.setdefault(each["revision"], {})
        for signal, role in _signals(each["signals"]).items():
            known.setdefault(signal, role)
    recorded: dict[str, dict[str, str]] = {revision: {} for revision in judged}
    for each in rows(db, "select revision, signal, role from provenance where user = ?", user):
        recorded.setdefault(each["revision"], {})[each["signal"]] = each["role"]
    for revision, signals in recorded.items():
        if signals != judged.get(revision):
            yield Problem(
                f"{user}, {revision}",
                "Its provenance is not what was recorded when it was judged.",
                _RESTORE,
            )
    missing = rows(
        db,
        "select p.revision, p.signal from provenance p left join signal s on s.user = p.user and s.id = p.signal"
        " where p.user = ? and s.id is null",
        user,
    )
    for each in missing:
        where = f"{user}, {each['revision']}"
        yield Problem(
            where,
            f"It was built from {each['signal']}, which is not there.",
            "Restore, or build it again.",
        )


def _signals(text: str) -> dict[str, str]:
    try:
        signals = json.loads(text)
    except ValueError:
        return {}  # The chain has already said that this row was changed.
    return signals if isinstance(signals, dict) else {}


def _head_problems(db: sqlite_utils.Database, user: str) -> Iterator[Problem]:
    heads = rows(
        db,
        "select l.user, l.name, l.head, r.layer,"
        " (select m.after from move m where m.user = l.user and m.layer = l.name order by m.seq desc limit 1) as moved_to"
        " from layer l left join revision r on r.user = l.user and r.id = l.head where l.user = ?",
        user,
    )
    for head in heads:
        where = f"{head['user']}, layer {head['name']}"
        remedy = "Roll the layer back to a revision that is there."
        if head["head"] is not None and head["layer"] is None:
            yield Problem(where, f"Its head {head['head']} is not there.", remedy)
        elif head["head"] is not None and head["layer"] != head["name"]:
            yield Problem(
                where, f"Its head {head['head']} is a revision of {head['layer']}.", remedy
            )
        if head["head"] != head["moved_to"]:
            last = head["moved_to"] or "the base"
            yield Problem(
                where,
                f"Its head is {head['head'] or 'the base'}, but the last move went to {last}.",
                remedy,
            )


def _missing_blob_problems(database: Database, blobs: FileBlobs) -> Iterator[Problem]:
    after = ""
    while True:
        with database.reading() as db:
            sql = "select distinct digest from revision where digest > ? order by digest limit ?"
            page = [each["digest"] for each in rows(db, sql, after, _PAGE)]
            for digest in page:
                if not blobs.holds(digest):
                    named = row(
                        db, "select user, id from revision where digest = ? limit 1", digest
                    )
                    where = f"{named['user']}, {named['id']}" if named else digest
                    remedy = "Restore the file, or roll back and build again."
                    yield Problem(where, f"Its blob {digest} is missing.", remedy)
        if len(page) < _PAGE:
            return
        after = page[-1]


def _file_problems(database: Database, blobs: FileBlobs, home: Path) -> Iterator[Problem]:
    for _, files in blobs.handfuls():
        intact = {path: blobs.is_intact(path) for path in files}
        with database.reading() as db:
            loose = unnamed(db, [path.name for path in files])
        if loose:
            # What is on its way is there for good, or gone, once it is nobody's turn but ours.
            with turn(database), database.reading() as db:
                loose = unnamed(
                    db, [path.name for path in files if path.name in loose and path.exists()]
                )
        for path, sound in intact.items():
            where = str(path.relative_to(home))
            if path.name in loose:
                yield Problem(
                    where, "No revision names it." if sound else "It is not a blob.", _LEFTOVER
                )
            elif not sound and path.exists():
                yield Problem(
                    where,
                    "It is not what its digest says.",
                    "Restore the file, or roll back and build again.",
                )
