"""The migrations of ``migrations/*.sql``, and the marks that identify a database of this package.

Invariants: a released migration is never edited. ``application_id`` says which program owns the
file and ``user_version`` how many migrations it has had. The migration's transaction writes both.

Rows of some tables are only added: turn, signal, retraction, revision, judgement, report and move.
Each such row belongs to an ``entry``; see ``hash_chain``. Digests cover the names of such tables
and columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import sqlite_utils
from sqlite_utils import Migrations

from personalpeft.errors import HomeError
from personalpeft.store.error_mapping import sqlite3
from personalpeft.store.publications import move_notes

APPLICATION_ID = 0x50504654  # "PPFT"
REPLACED_ID = 0x50504658  # "PPFX": another file has taken the place of this one.

_FOLDER = files("personalpeft.store") / "migrations"
_NAMES = sorted(f.name.removesuffix(".sql") for f in _FOLDER.iterdir() if f.name.endswith(".sql"))

_migrations = Migrations("personalpeft")


def _register(name: str) -> None:
    @_migrations(name=name)
    def apply(db: sqlite_utils.Database) -> None:
        for statement in _statements((_FOLDER / f"{name}.sql").read_text("utf-8")):
            db.conn.execute(statement)
        if name == "0009_publications":
            move_notes(db.conn)  # SQL cannot read them.


def _statements(script: str) -> Iterator[str]:
    """Return the statements of a script, each of which ends at the end of a line.

    ``sqlite_utils`` looks for an end after each character, which takes most of the time of a new
    home.
    """
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        yield statement


for _name in _NAMES:
    _register(_name)


def is_current(connection: sqlite3.Connection, home: Path, *, to_read: bool = False) -> bool:
    """Return whether the database can be used without a migration.

    Args:
        connection: A connection in a transaction.
        home: The home folder, for messages.
        to_read: Whether it need only be read.

    Raises:
        HomeError: It belongs to another program or a newer version.
    """
    (application,) = connection.execute("pragma application_id").fetchone()
    (version,) = connection.execute("pragma user_version").fetchone()
    (objects,) = connection.execute("select count(*) from sqlite_master").fetchone()
    if application == 0 and objects == 0:
        return False
    if application != APPLICATION_ID:
        raise HomeError(
            f"The database in {home} was made by another program.",
            hint="Choose another folder as home, or move that file away.",
        )
    db = sqlite_utils.Database(connection, execute_plugins=False)
    unknown = [each.name for each in _migrations.applied(db) if each.name not in _NAMES]
    if version > len(_NAMES) or unknown:
        found = ", ".join([f"schema {version}, {len(_NAMES)} is supported", *unknown])
        raise HomeError(
            f"The home {home} is from a newer version of personalpeft ({found}).",
            hint="Update personalpeft, or choose another home.",
        )
    pending = {step.name for step in _migrations.pending(db)}
    # The others add indexes, columns with a default and tables that a reader can do without.
    return "0001_first" not in pending if to_read else not pending


def migrate(connection: sqlite3.Connection) -> None:
    """Apply the pending migrations. Call it inside a write transaction."""
    connection.execute(f"pragma application_id={APPLICATION_ID}")
    _migrations.apply(sqlite_utils.Database(connection, execute_plugins=False))
    connection.execute(f"pragma user_version={len(_NAMES)}")
