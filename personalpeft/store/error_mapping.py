"""What SQLite and the operating system complain about, said in our own errors.

Invariant: an error of ours passes through unchanged (several of them are also ``OSError``), and a fault that no user can cause stays
the exception it was, so that it is seen as the bug it is.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from personalpeft.errors import Busy, Damaged, HomeError, PersonalPeftError
from personalpeft.store.sqlite_version import sqlite3

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_WRITING = {errno.EROFS, errno.EACCES, errno.EPERM}


class _Code(IntEnum):
    """SQLite's primary result codes that a home can bring about (the low byte of an extended code)."""

    PERM = 3
    BUSY = 5
    LOCKED = 6
    READONLY = 8
    IOERR = 10
    CORRUPT = 11
    FULL = 13
    CANTOPEN = 14
    NOTADB = 26


@contextmanager
def home_faults(home: Path) -> Iterator[None]:
    """Turns what goes wrong with this home's files into ``HomeError``, ``Busy`` or ``Damaged``."""
    try:
        yield
    except PersonalPeftError:
        raise
    except sqlite3.Error as error:
        ours = _from_sqlite(error, home)
        if ours is None:
            raise
        raise ours from error
    except OSError as error:
        raise _from_system(error, home) from error


def read_only(home: Path) -> HomeError:
    """The error of every write to a home that was opened for reading."""
    return HomeError(
        f"The home {home} is read-only.",
        hint="Make the folder and the files in it writable, or choose another home.",
    )


def _full(home: Path) -> HomeError:
    return HomeError(
        f"The disk under the home {home} is full; nothing was changed.",
        hint="Free some space, or move the home to a larger disk, and try again.",
    )


def _from_sqlite(error: sqlite3.Error, home: Path) -> PersonalPeftError | None:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None and "decode" in str(error):
        code = _Code.CORRUPT  # Bytes that are not UTF-8 in a column of text: the driver's complaint, which has no code.
    match code & 0xFF if code is not None else None:
        case _Code.FULL:
            return _full(home)
        case _Code.PERM | _Code.READONLY:
            return read_only(home)
        case _Code.BUSY | _Code.LOCKED:
            return Busy(
                f"Another program holds the database in {home} locked.",
                hint="Close the program that has it open, or try again in a moment.",
            )
        case _Code.IOERR:
            return HomeError(
                f"The system refused to read or write the database in {home} ({error}); nothing was changed.",
                hint="See whether the disk is full or failing, then try again.",
            )
        case _Code.CORRUPT | _Code.NOTADB:
            return Damaged(
                f"The database in {home} is damaged ({error}).",
                hint="Run verify to see what is hurt; keep a copy of the folder and restore it from a backup.",
            )
        case _Code.CANTOPEN:
            return HomeError(
                f"The database in {home} cannot be opened.",
                hint="See whether it is still there and whether this account may read and write the folder.",
            )
    return None


def _from_system(error: OSError, home: Path) -> HomeError:
    if error.errno in _NO_SPACE:
        return _full(home)
    if error.errno in _NO_WRITING:
        return read_only(home)
    return HomeError(
        f"The home {home} cannot be used: {error.strerror or error}.",
        hint="See whether the path is right and its disk is there, or choose another home.",
    )
