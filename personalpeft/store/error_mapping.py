"""Maps errors of SQLite and the operating system to errors of this package.

Invariant: an error of this package passes unchanged, although several are also ``OSError``. A fault
that no user can cause keeps its type, so that it is seen as a bug.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from personalpeft import file_system
from personalpeft.errors import Busy, Damaged, HomeError, PersonalPeftError

if TYPE_CHECKING:
    import sqlite3
else:
    # Errors of one module are not errors of another, so the store uses the same one everywhere.
    # sqlcipher3 opens plain databases as well.
    try:
        import sqlcipher3.dbapi2 as sqlite3
    except ImportError:
        try:
            import pysqlite3 as sqlite3
        except ImportError:
            import sqlite3

__all__ = ["map_home_errors", "read_only_error", "sqlite3"]

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_WRITING = {errno.EROFS, errno.EACCES, errno.EPERM}


@contextmanager
def map_home_errors(home: Path) -> Iterator[None]:
    """Raise ``HomeError``, ``Busy`` or ``Damaged`` for errors with the files of this home."""
    try:
        yield
    except PersonalPeftError:
        raise
    except sqlite3.Error as error:
        mapped = _map_sqlite_error(error, home)
        if mapped is None:
            raise
        raise mapped from error
    except OSError as error:
        raise _map_os_error(error, home) from error


def read_only_error(home: Path) -> HomeError:
    """Return the error for a write to a home that is open for reading."""
    return HomeError(
        f"The home {home} is read-only.",
        hint="Make the folder and the files in it writable, or choose another home.",
    )


def _map_sqlite_error(error: sqlite3.Error, home: Path) -> PersonalPeftError | None:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None and "decode" in str(error):
        # The driver has no code for a column of text whose bytes are not UTF-8.
        code = sqlite3.SQLITE_CORRUPT
    elif code is None and isinstance(error, sqlite3.OperationalError):
        # The driver has none for a backup that failed, which a full disk can cause.
        code = sqlite3.SQLITE_IOERR
    # The low byte of an extended code is the primary code.
    match code & 0xFF if code is not None else None:
        case sqlite3.SQLITE_FULL:
            return _map_os_error(OSError(errno.ENOSPC, str(error)), home)
        case sqlite3.SQLITE_PERM | sqlite3.SQLITE_READONLY:
            return read_only_error(home)
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return Busy(
                f"The database in {home} is locked by another program.",
                hint="Close the program that has it open, or try again in a moment.",
            )
        case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN:
            return HomeError(
                f"The database in {home} could not be read or written ({error});"
                " nothing was changed.",
                hint="Check whether the disk is full or failing, and who may read and write there.",
            )
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return Damaged(
                f"The database in {home} is damaged ({error}).",
                hint="Run verify for details; copy the folder and restore it from a backup.",
            )
    return None


def _map_os_error(error: OSError, home: Path) -> HomeError | Busy:
    if error.errno in _NO_SPACE:
        return HomeError(
            f"The disk under the home {home} is full; nothing was changed.",
            hint="Free some space, or move the home to a larger disk, and try again.",
        )
    if file_system.is_in_use(error):
        return Busy(
            f"{error.filename2 or error.filename} is open in another program.",
            hint="Close that program and try again. If there is none, check who may write there.",
        )
    if error.errno in _NO_WRITING:
        return read_only_error(home)
    return HomeError(
        f"The home {home} cannot be used: {error.strerror or error}.",
        hint="Check the path and its disk, or choose another home.",
    )
