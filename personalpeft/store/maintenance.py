"""What whoever looks after a home at its own times needs of it: to be the only one, to know whether a person is being
answered, to keep a note of what it did, and copies of the home.

Invariants: a lease ends with the process that holds it; a note is replaced as a whole, so that a reader in another process
sees the old one or the new; that a person is being answered is a mark for the moment, and never fails an answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path

from personalpeft.store import error_mapping
from personalpeft.store.backup import BackedUp, back_up
from personalpeft.store.blobs import FileBlobs, replace_file
from personalpeft.store.database import Database
from personalpeft.store.locks import Leases

_MARK = "locks/serving"
_LONGEST_NOTE = 4 << 20


class Upkeep:
    """The upkeep of one open home. Safe to use from several threads and processes."""

    def __init__(
        self,
        home: Path,
        database: Database,
        blobs: FileBlobs,
        leases: Leases,
        *,
        now: Callable[[], datetime],
    ) -> None:
        self._home = home
        self._database = database
        self._blobs = blobs
        self._leases = leases
        self._now = now

    def only(self, task: str) -> AbstractContextManager[None]:
        """Holds a task of this home against every other process and thread, without waiting. Raises ``Busy`` naming the
        holder, ``HomeError`` on a home that is read-only, ``InvalidInput`` for a name that cannot be.
        """
        if self._database.read_only:
            raise error_mapping.read_only(self._home)
        return self._leases.lease(f"upkeep-{task}")

    def holder(self, task: str) -> str | None:
        """Who holds a task now, in words; None: nobody."""
        held_by = self._leases.holder(f"upkeep-{task}")
        return None if held_by is None else str(held_by)

    def serving(self) -> None:
        """Notes that a person is being answered at this moment. Never raises: an answer matters more than the mark."""
        if self._database.read_only:
            return
        at = self._now().timestamp()
        place = self._home / _MARK
        with suppress(OSError):
            try:
                os.utime(place, (at, at))
            except FileNotFoundError:
                place.parent.mkdir(mode=0o700, exist_ok=True)
                place.touch(mode=0o600)
                os.utime(place, (at, at))

    def served(self) -> datetime | None:
        """When a person was last being answered, by any process; None: never."""
        try:
            return datetime.fromtimestamp((self._home / _MARK).stat().st_mtime, UTC)
        except OSError:
            return None

    def note(self, task: str, text: str) -> None:
        """Keeps a task's note in place of the one before, durable. Raises ``HomeError``."""
        if self._database.read_only:
            raise error_mapping.read_only(self._home)
        place = self._note(task)
        with error_mapping.home_faults(self._home):
            place.parent.mkdir(mode=0o700, exist_ok=True)
            replace_file(place, text.encode())

    def noted(self, task: str) -> str | None:
        """A task's last note; None where there is none that can be read."""
        try:
            with self._note(task).open("rb") as file:
                return file.read(_LONGEST_NOTE).decode()
        except (OSError, UnicodeDecodeError):
            return None

    def back_up(self, folder: Path, *, keep: int = 7) -> BackedUp:
        """Copies the home into a folder beside who uses it, and takes away all but the newest ``keep`` copies there. Each copy
        is a home. Raises ``InvalidInput``, ``HomeError``, ``Damaged``, and ``Busy`` while another copy is made.
        """
        with self.only("backup"):
            return back_up(
                self._database, self._blobs, self._home, folder, now=self._now(), keep=keep
            )

    def _note(self, task: str) -> Path:
        return self._home / "notes" / f"{task}.json"
