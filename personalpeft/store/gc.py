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
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Collection:
    """What is deleted from a home, or with ``dry_run`` would be, by kind, and its bytes."""

    store: Store
    dry_run: bool = False
    found: Counter[str] = field(default_factory=Counter)

    def delete(self, kind: str, path: Path) -> None:
        """Delete a file and count it. A missing one is ignored."""
        with suppress(FileNotFoundError):
            size = path.stat().st_size
            if not self.dry_run:
                path.unlink()
            self.found.update({kind: 1, "bytes": size})


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
    collection = _Collection(store, dry_run)
    with map_home_errors(store.home):
        _collect_blobs(collection, (now - BLOB_AGE).timestamp(), progress)
        _collect_parts(collection)
        _collect_sessions(collection, (now - SESSION_AGE).timestamp())
    progress(1.0)
    return GarbageReport(**collection.found, dry_run=dry_run)


def delete_unnamed_blobs(store: Store) -> None:
    """Delete all blobs that no revision names, in a home that no other program uses."""
    with map_home_errors(store.home):
        _collect_blobs(_Collection(store), math.inf)


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
    collection = _Collection(store)
    with map_home_errors(store.home):
        _collect_blobs(collection, -math.inf)
        _collect_parts(collection)
    return collection.found["parts"] + Maintenance(store).delete_unfinished_backups()


def _collect_blobs(
    collection: _Collection,
    before: float,
    progress: Callable[[float], None] = lambda done: None,
) -> None:
    """Delete partial files in ``blobs/``, and blobs from before a time that no revision names."""
    database = collection.store.database
    for done, files in collection.store.blobs.batches():
        progress(done)
        # Files that are being written, or were when their writer died.
        parts = [path for path in files if path.name[0] == "." and path.name.endswith(_PART)]
        old = [path.name for path in files if DIGEST.fullmatch(path.name) and _is_old(path, before)]
        # First without the lock: nearly every blob is named, and a writer should wait only for
        # deletions.
        unnamed = unnamed_blobs(database, old)
        if not unnamed and not parts:
            continue
        with database.exclude_writers():
            unnamed = unnamed_blobs(database, unnamed)
            # Partial files are written under the write lock, which is held here: their writers are
            # dead.
            for path in parts:
                collection.delete("parts", path)
            for path in files:
                if path.name in unnamed and _is_old(path, before):
                    collection.delete("blobs", path)


def _collect_parts(collection: _Collection) -> None:
    """Delete partial files outside of ``blobs/``."""
    store, pattern = collection.store, f".*{_PART}"
    with store.database.exclude_writers():
        for folder in (store.home, store.home / "notes"):
            for path in folder.glob(pattern):
                collection.delete("parts", path)
    for folder in store.home.glob("sessions/*/"):
        if any(folder.glob(pattern)):
            # While a user learns, the file may have a living writer.
            user = file_system.from_folder_name(folder.name)
            with suppress(Busy, HomeError), store.leases.acquire(learn_lease(user)):
                for path in folder.glob(pattern):
                    collection.delete("parts", path)
    before = (store.now() - BLOB_AGE).timestamp()
    for folder in plugin_folders(store.home):
        for path in folder.glob(f"*/{pattern}"):
            if _is_old(path, before):
                collection.delete("parts", path)


def _collect_sessions(collection: _Collection, before: float) -> None:
    """Delete old sessions and empty folders."""
    for folder in collection.store.home.glob("sessions/*/"):
        if folder.is_symlink():
            continue
        for path in folder.iterdir():
            if _is_old(path, before):
                collection.delete("sessions", path)
        if not collection.dry_run:
            with suppress(OSError):  # It is not empty.
                folder.rmdir()


def _is_old(path: Path, before: float) -> bool:
    try:
        return path.stat().st_mtime < before
    except FileNotFoundError:
        return False
