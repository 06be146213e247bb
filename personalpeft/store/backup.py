"""Copies of a home that are homes themselves: to restore one, put it where the home was, or open it where it lies.

A copy is ``<folder>/copy-<number>-<day>/`` with the database as it was at one moment, and every file that a revision in it
names. Not in it: training state, locks, secrets of a server.

Invariants:

- A copy has its name only when it is whole and on the disk; who is killed leaves a ``.part`` that the next one takes away.
- Numbers go up whatever the clock says, and the copies with the lowest are those that go.
- Files never change, so a copy shares them with the one before where the file system can; never with the home itself, so
  that what damages a file there leaves the copies as they are.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from personalpeft.errors import Damaged, InvalidInput
from personalpeft.store.blobs import FileBlobs, replace_file, sync_folder
from personalpeft.store.database import Database
from personalpeft.store.error_mapping import home_faults
from personalpeft.store.sqlite_version import sqlite3

_COPY = re.compile(r"copy-(\d{6})-\d{8}")
_PART = ".part"


@dataclass(frozen=True, slots=True)
class BackedUp:
    """One copy: where it lies, how many files it has, those that could not be copied since they are missing or damaged in the
    home, and the older copies that went for it.
    """

    path: Path
    files: int
    missing: tuple[str, ...]
    removed: tuple[Path, ...]


def back_up(
    database: Database, blobs: FileBlobs, home: Path, folder: Path, *, now: datetime, keep: int
) -> BackedUp:
    """Makes a copy beside readers and writers, then takes away all but the newest ``keep``. Raises ``InvalidInput``,
    ``HomeError`` where the folder cannot be written, ``Damaged`` where the database cannot be read whole.
    """
    if keep < 1:
        raise InvalidInput(f"{keep} copies are none.", hint="Keep 1 or more.")
    with home_faults(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in folder.glob(f"copy-*{_PART}"):
            shutil.rmtree(part)
        copies = _copies(folder)
        before = copies[-1] if copies else None
        number = int(before.name.split("-")[1]) + 1 if before else 1
        place = folder / f"copy-{number:06}-{now:%Y%m%d}"
        part = place.with_name(place.name + _PART)
        part.mkdir(mode=0o700)
        digests = _copy_database(database, part / database.path.name, home)
        missing = [digest for digest in digests if not _copy_file(blobs, digest, part, before)]
        for name in ("config.toml", "models"):
            with suppress(FileNotFoundError, NotADirectoryError):
                _copy_own(home / name, part / name)
        for each in (part / "blobs", *sorted((part / "blobs").glob("*")), part):
            if each.is_dir():
                sync_folder(each)
        part.rename(place)
        sync_folder(folder)
        gone = [*copies, place][:-keep]
        for old in gone:
            shutil.rmtree(old)
    return BackedUp(place, len(digests) - len(missing), tuple(missing), tuple(gone))


def _copies(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _COPY.fullmatch(path.name) and path.is_dir())


def _copy_database(database: Database, place: Path, home: Path) -> list[str]:
    """Copies the database as it is at one moment; the files that its revisions name."""
    os.close(os.open(place, os.O_CREAT | os.O_RDWR, 0o600))
    with closing(sqlite3.connect(str(place), isolation_level=None)) as copy:
        with database.reading() as db:
            db.conn.backup(copy)
        if copy.execute("pragma quick_check").fetchone()[0] != "ok":
            raise Damaged(
                f"The database in {home} is damaged, and was not copied.",
                hint="Run verify; keep the older copies.",
            )
        digests = [
            digest
            for (digest,) in copy.execute("select distinct digest from revision order by digest")
        ]
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return digests


def _copy_file(blobs: FileBlobs, digest: str, copy: Path, before: Path | None) -> bool:
    place = copy / "blobs" / digest[:2] / digest
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if before is not None:
        with suppress(OSError):
            os.link(before / "blobs" / digest[:2] / digest, place)
            return True
    try:
        replace_file(place, blobs.read(digest))
    except Damaged:
        return False
    return True


def _copy_own(path: Path, place: Path) -> None:
    if path.is_file():
        replace_file(place, path.read_bytes())
        return
    cards = sorted(path.glob("*.toml"))
    if cards:
        place.mkdir(mode=0o700)
    for card in cards:
        replace_file(place / card.name, card.read_bytes())
