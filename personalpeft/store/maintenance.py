"""Maintenance of a home by a daemon or scheduler: exclusive tasks, notes, activity and copies.

Invariants: a lease ends with the process that holds it. A note is replaced as a whole, so readers
see the old one or the new. The mark of the last request is not durable, and writing it never fails
a reply.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path

from personalpeft.arguments import check_number, check_path
from personalpeft.deprecation import RenamedAttributes
from personalpeft.errors import Busy, HomeError, InvalidInput
from personalpeft.store import backup
from personalpeft.store.backup import Backup
from personalpeft.store.error_mapping import map_home_errors
from personalpeft.store.locks import Leases
from personalpeft.store.store import Store

RESTORED = "restored"
"""The note with the time at which a home was restored."""
_MAX_NOTE_BYTES = 4 << 20


class Maintenance(
    RenamedAttributes,
    renamed={
        "only": "exclusive",
        "serving": "mark_activity",
        "served": "last_activity",
        "note": "write_note",
        "noted": "read_note",
    },
):
    """The maintenance of one open home. Safe to use from several threads and processes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._home = store.home
        self._activity_mark = store.home / "locks" / "serving"

    def exclusive(self, task: str) -> AbstractContextManager[None]:
        """Hold a task of this home against all other processes and threads, without waiting.

        Raises as ``Leases.acquire``.
        """
        return self._store.leases.acquire(f"upkeep-{task}")

    def holder(self, task: str) -> str | None:
        """Return the process that holds a task now, as text, or None."""
        holder = self._store.leases.holder(f"upkeep-{task}")
        return str(holder) if holder else None

    def mark_activity(self) -> None:
        """Record that a request is being served now. It never raises."""
        if self._store.read_only:
            return
        at = self._store.now().timestamp()
        with suppress(OSError):
            self._activity_mark.parent.mkdir(mode=0o700, exist_ok=True)
            self._activity_mark.touch(mode=0o600)
            os.utime(self._activity_mark, (at, at))

    def last_activity(self) -> datetime | None:
        """Return when any process last served a request, or None."""
        try:
            return datetime.fromtimestamp(self._activity_mark.stat().st_mtime, UTC)
        except OSError:
            return None

    def write_note(self, task: str, text: str) -> None:
        """Save a task's note durably, in place of its last one. Raises ``HomeError``, ``Busy``."""
        path = self._note_path(task)
        with self._store.database.write_lock(), map_home_errors(self._home):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._store.cipher.write_file(path, text.encode())

    def read_note(self, task: str) -> str | None:
        """Return a task's last note, or None if none can be read."""
        path = self._note_path(task)
        try:
            with path.open("rb") as file:
                return self._store.cipher.decrypt(file.read(_MAX_NOTE_BYTES), path.name).decode()
        except (OSError, UnicodeDecodeError):
            return None

    def back_up(self, folder: str | Path, *, keep: int = 7) -> Backup:
        """Copy the home into a folder and delete all but the newest copies there.

        The home may be in use, or open for reading: then a home of an earlier version is copied as
        it is. What is forgotten later is listed beside the copies, and ``personalpeft.restore``
        forgets it again.

        Args:
            folder: Where the copies lie, of this home alone. Each is a home.
            keep: How many copies to keep, at least 1.

        Raises:
            InvalidInput: ``keep`` is below 1, or the folder is the home or has another home's copies.
            HomeError: The folder cannot be written.
            Damaged: The database cannot be read whole.
            Busy: Another copy is being made.
        """
        check_number("keep", keep, 1, whole=True)
        folder = check_path("folder", folder)
        store = self._store
        if folder.resolve() == store.home.resolve():
            # A restore would leave such copies in the former home.
            raise InvalidInput(
                f"{folder} is the home itself.", hint=f"Name a folder, as {folder / 'backups'}."
            )
        # Files beside the database are written also where that is open for reading.
        leases = Leases(store.home, now=store.now, read_only=False)
        with leases.acquire("upkeep-backup"):
            # First, so that a killed copy lies in a folder that the home knows.
            with nullcontext() if store.read_only else store.database.write_lock():
                backup.claim_folder(store, folder)
            return backup.back_up(store, folder, keep)

    def delete_unfinished_backups(self) -> int:
        """Delete what killed backups left in the known folders; return how many there were."""
        count = 0
        with suppress(Busy), self.exclusive("backup"):
            for folder in self._store.erasures.folders():
                with suppress(OSError, HomeError):  # Its drive may be away.
                    if backup.is_folder_of(self._home, folder):
                        count += backup.delete_unfinished(folder)
        return count

    def _note_path(self, task: str) -> Path:
        return self._home / "notes" / f"{task}.json"
