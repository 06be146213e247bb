"""Records of the stacks that were published of each user, by folder.

Invariant: a digest stays recorded until its files were removed, so an erasure finds all of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from personalpeft.store.database import Database, Row, fetch_all, fetch_one, has_table
from personalpeft.store.error_mapping import sqlite3
from personalpeft.store.id_lookup import is_user

_NOTE_PREFIX = "published-"


class Publications:
    """The publications of all users of a home. A folder is named by its path."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def users(self) -> frozenset[str]:
        """Return the users of whom anything is recorded."""
        found = self._database.fetch_all("select distinct user from publication")
        return frozenset(row["user"] for row in found)

    def folders(self, user: str) -> tuple[str, ...]:
        """Return the folders in which anything of a user is recorded."""
        sql = "select distinct folder from publication where user = ? order by folder"
        return tuple(row["folder"] for row in self._database.fetch_all(sql, user))

    def set_current(self, user: str, folder: str, digest: str | None) -> None:
        """Record the stack of a user in a folder, None if nothing of the user lies there.

        The one before becomes a former one.
        """
        sql = "select digest from publication where user = ? and folder = ? and is_current = 1"
        current = self._database.fetch_one(sql, user, folder)
        if digest == (current["digest"] if current else None):
            return
        with self._database.write_transaction() as db:
            sql = "update publication set is_current = 0 where user = ? and folder = ?"
            db.execute(sql, [user, folder])
            if digest is not None:
                _insert(db, user, folder, digest, is_current=True)

    def removable_stacks(self, user: str, folder: str) -> tuple[str, ...]:
        """Return a user's former stacks in a folder that are no user's current one."""
        sql = (
            "select digest from publication p where user = ? and folder = ? and is_current = 0"
            " and not exists (select 1 from publication o where o.folder = p.folder"
            " and o.digest = p.digest and o.is_current = 1) order by digest"
        )
        return tuple(row["digest"] for row in self._database.fetch_all(sql, user, folder))

    def delete_former_stacks(self, user: str, folder: str) -> None:
        """Delete the records of a user's former stacks in a folder, after their files."""
        where = "from publication where user = ? and folder = ? and is_current = 0"
        if self._database.fetch_one(f"select 1 {where}", user, folder) is None:
            return
        with self._database.write_transaction() as db:
            db.execute(f"delete {where}", [user, folder])

    def take_over(self, records: Sequence[Row]) -> list[Row]:
        """Record what another home published of the users whom both have.

        Returns the records of stacks that no user of this home has.
        """
        with self._database.write_transaction() as db:
            kept = [each for each in records if is_user(db, each["user"])]
            for each in kept:
                current = bool(each["is_current"])
                _insert(db, each["user"], each["folder"], each["digest"], is_current=current)
        known = {(each["folder"], each["digest"]) for each in kept}
        return [each for each in records if (each["folder"], each["digest"]) not in known]


def read_publications(db: sqlite3.Connection) -> list[Row]:
    """Return all records of a home, perhaps of an earlier version."""
    return fetch_all(db, "select * from publication") if has_table(db, "publication") else []


def move_notes(db: sqlite3.Connection) -> None:
    """Record what earlier versions wrote into notes, and list these notes for deletion."""
    (main,) = fetch_all(db, "select file from pragma_database_list where name = 'main'")
    for path in sorted((Path(main["file"]).parent / "notes").glob(f"{_NOTE_PREFIX}*.json")):
        user = path.stem.removeprefix(_NOTE_PREFIX)
        if fetch_one(db, "select 1 from user where id = ?", user) is None:
            continue
        # No earlier version used a note that cannot be read.
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            for folder, note in json.loads(path.read_text("utf-8")).items():
                for digest in note["old"]:
                    _insert(db, user, folder, digest, is_current=False)
                if note["now"] is not None:
                    _insert(db, user, folder, note["now"], is_current=True)
        sql = "insert into pending_deletion (user, kind, name) values (?, 'note', ?)"
        db.execute(sql, [user, path.name])


def _insert(
    db: sqlite3.Connection, user: str, folder: str, digest: str, *, is_current: bool
) -> None:
    # A stack that is published again was a former one.
    sql = "insert or replace into publication (user, folder, digest, is_current)"
    db.execute(f"{sql} values (?, ?, ?, ?)", [user, folder, digest, is_current])
