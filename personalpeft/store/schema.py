"""The migrations of ``migrations/*.sql``, and the marks that identify a database of this package.

Invariants: a released migration is never edited. ``application_id`` says which program owns the
file and ``user_version`` how many migrations it has had. The table ``_sqlite_migrations`` names
them, in the form of sqlite-utils. The migration's transaction writes all three.

Rows of some tables are only added: turn, signal, retraction, revision, judgement, report and move.
Each such row belongs to an ``entry``; see ``hash_chain``. Digests cover the names of such tables
and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path

from personalpeft.errors import HomeError
from personalpeft.store.database import fetch_all, has_table
from personalpeft.store.error_mapping import sqlite3
from personalpeft.store.publications import move_notes

APPLICATION_ID = 0x50504654  # "PPFT"
REPLACED_ID = 0x50504658  # "PPFX": another file has taken the place of this one.

_FOLDER = files("personalpeft.store") / "migrations"
_NAMES = sorted(f.name.removesuffix(".sql") for f in _FOLDER.iterdir() if f.name.endswith(".sql"))
# Functions that run after a script and move data that SQL cannot.
_DATA_STEPS: Mapping[str, Callable[[sqlite3.Connection], None]] = {"0009_publications": move_notes}
# The others add indexes, columns with a default and tables that a reader can do without.
_NEEDED_TO_READ = frozenset({"0001_first"})

_SET = "personalpeft"
_APPLIED = """
create table if not exists _sqlite_migrations (
    id integer primary key,
    migration_set text,
    name text,
    applied_at text
);
create unique index if not exists idx__sqlite_migrations_migration_set_name
    on _sqlite_migrations (migration_set, name);
"""


def is_current(db: sqlite3.Connection, home: Path, *, to_read: bool = False) -> bool:
    """Return whether the database of a home can be used, or only read, without a migration.

    Raises ``HomeError`` if it belongs to another program or a newer version.
    """
    (application,) = db.execute("pragma application_id").fetchone()
    (version,) = db.execute("pragma user_version").fetchone()
    (objects,) = db.execute("select count(*) from sqlite_master").fetchone()
    if application == 0 and objects == 0:
        return False
    if application != APPLICATION_ID:
        raise HomeError(
            f"The database in {home} was made by another program.",
            hint="Choose another folder as home, or move that file away.",
        )
    applied = _applied(db)
    unknown = [name for name in applied if name not in _NAMES]
    if version > len(_NAMES) or unknown:
        found = ", ".join([f"schema {version}, {len(_NAMES)} is supported", *unknown])
        raise HomeError(
            f"The home {home} is from a newer version of personalpeft ({found}).",
            hint="Update personalpeft, or choose another home.",
        )
    needed = _NEEDED_TO_READ if to_read else frozenset(_NAMES)
    return needed <= set(applied)


def migrate(db: sqlite3.Connection) -> None:
    """Apply the pending migrations. Call it inside a write transaction."""
    db.execute(f"pragma application_id={APPLICATION_ID}")
    _run(db, _APPLIED)
    applied = _applied(db)
    for name in _NAMES:
        if name not in applied:
            _run(db, (_FOLDER / f"{name}.sql").read_text("utf-8"))
            if name in _DATA_STEPS:
                _DATA_STEPS[name](db)
            sql = "insert into _sqlite_migrations (migration_set, name, applied_at)"
            db.execute(f"{sql} values (?, ?, datetime('now'))", [_SET, name])
    db.execute(f"pragma user_version={len(_NAMES)}")


def _applied(db: sqlite3.Connection) -> list[str]:
    """Return the names of the migrations that a database has had."""
    if not has_table(db, "_sqlite_migrations"):
        return []
    sql = "select name from _sqlite_migrations where migration_set = ? order by rowid"
    return [row["name"] for row in fetch_all(db, sql, _SET)]


def _run(db: sqlite3.Connection, script: str) -> None:
    """Run a script in the open transaction. A semicolon ends a line only as it ends a statement."""
    for statement in script.split(";\n"):
        db.execute(statement)
