"""What must survive a restart: sessions, runs, calls, checkpoints and samplers, in one SQLite file.

Weights are files beside it (``personalpeft.store.plugin_data``).

Invariants: a row survives a kill of the server before a client hears of it, and a row of a
checkpoint a power cut, too. A file is durable before a row names it. One process at a time has the
folder open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from filelock import FileLock, Timeout

from personalpeft.errors import Busy, NotFound
from personalpeft.file_system import replace
from personalpeft.store.error_mapping import sqlite3
from personalpeft.store.plugin_data import PluginData

# Bytes of saved weights and queued calls that one owner may have.
MAX_BYTES = 32 * 2**30
FOLDER = "tinker"
"""The plugin's folder in the home."""
USER_OWNER = "user:"
"""What the owner of a user's rows begins with, before the id."""
_NAME = "server"
_SCHEMA = """
create table if not exists sessions (
    id text primary key, owner text not null, seen real not null, tags text not null,
    ended integer not null default 0);
create table if not exists runs (
    id text primary key, owner text not null, session text not null, base text not null,
    rank integer not null, seed integer not null, attn integer not null, mlp integer not null,
    created real not null, seen real not null, open integer not null,
    next_seq integer not null default 1, executed integer not null default 0,
    parent text, state_file text, state_executed integer not null default 0,
    base_digest text);
create table if not exists calls (
    position integer primary key autoincrement, id text not null unique, owner text not null,
    run text, kind text not null, seq integer, body blob not null,
    status text not null default 'queued', result blob, error text, category text,
    created real not null, finished real, executed integer);
create index if not exists calls_of_run on calls (run, status);
create index if not exists calls_of_owner on calls (owner, status);
create table if not exists checkpoints (
    path text primary key, owner text not null, run text not null, kind text not null,
    name text not null, adapter text not null, state_file text, size integer not null,
    created real not null, expires real, public integer not null default 0,
    about text not null);
create table if not exists samplers (
    id text primary key, owner text not null, session text not null, model_path text,
    base text not null);
create table if not exists owners (owner text primary key, since text not null);
create table if not exists sources (
    holder text not null, user text not null, since text not null, revision text not null,
    primary key (holder, user, since, revision));
"""
# By table, the column that names a run or checkpoint, whose sources ``sources`` has.
_HOLDERS = {"runs": "id", "calls": "run", "checkpoints": "path", "samplers": "model_path"}


def count_user_data(open_data: Callable[[str], PluginData], user: str) -> dict[str, int]:
    """Return how many rows of each kind a home's Tinker server has of a user.

    Rows of other owners count if their weights were trained from a layer of the user.
    """
    data = open_data(FOLDER)
    if not (data.folder / f"{_NAME}.sqlite3").is_file():
        return {}
    with closing(data.connect(_NAME)) as db:
        # An earlier version may have made the file.
        db.executescript(_SCHEMA)
        return {
            table: db.execute(
                f"select count(*) from {table} where owner = ? or {column} in"
                " (select holder from sources where user = ?)",
                [f"{USER_OWNER}{user}", user],
            ).fetchone()[0]
            for table, column in _HOLDERS.items()
        }


class Database:
    """The database and the files of weights. Safe to use from several threads.

    Args:
        data: What the plugin keeps in the home.
        beside_server: Whether a server may have the folder open, too. The weights that are there
            can be read then, and what was forgotten erased.

    Raises:
        Busy: Another process has the folder open.
        NotFound: There is no server to be beside: none has written to this home.
        HomeError: It cannot be written, or is not encrypted though its home is.
    """

    def __init__(self, data: PluginData, *, beside_server: bool = False) -> None:
        self._data = data
        if beside_server and not (data.folder / f"{_NAME}.sqlite3").is_file():
            raise NotFound(
                "No client has saved weights in this home.",
                hint="Train with a client of personalpeft serve --tinker first.",
            )
        data.create()
        self._process = FileLock(data.folder / "lock")
        try:
            if not beside_server:
                self._process.acquire(timeout=0)
        except Timeout:
            raise Busy(
                "Another server of this home serves Tinker's API.",
                hint="Stop it, or start this one without --tinker.",
            ) from None
        self._lock = threading.RLock()
        try:
            if not beside_server:
                self._adopt_former_files()
                data.delete_partial_files()
            # One connection: SQLite serializes writers anyway.
            self._db = data.connect(_NAME)
        except BaseException:
            self._process.release()
            raise
        self._db.row_factory = sqlite3.Row
        self._db.execute("pragma journal_mode=wal").fetchall()
        self._db.execute("pragma synchronous=normal").fetchall()
        self._db.executescript(_SCHEMA)
        # An earlier version made the table without it.
        if not self.rows("select 1 from pragma_table_info('runs') where name = 'base_digest'"):
            self.execute("alter table runs add column base_digest text")

    def _adopt_former_files(self) -> None:
        """Move the weights that an earlier version kept in a folder of its own."""
        former = self._data.folder / "weights"
        if former.is_dir():
            for path in former.iterdir():
                replace(path, self._data.files / path.name)
            former.rmdir()

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[None]:
        """Commit what happens in the block, or nothing of it.

        Args:
            durable: Whether the commit survives a power cut, and not a kill alone.
        """
        with self._lock:
            if durable:
                self._db.execute("pragma synchronous=full").fetchall()
            try:
                self._db.execute("begin immediate")
                try:
                    yield
                    self._db.execute("commit")
                except BaseException:
                    self._db.execute("rollback")
                    raise
            finally:
                if durable:
                    self._db.execute("pragma synchronous=normal").fetchall()

    def execute(self, sql: str, *values: Any) -> int:
        """Run a statement; return how many rows it changed. Alone it is a transaction."""
        with self._lock:
            return self._db.execute(sql, values).rowcount

    def rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """Return the rows of a query."""
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    def row(self, sql: str, *values: Any) -> sqlite3.Row | None:
        """Return the first row of a query, if there is one."""
        rows = self.rows(sql, *values)
        return rows[0] if rows else None

    def add_sampler(
        self, owner: str, session: str, number: int, model_path: str | None, base: str
    ) -> str:
        """Add the sampler with this number in its session, unless it is there, and return its id."""
        # As the real service's.
        sampler = f"{session}:sample:{number}"
        self.execute(
            "insert or ignore into samplers (id, owner, session, model_path, base)"
            " values (?, ?, ?, ?, ?)",
            *(sampler, owner, session, model_path, base),
        )
        return sampler

    def has_room(self, owner: str, size: int) -> bool:
        """Return whether an owner may have so many bytes more."""
        (used,) = self.rows(
            "select (select coalesce(sum(size), 0) from checkpoints where owner = ?1) + (select"
            " coalesce(sum(length(body)), 0) from calls where owner = ?1 and status = 'queued')"
            " as bytes",
            owner,
        )
        return bool(used["bytes"] + size <= MAX_BYTES)

    def put_file(self, data: bytes) -> str:
        """Write a file and return its SHA-256."""
        return self._data.put_file(data)

    def read_file(self, digest: str) -> bytes | None:
        """Return a file, None if it is missing or damaged."""
        return self._data.read_file(digest)

    def delete_unnamed_files(self, candidates: Iterable[str | None]) -> None:
        """Delete those of some files that no row names."""
        with self._lock:
            for digest in filter(None, candidates):
                named = self.row(
                    "select 1 from checkpoints where adapter = ?1 or state_file = ?1"
                    " union all select 1 from runs where state_file = ?1",
                    digest,
                )
                if named is None:
                    self._data.delete_file(digest)

    def erase_owner(self, owner: str) -> None:
        """Erase all rows of an owner, and the files that no other row names."""
        with self.transaction():
            files = self.rows(
                "select adapter, state_file from checkpoints where owner = ?1"
                " union all select null, state_file from runs where owner = ?1",
                owner,
            )
            # Read from the schema, so that no later table can be left out.
            for table in self.rows(
                "select m.name from sqlite_master m join pragma_table_info(m.name) c"
                " where m.type = 'table' and c.name = 'owner'"
            ):
                self.execute(f"delete from {table['name']} where owner = ?", owner)
        self.delete_unnamed_files(file for row in files for file in row)
        self.rows("pragma wal_checkpoint(truncate)")

    def erase_source(self, user: str, since: str, revision: str) -> None:
        """Erase the weights that were trained from a revision, and what was sampled from them.

        Their runs end.
        """
        holders = "(select holder from sources where user = ?1 and since = ?2 and revision = ?3)"
        samplers = f"(select id from samplers where model_path in {holders})"
        source = (user, since, revision)
        with self.transaction():
            files = self.rows(
                f"select adapter, state_file from checkpoints where path in {holders}"
                f" union all select null, state_file from runs where id in {holders}",
                *source,
            )
            for statement in (
                f"update runs set open = 0, state_file = null where id in {holders}",
                f"delete from calls where run in {holders} and status != 'queued'",
                # No other body need be JSON.
                "delete from calls where case when kind = 'sample' then"
                f" json_extract(cast(body as text), '$.model_path') in {holders} or"
                f" json_extract(cast(body as text), '$.sampling_session_id') in {samplers} end",
                f"delete from samplers where model_path in {holders}",
                f"delete from checkpoints where path in {holders}",
                f"delete from sources where holder in {holders}",
            ):
                self.execute(statement, *source)
        self.delete_unnamed_files(file for row in files for file in row)
        self.rows("pragma wal_checkpoint(truncate)")

    def close(self) -> None:
        """Close the file. Closing twice is allowed."""
        with self._lock:
            self._db.close()
        self._process.release()
