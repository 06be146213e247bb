"""The hash chain: every appended row is an entry of its user, and each entry covers the one before.

An entry holds the SHA-256 of its row's canonical content, and a chain value: the SHA-256 of the
previous chain value, its own number, kind and digest. The user's row holds the number and chain
value of the last entry. So a row that was changed, removed, inserted or moved is found by deriving
the chain again. Not found is only a forgery of a user's whole chain.

Columns that are null are left out of the digest, so that a later migration may add a column.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from personalpeft.ids import check_user_id
from personalpeft.store.database import Row, fetch_one, insert_rows
from personalpeft.store.error_mapping import sqlite3
from personalpeft.store.rows import COLUMNS, KINDS, EntryKind, format_time, unicode_error
from personalpeft.types import canonical_digest

GENESIS = ""
"""The chain value before a user's first entry."""


class ChainWriter:
    """Collects new entries in memory (``append``) and inserts them table by table (``flush``).

    Use it inside one write transaction. Until ``flush`` the new rows cannot be read.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._tails: dict[str, tuple[int, str]] = {}
        self._changed: set[str] = set()
        self._entries: list[tuple[str, int, str, str, str]] = []
        self._rows: dict[EntryKind, list[list[Any]]] = {}

    def append(self, user: str, kind: EntryKind, content: Row) -> None:
        """Append a row as a user's next entry. Raises ``InvalidInput`` for invalid Unicode."""
        before, chain = self._tail(user)
        seq = before + 1
        row = {"user": user, "seq": seq, **content}
        try:
            digest = row_digest(kind, row)
        except UnicodeEncodeError as error:
            raise unicode_error() from error
        chain = chain_digest(chain, seq, kind, digest)
        self._entries.append((user, seq, kind, digest, chain))
        self._rows.setdefault(kind, []).append([user, seq, *map(content.get, COLUMNS[kind])])
        self._tails[user] = seq, chain
        self._changed.add(user)

    def flush(self) -> None:
        """Insert what was appended since the last flush."""
        insert_rows(self._db, "entry", ("user", "seq", "kind", "digest", "chain"), self._entries)
        for kind in KINDS:
            insert_rows(self._db, kind, ("user", "seq", *COLUMNS[kind]), self._rows.get(kind, ()))
        tails = [(*self._tails[user], user) for user in self._changed]
        self._db.executemany("update user set entries = ?, chain = ? where id = ?", tails)
        self._entries, self._rows, self._changed = [], {}, set()

    def _tail(self, user: str) -> tuple[int, str]:
        if user not in self._tails:
            tail = fetch_one(self._db, "select entries, chain from user where id = ?", user)
            if tail is None:
                raise ValueError(f"no user {user!r}")
            self._tails[user] = tail["entries"], tail["chain"]
        return self._tails[user]


def append_entry(db: sqlite3.Connection, user: str, kind: EntryKind, content: Row) -> None:
    """Append one row and insert it. Raises as ``ChainWriter.append``."""
    writer = ChainWriter(db)
    writer.append(user, kind, content)
    writer.flush()


def row_digest(table: str, row: Row) -> str:
    """Return the digest of a row of a chained table."""
    return canonical_digest(
        [table, {column: value for column, value in row.items() if value is not None}]
    )


def chain_digest(before: str, seq: int, kind: str, digest: str) -> str:
    """Return the chain value of an entry."""
    return canonical_digest([before, seq, kind, digest])


def create_users(db: sqlite3.Connection, users: Iterable[str], at: datetime) -> None:
    """Create those users that do not exist. Raises ``InvalidId``."""
    since = format_time(at)
    new = [(check_user_id(user), since) for user in users]
    db.executemany("insert into user (id, since) values (?, ?) on conflict do nothing", new)
