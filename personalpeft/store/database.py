"""Connections to the one SQLite file, and the two ways to use them: ``reading`` and ``writing``.

Invariants:

- ``reading`` sees one moment of the database, never a half-done write. ``writing`` holds the writer's lock of the home, and is one
  transaction that lands whole and durable, or not at all.
- A connection serves one block at a time and then goes back to a pool. So a reader never waits for a writer of its own process, and
  never sees rows that its writer has not committed, as both would happen on one shared connection; and the number of
  connections follows how many blocks run at once, not how many threads a server ever had.
- The file says which journal is used, and every program keeps it, whichever SQLite it has: WAL where the header says so, else
  TRUNCATE. It is set when the database is made, and only a program that is alone with the file changes it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import sqlite_utils

from personalpeft.errors import Busy, HomeError
from personalpeft.store import error_mapping
from personalpeft.store.locks import Lock
from personalpeft.store.sqlite_version import JOURNAL_MODE, sqlite3

Row: TypeAlias = dict[str, Any]


class Database:
    """The pool of connections to one file."""

    def __init__(self, path: Path, writer: Lock, *, patience: float, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self._home = path.parent
        self._writer = writer
        self._patience = patience
        self._idle: list[sqlite_utils.Database] = []
        self._guard = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    @contextmanager
    def reading(self) -> Iterator[sqlite_utils.Database]:
        """A block whose queries all see the same moment."""
        with error_mapping.home_faults(self._home), self._borrowed() as db:
            db.conn.execute("begin")
            try:
                yield db
            finally:
                db.rollback()

    @contextmanager
    def writing(self) -> Iterator[sqlite_utils.Database]:
        """One transaction under the writer's lock; durable when the block is left, gone when it is left by an exception.

        Raises ``HomeError`` on a home that is read-only or full, ``Busy`` when another writer does not finish in time.
        """
        with self.turn_to_write(), error_mapping.home_faults(self._home), self._borrowed() as db:
            # Immediate: a transaction that read first and wrote later would fail at once when another one came between.
            db.conn.execute("begin immediate")
            try:
                yield db
                db.conn.execute("commit")
            finally:
                db.rollback()

    @contextmanager
    def turn_to_write(self) -> Iterator[None]:
        """The writer's lock alone, for what is written beside the database. May be nested with ``writing``."""
        if self.read_only:
            raise error_mapping.read_only(self._home)
        with self._writer.held(self._patience):
            yield

    def set_journal(self) -> None:
        """Give a new database the journal that this SQLite can be trusted with. Programs with another SQLite keep it."""
        with error_mapping.home_faults(self._home), self._borrowed() as db:
            db.conn.execute(f"pragma journal_mode={JOURNAL_MODE}").fetchall()

    def leave_unsafe_journal(self) -> None:
        """Leave a write-ahead log that this SQLite can lose commits in, where no other program has the database open.

        It never waits and never fails. Beside another program the log stays: commits are lost only where a checkpoint and a write
        happen at the same moment, and here both happen under the writer's lock. Every SQLite can be trusted with what follows.
        """
        if JOURNAL_MODE == "wal":
            return
        with suppress(Busy), error_mapping.home_faults(self._home), self._borrowed() as db:
            if journal_mode(db) != "wal":
                return
            with self._writer.held(0):
                db.conn.execute("pragma busy_timeout=0").fetchall()
                try:
                    db.conn.execute(f"pragma journal_mode={JOURNAL_MODE}").fetchall()
                finally:
                    db.conn.execute(
                        f"pragma busy_timeout={round(self._patience * 1000)}"
                    ).fetchall()

    def clear_journal(self) -> bool:
        """Has everything that was committed in the database file, and nothing in the journal: what was overwritten in the one is still
        in the other before that. False where a reader still needs the journal. Call it in one's turn to write, outside of blocks."""
        with error_mapping.home_faults(self._home), self._borrowed() as db:
            if journal_mode(db) != "wal":
                return True  # The others are emptied with each commit.
            (blocked, _, _) = db.conn.execute("pragma wal_checkpoint(truncate)").fetchone()
            return not blocked

    def close(self) -> None:
        """Closes the connections, at once or when the block that uses one is left."""
        with self._guard:
            self._closed = True
            idle, self._idle = self._idle, []
        for db in idle:
            db.close()

    @contextmanager
    def _borrowed(self) -> Iterator[sqlite_utils.Database]:
        # SQLite's locks do not survive a fork: a child that used its parent's connections could corrupt the file.
        if self._closed or self._pid != os.getpid():
            raise HomeError(
                f"The home {self._home} is not open in this process.", hint="Open it again."
            )
        with self._guard:
            db = self._idle.pop() if self._idle else None
        db = db or self._connect()
        try:
            yield db
        finally:
            with self._guard:
                reusable = not self._closed and not db.conn.in_transaction
                if reusable:
                    self._idle.append(db)
            if not reusable:
                db.close()

    def _connect(self) -> sqlite_utils.Database:
        if not self.read_only:
            return _opened(self.path, "mode=rw", self._patience)
        try:
            return _opened(self.path, "mode=ro", self._patience)
        except sqlite3.OperationalError:
            # In WAL mode even a reader writes (its shared memory), which read-only media refuse. Where no change waits in a journal,
            # the file alone is the whole truth and can be read as if nothing could ever change it.
            if not self.path.is_file() or any(
                _has_content(self.path, suffix) for suffix in ("-wal", "-journal")
            ):
                raise
            return _opened(self.path, "immutable=1", self._patience)


def create_file(path: Path) -> None:
    """Makes an empty database file, readable by its owner only, where there is none."""
    # One that is there is not opened: closing it would let go of the locks that this process has on it.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def journal_mode(db: sqlite_utils.Database) -> str:
    """The journal in use: ``wal``, ``truncate``, ``delete``, …"""
    return str(db.conn.execute("pragma journal_mode").fetchone()[0])


def rows(db: sqlite_utils.Database, sql: str, *parameters: Any) -> list[Row]:
    """All rows of a query, each as a dictionary by column."""
    # Closed by hand: a cursor that an exception keeps alive would keep its lock on the file too.
    with closing(db.execute(sql, parameters)) as cursor:
        columns = [column[0] for column in cursor.description]
        return [dict(zip(columns, values, strict=True)) for values in cursor]


def row(db: sqlite_utils.Database, sql: str, *parameters: Any) -> Row | None:
    """The first row of a query, if there is one."""
    return next(iter(rows(db, sql, *parameters)), None)


def insert_all(
    db: sqlite_utils.Database, table: str, columns: Sequence[str], found: Iterable[Sequence[Any]]
) -> None:
    """Adds rows. The table must be there: unlike sqlite-utils' own insert this neither makes nor changes one."""
    marks = ", ".join("?" * len(columns))
    db.conn.executemany(f"insert into {table} ({', '.join(columns)}) values ({marks})", found)


def _opened(path: Path, mode: str, patience: float) -> sqlite_utils.Database:
    conn = sqlite3.connect(
        f"{path.as_uri()}?{mode}",
        uri=True,
        timeout=patience,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        conn.execute("pragma foreign_keys=on")
        conn.execute("pragma secure_delete=on")
        conn.execute("pragma synchronous=full")
        conn.execute(
            "pragma fullfsync=on"
        )  # macOS: through the drive's own cache too; elsewhere it does nothing.
        conn.execute("pragma trusted_schema=off")
        conn.execute(
            "select count(*) from sqlite_master"
        ).fetchall()  # Opening is lazy: only a read shows whether it worked.
        db = sqlite_utils.Database(conn, execute_plugins=False)
        # Only WAL is written into the file. Without this line each connection would go back to DELETE, which can lose what it has
        # acknowledged when the power is cut: the removal of the journal is not yet on the disk then.
        if journal_mode(db) != "wal":
            conn.execute("pragma journal_mode=truncate").fetchall()
        return db
    except sqlite3.Error:
        conn.close()
        raise


def _has_content(path: Path, suffix: str) -> bool:
    beside = path.with_name(path.name + suffix)
    return beside.exists() and beside.stat().st_size > 0
