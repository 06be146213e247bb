"""Which SQLite this process has, and which journal it can be trusted with by itself.

sqlite-utils takes pysqlite3 where it is installed and else the standard module; errors of one are not errors of the other, so
everything here uses the very module that sqlite-utils uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3
else:
    from sqlite_utils.utils import sqlite3

__all__ = ["JOURNAL_MODE", "sqlite3", "wal_is_safe"]


def wal_is_safe(version: tuple[int, ...]) -> bool:
    """Whether this SQLite has the repair of the WAL-reset bug, by which a checkpoint could lose committed transactions."""
    return (
        version >= (3, 51, 3) or (3, 50, 7) <= version < (3, 51) or (3, 44, 6) <= version < (3, 45)
    )


JOURNAL_MODE = "wal" if wal_is_safe(sqlite3.sqlite_version_info) else "truncate"
"""The journal that this SQLite gives to a new database. An older one keeps the journal that it has."""
