"""Garbage collection: blobs that no revision names, partial files, and abandoned training sessions.

Invariants:

- A blob is deleted under the write lock, if no row names it and it is a day old. A learn stores its
  file before the gate judges it, and names it in a row afterwards. Storing a file again resets its
  age. A clock that is a day wrong makes such a learn fail. It leaves no row without a file.
- Readers need no lock: a revision names whatever a stack names.
- A session is disposable, and one in use is written every few steps.
- A partial file is deleted under the lock under which such files are written: the write lock, a
  user's lease on learning, or that of backups. So its writer is dead. One in a plugin's folder, which
  has a lock of its own, is deleted when it is a day old.
- Files are read in small batches, so neither memory nor a writer's wait grows with their number.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from personalpeft import file_system
from personalpeft.errors import Busy, HomeError
from personalpeft.store.blobs import DIGEST
from personalpeft.store.erasure import delete_pending_files
from personalpeft.store.error_mapping import map_home_errors
from personalpeft.store.locks import learn_lease
from personalpeft.store.maintenance import Maintenance
from personalpeft.store.plugin_data import plugin_folders
from personalpeft.store.revisions import unnamed_blobs
from personalpeft.store.store import Store
from personalpeft.store.types import GarbageReport

BLOB_AGE = timedelta(days=1)
SESSION_AGE = timedelta(days=7)
_PART = ".part"


def collect_garbage(
    store: Store,
    *,
    dry_run: bool = False,
    progress: Callable[[float], None] = lambda done: None,
) -> GarbageReport:
    """Delete what nothing needs, beside readers and writers; with ``dry_run`` only count it.

    ``progress`` is called with the share that is done, 0 to 1. Raises ``HomeError``, ``Busy``.
    """
    if not dry_run:
        store.check_writable()
        delete_pending_files(store)
    now = store.now()
    found: Counter[str] = Counter()
    with map_home_errors(store.home):
        before = (now - BLOB_AGE).timestamp()
        for name, size in _collect_blobs(store, before, dry_run, progress):
            found.update({"parts" if name.endswith(_PART) else "blobs": 1, "bytes": size})
        for size in _collect_parts(store, dry_run):
            found.update({"parts": 1, "bytes": size})
        before = (now - SESSION_AGE).timestamp()
        for size in _collect_sessions(store.home / "sessions", before, dry_run):
            found.update({"sessions": 1, "bytes": size})
    progress(1.0)
    return GarbageReport(**found, dry_run=dry_run)


def delete_unnamed_blobs(store: Store) -> None:
    """Delete all blobs that no revision names, in a home that no other program uses."""
    with map_home_errors(store.home):
        for _ in _collect_blobs(store, math.inf, dry_run=False):
            pass


def delete_unnamed_blob(store: Store, digest: str) -> None:
    """Delete a blob unless a revision of any user names it. Raises ``HomeError``, ``Busy``."""
    database = store.database
    if not unnamed_blobs(database, [digest]):
        return
    with map_home_errors(store.home), database.exclude_writers():
        if unnamed_blobs(database, [digest]):
            store.blobs.expected_path(digest).unlink(missing_ok=True)


def delete_partial_files(store: Store) -> int:
    """Delete what killed programs left unfinished in the home and in the folders of its backups.

    Return how many files and unfinished backups there were. Raises ``HomeError``, ``Busy``.
    """
    store.check_writable()
    with map_home_errors(store.home):
        count = sum(1 for _ in _collect_blobs(store, -math.inf, dry_run=False))
        count += sum(1 for _ in _collect_parts(store, dry_run=False))
    return count + Maintenance(store).delete_unfinished_backups()


def _is_part(path: Path) -> bool:
    """Return whether a file is one that is being written, or was when its writer died."""
    return path.name.startswith(".") and path.name.endswith(_PART)


def _collect_blobs(
    store: Store,
    before: float,
    dry_run: bool,
    progress: Callable[[float], None] = lambda done: None,
) -> Iterator[tuple[str, int]]:
    """Delete partial files in ``blobs/``, and blobs from before a time that no revision names; yield
    the name and size of each.
    """
    database = store.database
    for done, files in store.blobs.batches():
        progress(done)
        parts = [path for path in files if _is_part(path)]
        old = [path.name for path in files if DIGEST.fullmatch(path.name) and _is_old(path, before)]
        # First without the lock: nearly every blob is named, and a writer should wait only for
        # deletions.
        unnamed = unnamed_blobs(database, old)
        if not unnamed and not parts:
            continue
        with database.exclude_writers():
            unnamed = unnamed_blobs(database, unnamed)
            blobs = [path for path in files if path.name in unnamed and _is_old(path, before)]
            # Partial files are written under the write lock, which is held here: their writers are
            # dead.
            for path in (*parts, *blobs):
                with suppress(FileNotFoundError):
                    yield path.name, _delete(path, dry_run)


def _collect_parts(store: Store, dry_run: bool) -> Iterator[int]:
    """Delete partial files outside of ``blobs/``; yield the size of each."""
    pattern = f".*{_PART}"
    with store.database.exclude_writers():
        for folder in (store.home, store.home / "notes"):
            for path in list(folder.glob(pattern)):
                yield _delete(path, dry_run)
    for folder in store.home.glob("sessions/*/"):
        if any(folder.glob(pattern)):
            # While a user learns, the file may have a living writer.
            user = file_system.from_folder_name(folder.name)
            with suppress(Busy, HomeError), store.leases.acquire(learn_lease(user)):
                for path in list(folder.glob(pattern)):
                    yield _delete(path, dry_run)
    before = (store.now() - BLOB_AGE).timestamp()
    for folder in plugin_folders(store.home):
        for path in list(folder.glob(f"*/{pattern}")):
            if _is_old(path, before):
                with suppress(FileNotFoundError):
                    yield _delete(path, dry_run)


def _collect_sessions(root: Path, before: float, dry_run: bool) -> Iterator[int]:
    """Delete old sessions and empty folders; yield the size of each session."""
    if not root.is_dir():
        return
    with os.scandir(root) as folders:
        for folder in folders:
            if not folder.is_dir(follow_symlinks=False):
                continue
            for path in list(Path(folder.path).iterdir()):
                if _is_old(path, before):
                    with suppress(FileNotFoundError):
                        yield _delete(path, dry_run)
            if not dry_run:
                with suppress(OSError):  # It is not empty.
                    Path(folder.path).rmdir()


def _delete(path: Path, dry_run: bool) -> int:
    """Return the size of a file after deleting it."""
    size = path.stat().st_size
    if not dry_run:
        path.unlink()
    return size


def _is_old(path: Path, before: float) -> bool:
    try:
        return path.stat().st_mtime < before
    except FileNotFoundError:
        return False
