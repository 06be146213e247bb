"""The hash chain: every appended row is an entry of its user, and each entry covers the one before.

An entry holds the SHA-256 of its row's canonical content, and a chain value. A chain value is the
SHA-256 of the previous chain value, the entry's number, kind and digest. The user's row holds the
number and chain value of the last entry. So a check finds each row that was changed, removed,
inserted or moved. It does not find a forgery of a user's whole chain.

Columns that are null are left out of the digest, so that a later migration may add a column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

from personalpeft.errors import InvalidInput
from personalpeft.ids import check_user_id
from personalpeft.store.database import Database, Row, fetch_all, fetch_one, has_table, insert_rows
from personalpeft.store.error_mapping import sqlite3
from personalpeft.store.rows import COLUMNS, TOMBSTONE, EntryKind, format_time
from personalpeft.types import canonical_digest

GENESIS = ""
"""The chain value before a user's first entry."""


class NewEntry(NamedTuple):
    """A row to append. In place of an erased row it is the tombstone."""

    kind: EntryKind
    content: Row
    is_erased: bool = False


def append_entries(db: sqlite3.Connection, user: str, entries: Iterable[NewEntry]) -> None:
    """Append rows, given without user and number, as a user's next entries.

    Raises ``InvalidInput`` for a text that is not valid Unicode, and a number that is not finite.
    """
    tail = fetch_one(db, "select entries, chain from user where id = ?", user)
    if tail is None:
        raise ValueError(f"no user {user!r}")
    seq, chain = tail["entries"], tail["chain"]
    links: list[list[Any]] = []
    contents: dict[str, list[list[Any]]] = {}
    for kind, content, is_erased in entries:
        seq, table = seq + 1, TOMBSTONE if is_erased else kind
        try:
            digest = row_digest(table, {"user": user, "seq": seq, **content})
        except ValueError as error:
            raise InvalidInput(
                f"A text is not valid Unicode, or a number is not finite: {error}.",
                hint="Remove lone surrogates from texts, and give finite numbers.",
            ) from error
        chain = chain_digest(chain, seq, kind, digest)
        links.append([user, seq, kind, digest, chain])
        row = [user, seq, *map(content.get, COLUMNS[table])]
        contents.setdefault(table, []).append(row)
    insert_rows(db, "entry", ("user", "seq", "kind", "digest", "chain"), links)
    for table, columns in COLUMNS.items():
        if table in contents:
            insert_rows(db, table, ("user", "seq", *columns), contents[table])
    db.execute("update user set entries = ?, chain = ? where id = ?", [seq, chain, user])


def read_contents(db: sqlite3.Connection, user: str, after: int = 0) -> Iterator[tuple[str, Row]]:
    """Yield the chained rows of a user after the entry of a number, each with its table."""
    # A home of an earlier version that is open for reading may have no tombstones.
    for table in (name for name in COLUMNS if has_table(db, name)):
        sql = f"select * from {table} where user = ? and seq > ?"
        for row in fetch_all(db, sql, user, after):
            yield table, row


def read_chain_head(database: Database, user: str) -> tuple[int, str]:
    """Return the number and the chain value of a user's last entry."""
    row = database.fetch_one("select entries, chain from user where id = ?", user)
    return (0, GENESIS) if row is None else (row["entries"], row["chain"])


def row_digest(table: str, row: Row) -> str:
    """Return the digest of a row of a chained table."""
    return canonical_digest(
        [table, {column: value for column, value in row.items() if value is not None}]
    )


def chain_digest(before: str, seq: int, kind: str, digest: str) -> str:
    """Return the chain value of an entry from the one before, its number, kind and row's digest."""
    return canonical_digest([before, seq, kind, digest])


def create_user(db: sqlite3.Connection, user: str, at: datetime) -> None:
    """Create a user unless it exists. Raises ``InvalidId``."""
    sql = "insert into user (id, since) values (?, ?) on conflict do nothing"
    db.execute(sql, [check_user_id(user), format_time(at)])
