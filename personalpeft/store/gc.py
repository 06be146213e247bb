"""Takes away what nothing needs: blobs that no revision names, halves of files, and training sessions that nobody came back to.

Invariants:

- A blob goes only in the writer's turn, after a look at the rows as they are then, and only when it has lain there for a day: a learn makes
  its file durable long before a row names it, while the gate judges it. Putting a blob again makes it young. Even were a clock wrong by
  a day, that learn would fail and no row would dangle, since recording a revision puts its file again in the same turn.
- Readers need no turn: what a stack names, a revision names.
- A session is disposable, and one that is in use is written every few steps.
- One folder after another, a handful of files at a time: neither memory nor what a writer waits grows with the number of files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import sqlite_utils

from personalpeft.store.base import Collected
from personalpeft.store.blobs import DIGEST, FileBlobs
from personalpeft.store.database import Database, rows
from personalpeft.store.error_mapping import home_faults

BLOB_AGE = timedelta(days=1)
SESSION_AGE = timedelta(days=7)
_PART = ".part"


def collect(
    database: Database,
    blobs: FileBlobs,
    home: Path,
    *,
    now: datetime,
    dry_run: bool,
    progress: Callable[[float], None],
) -> Collected:
    """See ``Store.collect``."""
    found = Collected(dry_run=dry_run)
    with home_faults(home):
        for folder_done, files in blobs.handfuls():
            progress(folder_done)
            taken = list(_leftovers(database, files, (now - BLOB_AGE).timestamp(), dry_run))
            halves = sum(name.endswith(_PART) for name, _ in taken)
            found = replace(
                found,
                blobs=found.blobs + len(taken) - halves,
                parts=found.parts + halves,
                bytes=found.bytes + sum(size for _, size in taken),
            )
        for size in _old_sessions(home / "sessions", (now - SESSION_AGE).timestamp(), dry_run):
            found = replace(found, sessions=found.sessions + 1, bytes=found.bytes + size)
    progress(1.0)
    return found


def turn(database: Database) -> AbstractContextManager[None]:
    """The writer's turn, where there can be a writer of ours: what a home that is read-only holds is looked at without."""
    return nullcontext() if database.read_only else database.turn_to_write()


def unnamed(db: sqlite_utils.Database, names: Collection[str]) -> frozenset[str]:
    """Those of the files' names that are no digest, or one that no revision of any user names."""
    digests = [name for name in names if DIGEST.fullmatch(name)]
    found = rows(
        db,
        "select value from json_each(?) where not exists (select 1 from revision r where r.digest = value)",
        json.dumps(digests),
    )
    return frozenset(names) - frozenset(digests) | {each["value"] for each in found}


def _leftovers(
    database: Database, files: list[Path], before: float, dry_run: bool
) -> Iterator[tuple[str, int]]:
    """Takes away what is one of these files, all in one folder; name and size of each."""
    halves = [path for path in files if path.name.startswith(".") and path.name.endswith(_PART)]
    # First without the turn: nearly everything is named, and a writer should wait only for what is taken away.
    with database.reading() as db:
        loose = unnamed(
            db,
            [path.name for path in files if DIGEST.fullmatch(path.name) and _is_old(path, before)],
        )
    if not loose and not halves:
        return
    with turn(database):
        with database.reading() as db:
            loose = unnamed(db, loose)
        old = [path for path in files if path.name in loose and _is_old(path, before)]
        # Halves are written in the writer's turn alone, and this is ours: whoever began them is gone.
        for path in (*halves, *old):
            with suppress(FileNotFoundError):
                size = path.stat().st_size
                if not dry_run:
                    path.unlink()
                yield path.name, size


def _old_sessions(root: Path, before: float, dry_run: bool) -> Iterator[int]:
    """Takes away old sessions and the folders that are left empty; the size of each session."""
    if not root.is_dir():
        return
    with os.scandir(root) as users:
        for user in users:
            if not user.is_dir(follow_symlinks=False):
                continue
            for path in list(Path(user.path).iterdir()):
                with suppress(FileNotFoundError):
                    if _is_old(path, before):
                        size = path.stat().st_size
                        if not dry_run:
                            path.unlink()
                        yield size
            if not dry_run:
                with suppress(OSError):  # Something is in it.
                    Path(user.path).rmdir()


def _is_old(path: Path, before: float) -> bool:
    try:
        return path.stat().st_mtime < before
    except FileNotFoundError:
        return False
