"""Connections to the SQLite file: read transactions and write transactions.

Invariants:

- A read transaction sees one moment of the database. A write transaction holds the home's write
  lock. It commits whole and durable, or not at all.
- A connection serves one block at a time and then returns to a pool. So a reader never waits for a
  writer of its own process and never sees its uncommitted rows. The number of connections follows
  how many blocks run at once.
- A block inside a write transaction of the same thread is a part of that transaction.
- The journal mode is WAL if the file's header says so, else TRUNCATE. It is set when the database
  is created. Only a program that has the file alone changes it, so programs with different SQLite
  versions work side by side.
- An open database can be told from a closed one. In WAL mode each connection has a lock on the file.
  In other modes an idle one has none, so a lock on ``locks/open.db`` is held.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias

from personalpeft.errors import Busy, HomeError
from personalpeft.store.error_mapping import map_home_errors, read_only_error, sqlite3
from personalpeft.store.locks import Lock

Row: TypeAlias = dict[str, Any]


def is_wal_safe(version: tuple[int, ...]) -> bool:
    """Return whether this SQLite has the fix of the WAL-reset bug, which can lose committed
    transactions.
    """
    return (
        version >= (3, 51, 3) or (3, 50, 7) <= version < (3, 51) or (3, 44, 6) <= version < (3, 45)
    )


OPEN_MARK = Path("locks", "open.db")
"""An empty database in a home. Who has the home open holds SQLite's shared lock on it."""
JOURNAL_MODE = "wal" if is_wal_safe(sqlite3.sqlite_version_info) else "truncate"
"""The journal mode of a new database. An older database keeps its mode."""


class _ThreadState(threading.local):
    """The connections of the write transaction and of the snapshot that a thread is in."""

    written: sqlite3.Connection | None = None
    read: sqlite3.Connection | None = None


class Database:
    """A pool of connections to one file. Safe to use from several threads."""

    def __init__(
        self, path: Path, writer: Lock, *, timeout: float, read_only: bool, key: str | None = None
    ) -> None:
        self.path = path
        self._key = key
        self.read_only = read_only
        self._home = path.parent
        self._writer = writer
        self._timeout = timeout
        self._idle: list[sqlite3.Connection] = []
        self._mutex = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._thread = _ThreadState()
        self._open_mark: sqlite3.Connection | None = None

    @contextmanager
    def read_transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection whose queries all see the same moment."""
        if (outer := self._thread.written or self._thread.read) is not None:
            yield outer
            return
        with map_home_errors(self._home), self._borrow() as db:
            db.execute("begin")
            try:
                yield db
            finally:
                db.rollback()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Have all reads of this thread see the same moment. The block must not write."""
        with self.read_transaction() as db:
            self._thread.read = db
            try:
                yield
            finally:
                self._thread.read = None

    @contextmanager
    def write_transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection under the write lock. Commit durably at the end of the block, or roll
        back if it raises.

        Raises:
            HomeError: The home is read-only or its disk is full.
            Busy: Another writer does not finish in time.
        """
        if (outer := self._thread.written) is not None:
            yield outer
            return
        with self.write_lock(), map_home_errors(self._home), self._borrow() as db:
            # Immediate: a transaction that reads first and writes later fails at once if another
            # one writes in between.
            db.execute("begin immediate")
            self._thread.written = db
            try:
                yield db
                db.execute("commit")
            finally:
                self._thread.written = None
                db.rollback()

    def fetch_all(self, sql: str, *parameters: Any) -> list[Row]:
        """Return all rows of one query, as ``fetch_all``."""
        with self.read_transaction() as db:
            return fetch_all(db, sql, *parameters)

    def fetch_one(self, sql: str, *parameters: Any) -> Row | None:
        """Return the first row of one query, or None."""
        return next(iter(self.fetch_all(sql, *parameters)), None)

    @contextmanager
    def write_lock(self) -> Iterator[None]:
        """Hold the write lock alone, for files beside the database.

        Nests with ``write_transaction``.
        """
        if self.read_only:
            raise read_only_error(self._home)
        with self._writer.acquire(self._timeout):
            yield

    def exclude_writers(self) -> AbstractContextManager[None]:
        """Hold the write lock, also while reading; where no file can be written, do nothing."""
        if self.read_only and not os.access(self._home, os.W_OK):
            return nullcontext()
        return self._writer.acquire(self._timeout)

    def set_journal_mode(self) -> None:
        """Set the journal mode of a new database to the one that this SQLite supports safely."""
        with map_home_errors(self._home), self._borrow() as db:
            db.execute(f"pragma journal_mode={JOURNAL_MODE}").fetchall()

    def leave_unsafe_wal(self) -> None:
        """Leave WAL mode if this SQLite has the WAL-reset bug and no other program uses the file.

        It never waits and never fails. While another program uses the database the mode stays. The
        bug is a race of a checkpoint with a write, and here both happen under the write lock.
        """
        if JOURNAL_MODE == "wal":
            return
        with suppress(Busy), map_home_errors(self._home), self._borrow() as db:
            if journal_mode(db) != "wal":
                return
            with self._writer.acquire(0), self._without_waiting(db):
                db.execute(f"pragma journal_mode={JOURNAL_MODE}").fetchall()

    def truncate_journal(self, *, wait: bool = True) -> bool:
        """Write all commits to the database file and empty the journal.

        The journal still holds overwritten data. Call this under the write lock, outside of
        transactions. Return False if a reader still needs the journal, with ``wait`` after the
        timeout.
        """
        with map_home_errors(self._home), self._borrow() as db:
            if journal_mode(db) != "wal":
                return True  # Other journals are emptied by each commit.
            with nullcontext() if wait else self._without_waiting(db):
                (blocked, _, _) = db.execute("pragma wal_checkpoint(truncate)").fetchone()
            return not blocked

    @contextmanager
    def _without_waiting(self, db: sqlite3.Connection) -> Iterator[None]:
        """Have SQLite wait for no lock of another program inside the block."""
        db.execute("pragma busy_timeout=0").fetchall()
        try:
            yield
        finally:
            db.execute(f"pragma busy_timeout={round(self._timeout * 1000)}").fetchall()

    def mark_open(self) -> None:
        """Show other programs that the home is open, until this is closed.

        Where no file can be written nothing is shown. No program can replace such a home.
        """
        with map_home_errors(self._home), self._borrow() as db:
            if journal_mode(db) == "wal":
                return
        path = self._home / OPEN_MARK
        with suppress(OSError, sqlite3.Error):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            create_file(path)
            self._open_mark = open_connection(path, "mode=rw", timeout=self._timeout, key=None)
            self._open_mark.execute("begin")
            fetch_all(self._open_mark, "select count(*) from sqlite_master")

    def close(self) -> None:
        """Close the connections: at once, or when the block that uses one ends."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
            idle += [self._open_mark] if self._open_mark else []
            self._open_mark = None
        for db in idle:
            db.close()

    @contextmanager
    def _borrow(self) -> Iterator[sqlite3.Connection]:
        # SQLite's locks do not survive a fork: a child that uses its parent's connections can
        # corrupt the file.
        if self._closed or self._pid != os.getpid():
            raise HomeError(
                f"The home {self._home} is not open in this process.", hint="Open it again."
            )
        with self._mutex:
            db = self._idle.pop() if self._idle else None
        db = db or self._connect()
        try:
            yield db
        finally:
            with self._mutex:
                reusable = not self._closed and not db.in_transaction
                if reusable:
                    self._idle.append(db)
            if not reusable:
                db.close()

    def _connect(self) -> sqlite3.Connection:
        if not self.read_only:
            return self.open_other(self.path, "mode=rw")
        try:
            return self.open_other(self.path, "mode=ro")
        except sqlite3.OperationalError:
            # In WAL mode even a reader writes (its shared memory). Read-only media refuse that.
            # With no change in a journal the file alone is complete, and SQLite may treat it as
            # immutable.
            if not self.path.is_file() or any(
                _has_content(self.path, suffix) for suffix in ("-wal", "-journal")
            ):
                raise
            return self.open_other(self.path, "immutable=1")

    def open_other(self, path: Path, mode: str = "mode=rw") -> sqlite3.Connection:
        """Open a connection to an existing file, such as a copy, with the key of this database."""
        return open_connection(path, mode, timeout=self._timeout, key=self._key)


def create_file(path: Path) -> None:
    """Create an empty database file, readable by its owner only, unless it exists."""
    # An existing file is not opened: closing it would release the locks that this process has on
    # it.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def journal_mode(db: sqlite3.Connection) -> str:
    """Return the journal mode in use: ``wal``, ``truncate``, ``delete``, …"""
    return str(db.execute("pragma journal_mode").fetchone()[0])


def fetch_all(db: sqlite3.Connection, sql: str, *parameters: Any) -> list[Row]:
    """Return all rows of a query, each as a dictionary by column."""
    # Closed explicitly: a cursor that an exception keeps alive would keep its lock on the file too.
    with closing(db.execute(sql, parameters)) as cursor:
        columns = [column[0] for column in cursor.description]
        return [dict(zip(columns, values, strict=True)) for values in cursor]


def fetch_one(db: sqlite3.Connection, sql: str, *parameters: Any) -> Row | None:
    """Return the first row of a query, or None."""
    return next(iter(fetch_all(db, sql, *parameters)), None)


def has_table(db: sqlite3.Connection, name: str) -> bool:
    """Return whether a table exists; a home of an earlier version may lack it."""
    return fetch_one(db, "select 1 from sqlite_master where name = ?", name) is not None


def insert_rows(
    db: sqlite3.Connection, table: str, columns: Sequence[str], values: Iterable[Sequence[Any]]
) -> None:
    """Insert rows into a table, each with one value a column."""
    marks = ", ".join("?" * len(columns))
    db.executemany(f"insert into {table} ({', '.join(columns)}) values ({marks})", values)


def open_connection(
    path: Path, mode: str, *, timeout: float, key: str | None, exclusive: bool = False
) -> sqlite3.Connection:
    """Open a connection to an existing file. All connections of the store are opened here.

    Args:
        path: The file.
        mode: The parameters of SQLite's URI, such as "mode=ro".
        timeout: Seconds to wait for a lock.
        key: The key of SQLCipher, 64 hex digits; None for a plain database.
        exclusive: Whether the first transaction excludes all other connections until this closes.
    """
    db = sqlite3.connect(
        f"{path.as_uri()}?{mode}",
        uri=True,
        timeout=timeout,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        if key is not None:
            # A wrong key or page becomes an error, and no lines on the error output.
            db.execute("pragma cipher_log_level=none").fetchall()
            db.execute(f"pragma key = \"x'{key}'\"").fetchall()
        if exclusive:
            db.execute("pragma locking_mode=exclusive").fetchall()
        db.execute("pragma foreign_keys=on")
        db.execute("pragma secure_delete=on")
        db.execute("pragma synchronous=full")
        # macOS: flush the drive's own cache too. Elsewhere it has no effect.
        db.execute("pragma fullfsync=on")
        db.execute("pragma trusted_schema=off")
        # Opening is lazy: only a read shows whether it worked.
        db.execute("select count(*) from sqlite_master").fetchall()
        # Only WAL is stored in the file. By default each connection would use DELETE. A power cut
        # then loses acknowledged commits if the disk still has the removed journal.
        if journal_mode(db) != "wal":
            db.execute("pragma journal_mode=truncate").fetchall()
        return db
    except sqlite3.Error:
        db.close()
        raise


def _has_content(path: Path, suffix: str) -> bool:
    beside = path.with_name(path.name + suffix)
    return beside.exists() and beside.stat().st_size > 0
