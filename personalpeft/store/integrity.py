"""Verifies a home: derives every digest again and checks every reference.

Invariant: it changes nothing, and one fault does not hide the next. After a broken link it follows
the chain from the stored value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing

from personalpeft.errors import Damaged
from personalpeft.former_names import ROLES
from personalpeft.store.blobs import DIGEST
from personalpeft.store.database import Database, Row, fetch_all, fetch_one
from personalpeft.store.error_mapping import map_home_errors, sqlite3
from personalpeft.store.hash_chain import GENESIS, chain_digest, read_contents, row_digest
from personalpeft.store.revisions import first_roles, unnamed_blobs
from personalpeft.store.rows import TOMBSTONE
from personalpeft.store.store import Store
from personalpeft.store.types import LostBlob, Problem

_RESTORE = "Restore the home from a backup; what this entry says cannot be trusted."
_REPAIR = "Run verify --repair, which builds it again; or restore the file, or roll back."
_ROLL_BACK = "Roll the layer back to a revision that is there."
_LEFTOVER = (
    "Harmless: an interrupted write left it. Run gc, which deletes partial files at once and unused "
    "adapters after a day."
)
_FOREIGN = "Harmless: another program wrote it. Delete it, or move it away."
_PAGE_SIZE = 200
_DIGESTS = "select distinct digest as key from revision where digest > ? order by digest limit ?"


def verify(store: Store) -> tuple[Problem, ...]:
    """Return every problem of a home; empty if there is none.

    Writers go on meanwhile. Each user is read at one moment. A file that no revision names is
    checked again under the write lock. Where no file can be written there is no lock, so a file
    that a writer is just adding may be reported. Memory grows with the longest history of one user.
    Raises ``Busy``, ``HomeError``.
    """
    return _run(store, _check_database, _check_users, _check_missing_blobs, _check_files)


def verify_database(store: Store) -> tuple[Problem, ...]:
    """Return every problem of a home's database, as ``verify`` does. Reads no adapter file."""
    return _run(store, _check_database, _check_users)


def _run(store: Store, *checks: Callable[[Store], Iterator[Problem]]) -> tuple[Problem, ...]:
    problems: list[Problem] = []
    for check in checks:
        try:
            with map_home_errors(store.home):
                problems.extend(check(store))
        except Damaged as error:
            problems.append(Problem(store.database.path.name, error.message, error.hint))
    return tuple(problems)


def _check_database(store: Store) -> Iterator[Problem]:
    with store.database.read_transaction() as db:
        for (result,) in db.execute("pragma integrity_check").fetchall():
            if result != "ok":
                fault = f"SQLite reports damage: {result}"
                yield Problem(store.database.path.name, fault, "Restore it from a backup.")
        dangling: dict[tuple[str, str], int] = {}
        with closing(db.execute("pragma foreign_key_check")) as broken:
            for table, _, parent, _ in broken:
                dangling[table, parent] = dangling.get((table, parent), 0) + 1
    for (table, parent), count in dangling.items():
        yield Problem(table, f"{count} of its rows name a {parent} that is missing.", _RESTORE)


def _pages(database: Database, sql: str) -> Iterator[tuple[sqlite3.Connection, list[str]]]:
    """Yield pages of keys, each inside its own read transaction.

    A long transaction would keep SQLite from clearing its journal.
    """
    after = ""
    while True:
        with database.read_transaction() as db:
            page = [row["key"] for row in fetch_all(db, sql, after, _PAGE_SIZE)]
            yield db, page
        if len(page) < _PAGE_SIZE:
            return
        after = page[-1]


def _check_users(store: Store) -> Iterator[Problem]:
    sql = "select id as key from user where id > ? order by id limit ?"
    for db, users in _pages(store.database, sql):
        for user in users:
            try:
                with map_home_errors(store.home):
                    yield from _check_chain(db, user)
                    yield from _check_provenance(db, user)
                    yield from _check_heads(db, user)
            except Damaged as error:
                yield Problem(user, error.message, error.hint)


def _check_chain(db: sqlite3.Connection, user: str) -> Iterator[Problem]:
    contents: dict[tuple[str, int], Row] = {}
    tombstones: dict[tuple[str, int], Row] = {}
    for table, row in read_contents(db, user):
        if table == TOMBSTONE:
            tombstones[row["kind"], row["seq"]] = row
        else:
            contents[table, row["seq"]] = row
    before, expected = GENESIS, 1
    sql = "select seq, kind, digest, chain from entry where user = ? order by seq"
    for entry in fetch_all(db, sql, user):
        seq, kind = entry["seq"], entry["kind"]
        where = f"{user}, entry {seq} ({kind})"
        if seq != expected:
            yield Problem(user, f"Entries {expected} to {seq - 1} are missing.", _RESTORE)
        elif chain_digest(before, seq, kind, entry["digest"]) != entry["chain"]:
            fault = "It does not follow from the entry before: one of the two was changed."
            yield Problem(where, fault, _RESTORE)
        content, tombstone = contents.pop((kind, seq), None), tombstones.pop((kind, seq), None)
        if tombstone is not None:
            if row_digest(TOMBSTONE, tombstone) != entry["digest"]:
                yield Problem(where, f"Its tombstone was changed{_name(tombstone)}.", _RESTORE)
            if content is not None:
                contents[kind, seq] = content
        elif content is None:
            yield Problem(where, "Its content is missing.", _RESTORE)
        elif row_digest(kind, content) != entry["digest"]:
            yield Problem(where, f"Its content was changed{_name(content)}.", _RESTORE)
        before, expected = entry["chain"], seq + 1
    for (kind, seq), content in (*contents.items(), *tombstones.items()):
        fault = f"It is not an entry of the ledger{_name(content)}."
        yield Problem(f"{user}, {kind} {seq}", fault, _RESTORE)
    tail = fetch_one(db, "select entries, chain from user where id = ?", user)
    if tail is not None and (tail["entries"], tail["chain"]) != (expected - 1, before):
        fault = f"The ledger must end with entry {tail['entries']}, but ends with {expected - 1}."
        yield Problem(user, fault, _RESTORE)


def _name(row: Row) -> str:
    name = row.get("id") or row.get("revision") or row.get("signal") or row.get("layer")
    return f" ({name})" if name else ""


def _check_provenance(db: sqlite3.Connection, user: str) -> Iterator[Problem]:
    sql = "select revision, signals from judgement where user = ? order by seq"
    try:
        judged = first_roles(fetch_all(db, sql, user))
    except (Damaged, AttributeError):
        return  # The chain has already reported the row as changed.
    recorded: dict[str, dict[str, str]] = {revision: {} for revision in judged}
    sql = "select revision, signal, role from provenance where user = ?"
    for row in fetch_all(db, sql, user):
        role = ROLES.get(row["role"], row["role"])
        recorded.setdefault(row["revision"], {})[row["signal"]] = role
    for revision, signals in recorded.items():
        if signals != judged.get(revision):
            fault = "Its provenance differs from what its judgements recorded."
            yield Problem(f"{user}, {revision}", fault, _RESTORE)
    sql = (
        "select p.revision, p.signal from provenance p"
        " left join signal s on s.user = p.user and s.id = p.signal"
        " where p.user = ? and s.id is null"
    )
    for row in fetch_all(db, sql, user):
        fault = f"It was built from {row['signal']}, which is missing."
        yield Problem(f"{user}, {row['revision']}", fault, "Restore, or build it again.")


def _check_heads(db: sqlite3.Connection, user: str) -> Iterator[Problem]:
    sql = (
        "select l.name, l.head, r.layer, (select m.after from move m"
        " where m.user = l.user and m.layer = l.name order by m.seq desc limit 1) as moved_to"
        " from layer l left join revision r on r.user = l.user and r.id = l.head where l.user = ?"
    )
    for row in fetch_all(db, sql, user):
        where, head = f"{user}, layer {row['name']}", row["head"]
        if head is not None and row["layer"] is None:
            yield Problem(where, f"Its head {head} is missing.", _ROLL_BACK)
        elif head is not None and row["layer"] != row["name"]:
            yield Problem(where, f"Its head {head} is a revision of {row['layer']}.", _ROLL_BACK)
        if head != row["moved_to"]:
            last = row["moved_to"] or "the base"
            fault = f"Its head is {head or 'the base'}, but its last move went to {last}."
            yield Problem(where, fault, _ROLL_BACK)


def _check_missing_blobs(store: Store) -> Iterator[Problem]:
    for db, digests in _pages(store.database, _DIGESTS):
        for digest in digests:
            if not store.blobs.exists(digest):
                sql = "select user, id from revision where digest = ? limit 1"
                named = fetch_one(db, sql, digest)
                where = f"{named['user']}, {named['id']}" if named else digest
                yield Problem(where, f"Its blob {digest} is missing.", _REPAIR)


def find_lost_blobs(store: Store) -> tuple[LostBlob, ...]:
    """Return the blobs that revisions name and that are missing or damaged, oldest build first.

    A blob that a later revision was built on comes before those of that revision.
    """
    named = [digest for _, digests in _pages(store.database, _DIGESTS) for digest in digests]
    # Outside a transaction, since hashing takes long.
    lost = [each for each in named if not store.blobs.is_intact(store.blobs.expected_path(each))]
    sql = (
        "select digest, user, id from revision"
        " where digest in (select value from json_each(?)) order by user, seq"
    )
    owners: dict[str, list[tuple[str, str]]] = {}
    for row in store.database.fetch_all(sql, json.dumps(lost)):
        owners.setdefault(row["digest"], []).append((row["user"], row["id"]))
    return tuple(LostBlob(digest, tuple(named_by)) for digest, named_by in owners.items())


def _check_files(store: Store) -> Iterator[Problem]:
    for _, files in store.blobs.batches():
        intact = {path: store.blobs.is_intact(path) for path in files}
        unnamed = unnamed_blobs(store.database, [path.name for path in files])
        if unnamed:
            # Under the lock no write is unfinished: its file is named by now, or deleted.
            with store.database.exclude_writers():
                left = [path.name for path in files if path.name in unnamed and path.exists()]
                unnamed = unnamed_blobs(store.database, left)
        for path, is_intact in intact.items():
            where = str(path.relative_to(store.home))
            if path.name in unnamed:
                fault = "No revision names it." if is_intact else "It is not a blob."
                is_ours = DIGEST.fullmatch(path.name) or path.name.endswith(".part")
                yield Problem(where, fault, _LEFTOVER if is_ours else _FOREIGN)
            elif not is_intact and path.exists():
                yield Problem(where, "It does not match its digest.", _REPAIR)
