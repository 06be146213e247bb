"""Erase the rows and files of an item or a user for good. No file of the home holds it afterwards.

Invariants:

- The decision is one transaction. Rows are deleted and a tombstone replaces each. The user's chain
  is derived again from the first of them. A tombstone's entry covers the tombstone alone. A digest
  of the erased row could confirm a guess of its words.
- The history shows no erased revision. A move that named one is deleted, or starts where the move
  before it ended. The head is the target of the last remaining move. Where that was built on another
  base than the erased one, the head is the bare base.
- Files and the journal cannot be part of the transaction. It lists them as pending deletions. The
  next opening of the home completes those that are left.
- In an encrypted home an erasure of revisions or checkpoints destroys the user's data key, so that
  no copy of the files opens any more. The key is deleted when all files that stay have another one.
- Of an erased user no row is left, not even a tombstone: it would hold the id.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from personalpeft import file_system
from personalpeft.errors import Busy, Damaged, HomeError
from personalpeft.store import rows
from personalpeft.store.database import Database, Row, fetch_all, fetch_one, insert_rows
from personalpeft.store.error_mapping import map_home_errors, sqlite3
from personalpeft.store.hash_chain import GENESIS, chain_digest, row_digest
from personalpeft.store.id_lookup import is_user, resolve_user
from personalpeft.store.revisions import set_head, unnamed_blobs
from personalpeft.store.rows import KINDS, TOMBSTONE, EntryKind
from personalpeft.store.store import Store
from personalpeft.store.types import Erasure, ErasureResult
from personalpeft.types import Json

_BASES = "select id, base from revision where user = ?"
_IN_LIST = "in (select value from json_each(?))"


def erase(store: Store, user: str, erasure: Erasure) -> ErasureResult:
    """Erase some items of a user. After a kill, the next opening deletes the files.

    The caller took the write lock before it planned the erasure, so nothing was added since. Returns
    what was erased. Raises ``NotFound``, ``Busy``, ``HomeError``.
    """
    with store.database.write_lock():
        keys: list[str] = []
        with store.database.write_transaction() as db:
            result = _erase_rows(store, db, user, erasure)
            if erasure.revisions or store.has_sessions(user):
                keys = store.cipher.user_key_ids(user)
                _enqueue_deletions(db, user, [("data_key", key) for key in keys])
        # The erasure is committed. A file that cannot be deleted now is deleted by the next
        # opening.
        complete, left = False, keys
        with suppress(Busy, HomeError, Damaged):
            complete = delete_pending_files(store, user)
        with suppress(Busy, HomeError, Damaged):
            left = store.cipher.user_key_ids(user)
        destroyed = tuple(key for key in keys if key not in left)
        return replace(result, complete=complete, keys_destroyed=destroyed)


def erase_user(store: Store, user: str) -> None:
    """Erase every row of a user.

    Call ``delete_pending_files`` once all leases on the user are released. After a kill, the next
    opening does. Raises as ``erase``.
    """
    with store.database.write_transaction() as db:
        resolve_user(db, user)
        db.execute("pragma defer_foreign_keys = on")
        digests = fetch_all(db, "select digest from revision where user = ?", user)
        # Read from the schema, so that no later table can be left out.
        tables = fetch_all(
            db,
            "select m.name from sqlite_master m join pragma_table_info(m.name) c"
            " where m.type = 'table' and c.name = 'user' and m.name <> 'pending_deletion'",
        )
        for table in tables:
            db.execute(f"delete from {table['name']} where user = ?", [user])
        db.execute("delete from user where id = ?", [user])
        _enqueue_deletions(
            db, user, _list_files(store.database, [row["digest"] for row in digests])
        )


def delete_pending_files(store: Store, user: str | None = None, *, wait: bool = True) -> bool:
    """Delete the files that erasures of a user listed, or all did, and clear the journal.

    Return whether nothing is left. ``wait``: whether to wait for a reader of an earlier moment, who
    keeps the journal from being cleared.
    """
    if not _read_pending(store, user):
        return True
    with store.database.write_lock(), map_home_errors(store.home):
        pending = _read_pending(store, user)
        names = [row["name"] for row in pending if row["kind"] == "blob"]
        # A later build may have produced the same bytes.
        unnamed = unnamed_blobs(store.database, names)
        with store.database.read_transaction() as db:
            users = {row["user"] for row in pending}
            gone = {each for each in users if not is_user(db, each)}
        for each in gone:
            # Their names hold the id. No process can hold a lease on a user who does not exist.
            store.leases.delete_files(each)
        for row in pending:
            if row["name"] in unnamed:
                path = store.blobs.expected_path(row["name"])
                path.unlink(missing_ok=True)
                if path.parent.is_dir():
                    file_system.sync_folder(path.parent)
            elif row["kind"] == "sessions":
                with suppress(FileNotFoundError):
                    shutil.rmtree(store.session_folder(row["user"]))
            elif row["kind"] == "note":
                (store.home / "notes" / row["name"]).unlink(missing_ok=True)
        _destroy_keys(store, pending)
        if not store.database.truncate_journal(wait=wait):
            return False
        with store.database.write_transaction() as db:
            ids = [(row["id"],) for row in pending]
            db.executemany("delete from pending_deletion where id = ?", ids)
        # These rows named the user and the files.
        return store.database.truncate_journal(wait=wait)


def _destroy_keys(store: Store, pending: Iterable[Row]) -> None:
    """Delete the data keys that are listed, once no file that stays needs them."""
    keys: dict[str, list[str]] = {}
    for row in pending:
        if row["kind"] == "data_key":
            keys.setdefault(row["user"], []).append(row["name"])
    for user, names in keys.items():
        store.blobs.replace_keys(user, names)
        with store.database.write_transaction() as db:
            db.execute(f"delete from data_key where id {_IN_LIST}", [json.dumps(names)])


def _read_pending(store: Store, user: str | None) -> list[Row]:
    sql = "select * from pending_deletion where ?1 is null or user = ?1 order by id"
    return store.database.fetch_all(sql, user)


@dataclass(slots=True)
class _RowEraser:
    """Deletes and changes rows of a user, and remembers which entries need a new digest.

    ``erased`` are the entries that get a tombstone, with the id that it names. ``changed`` are
    other entries that need a new digest.
    """

    db: sqlite3.Connection
    user: str
    erased: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)

    def select_where(self, table: str, column: str, values: Iterable[str | int]) -> list[Row]:
        """Return the user's rows of a table whose column has one of these values."""
        sql = f"select * from {table} where user = ? and {column} {_IN_LIST}"
        return fetch_all(self.db, sql, self.user, json.dumps(sorted(values)))

    def delete_where(self, table: str, column: str, values: Iterable[str | int]) -> None:
        """Delete these rows. The tombstone of one that has an id of its own names the id."""
        if table in KINDS:
            for row in self.select_where(table, column, values):
                self.erased[row["seq"]] = table, row["id"] if column == "id" else None
        sql = f"delete from {table} where user = ? and {column} {_IN_LIST}"
        self.db.execute(sql, [self.user, json.dumps(sorted(values))])

    def update(self, kind: EntryKind, seq: int, **columns: str | None) -> None:
        """Change columns of one row."""
        self.changed.add(seq)
        assignments = ", ".join(f"{column} = ?" for column in columns)
        self.db.execute(
            f"update {kind} set {assignments} where user = ? and seq = ?",
            [*columns.values(), self.user, seq],
        )


def _erase_rows(store: Store, db: sqlite3.Connection, user: str, erasure: Erasure) -> ErasureResult:
    resolve_user(db, user)
    at = rows.format_time(store.now())
    # Rows are deleted in any order; references are checked when the transaction commits.
    db.execute("pragma defer_foreign_keys = on")
    eraser = _RowEraser(db, user)
    revisions = eraser.select_where("revision", "id", erasure.revisions)
    vectors = len(eraser.select_where("vector", "signal", erasure.signals))
    _erase_signals(eraser, erasure.signals)
    _erase_turns(eraser, erasure)
    bases = {row["id"]: row["base"] for row in fetch_all(db, _BASES, user)}
    _erase_revisions(eraser, erasure.revisions)
    heads = _erase_moves(eraser, erasure.revisions, bases)
    _erase_layers(eraser, erasure.layers)
    _redact(eraser, "report", "body", erasure.redact_json)
    _redact(eraser, "judgement", "scores", erasure.redact_json)
    # The digest of a file that had the erased words could confirm a guess of them.
    db.execute("update export set digest = '' where user = ?", [user])
    tombstones = [(user, seq, kind, name, at) for seq, (kind, name) in eraser.erased.items()]
    insert_rows(db, TOMBSTONE, ("user", "seq", "kind", "id", "at"), tombstones)
    _derive_chain(eraser)
    files = _list_files(store.database, [row["digest"] for row in revisions])
    _enqueue_deletions(db, user, files)
    return ErasureResult(
        reports=sum(kind == "report" for kind, _ in eraser.erased.values()),
        vectors=vectors,
        files=sum(kind == "blob" for kind, _ in files),
        heads=heads,
    )


def _list_files(database: Database, digests: Collection[str]) -> list[tuple[str, str]]:
    """Return what an erasure of revisions with these files deletes, by kind and name."""
    blobs = (("blob", digest) for digest in sorted(unnamed_blobs(database, digests)))
    return [*blobs, ("sessions", ""), ("journal", "")]


def _enqueue_deletions(
    db: sqlite3.Connection, user: str, pending: Iterable[tuple[str, str]]
) -> None:
    """List what is deleted once the transaction is committed."""
    values = [(user, *each) for each in pending]
    insert_rows(db, "pending_deletion", ("user", "kind", "name"), values)


def _erase_signals(eraser: _RowEraser, signals: frozenset[str]) -> None:
    for row in eraser.select_where("signal", "supersedes", signals):
        if row["id"] not in signals:
            eraser.update("signal", row["seq"], supersedes=None)
    eraser.delete_where("vector", "signal", signals)
    eraser.delete_where("retraction", "signal", signals)
    eraser.delete_where("signal", "id", signals)


def _erase_turns(eraser: _RowEraser, erasure: Erasure) -> None:
    # A turn that continued an erased one continues what that one continued.
    before = {
        row["id"]: row["previous"] for row in eraser.select_where("turn", "id", erasure.turns)
    }
    for following in eraser.select_where("turn", "previous", erasure.turns):
        if following["id"] not in erasure.turns:
            previous = following["previous"]
            while previous in before:
                previous = before[previous]
            eraser.update("turn", following["seq"], previous=previous)
    eraser.delete_where("turn", "id", erasure.turns)
    for row in eraser.select_where("turn", "id", erasure.emptied):
        messages = [each.to_list() for each in erasure.emptied[row["id"]]]
        used = [each for each in rows.from_json(row["used"]) if each not in erasure.signals]
        eraser.update(
            "turn",
            row["seq"],
            messages=rows.to_json(messages, what="messages"),
            reply="",
            used=rows.to_json(used, what="list of signals"),
        )


def _erase_revisions(eraser: _RowEraser, revisions: frozenset[str]) -> None:
    for table in ("provenance", "judgement", "report"):
        eraser.delete_where(table, "revision", revisions)
    eraser.delete_where("revision", "id", revisions)


def _erase_moves(
    eraser: _RowEraser, revisions: frozenset[str], bases: Mapping[str, str]
) -> dict[str, str | None]:
    """Rewrite the moves without these revisions, and return the new head of each layer that loses
    its head. ``bases`` has the base of each revision.
    """
    db, user = eraser.db, eraser.user
    targets: dict[str, str | None] = {}
    for move in fetch_all(db, "select * from move where user = ? order by seq", user):
        before = targets.get(move["layer"])
        after = move["after"]
        if after in revisions:
            after = before if bases.get(before or "") == bases[after] else None
        if after == before:
            eraser.delete_where("move", "seq", [move["seq"]])
        elif (before, after) != (move["before"], move["after"]):
            eraser.update("move", move["seq"], before=before, after=after)
        targets[move["layer"]] = after
    heads = {}
    for layer in fetch_all(db, "select name, head from layer where user = ?", user):
        if layer["head"] in revisions:
            name = layer["name"]
            heads[name] = targets.get(name)
            set_head(db, user, name, heads[name])
    return heads


def _erase_layers(eraser: _RowEraser, layers: frozenset[str]) -> None:
    sql = f"select seq from report where user = ? and json_extract(body, '$.layer') {_IN_LIST}"
    found = fetch_all(eraser.db, sql, eraser.user, json.dumps(sorted(layers)))
    eraser.delete_where("report", "seq", [row["seq"] for row in found])
    eraser.delete_where("move", "layer", layers)
    eraser.delete_where("layer", "name", layers)


def _redact(
    eraser: _RowEraser, kind: EntryKind, column: str, redact: Callable[[Json], Json]
) -> None:
    sql = f"select seq, {column} as body from {kind} where user = ? order by seq"
    for row in fetch_all(eraser.db, sql, eraser.user):
        body = rows.to_json(redact(rows.from_json(row["body"])), what=kind)
        if body != row["body"]:
            eraser.update(kind, row["seq"], **{column: body})


def _derive_chain(eraser: _RowEraser) -> None:
    """Derive the user's chain from the first affected entry on, with new digests where the content
    changed.
    """
    db, user = eraser.db, eraser.user
    affected = {*eraser.erased, *eraser.changed}
    if not affected:
        return
    sql = "select chain from entry where user = ? and seq = ?"
    before = fetch_one(db, sql, user, min(affected) - 1)
    chain = before["chain"] if before else GENESIS
    derived: list[tuple[Any, ...]] = []
    sql = "select seq, kind, digest from entry where user = ? and seq >= ? order by seq"
    for entry in fetch_all(db, sql, user, min(affected)):
        seq, kind, digest = entry["seq"], entry["kind"], entry["digest"]
        if seq in affected:
            table = TOMBSTONE if seq in eraser.erased else kind
            sql = f"select * from {table} where user = ? and seq = ?"
            digest = row_digest(table, fetch_one(db, sql, user, seq) or {})
        chain = chain_digest(chain, seq, kind, digest)
        derived.append((digest, chain, user, seq))
    db.executemany("update entry set digest = ?, chain = ? where user = ? and seq = ?", derived)
    db.execute("update user set chain = ? where id = ?", [chain, user])
