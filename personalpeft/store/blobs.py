"""Immutable files named by the SHA-256 of their bytes: ``blobs/<2 hex>/<64 hex>``.

Invariants: a file appears under its name only when it is whole and on the disk; it is never changed, except to put the right bytes where
damaged ones lie. Writing and taking away happen in the writer's turn, so that a leftover can be told from a blob that is on its way.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from personalpeft.errors import Damaged
from personalpeft.store.database import Database
from personalpeft.store.error_mapping import home_faults

DIGEST = re.compile(r"[0-9a-f]{64}")
SHARD = re.compile(r"[0-9a-f]{2}")
_HANDFUL = 500
_HINT = "Run verify to see what is hurt; roll back to another revision, or restore the file from a backup."


class FileBlobs:
    """The ``Blobs`` of a home."""

    def __init__(self, home: Path, database: Database) -> None:
        self._home = home
        self._root = home / "blobs"
        self._database = database

    def put(self, data: bytes) -> str:
        """The digest under which the bytes now lie, durable. Raises ``HomeError`` when they cannot be written."""
        return self.put_all([data])[0]

    def put_all(self, blobs: Iterable[bytes]) -> list[str]:
        """As ``put``, for many at once: each folder is synced once, when all that goes into it is written."""
        with self._database.turn_to_write(), home_faults(self._home):
            digests = [self._write(data) for data in blobs]
            # Also where a blob lay there before: whoever wrote it may have been killed between the renaming and this.
            for folder in sorted({self.place(digest).parent for digest in digests}):
                sync_folder(folder)
        return digests

    def _write(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        place = self.place(digest)
        for folder in (self._root, place.parent):
            if not folder.is_dir():
                folder.mkdir(mode=0o700)
                sync_folder(folder.parent)
        if _holds(place, digest):
            # It is wanted again: as young as one that was written just now, so that it is not collected on its way to a row.
            os.utime(place)
        else:
            replace_file(place, data)
        return digest

    def path(self, digest: str) -> Path:
        """Where the blob lies, unread. Raises ``Damaged`` if it is not there."""
        if not self.holds(digest):
            raise Damaged(f"The blob {digest[:80]!a} is missing from {self._home}.", hint=_HINT)
        return self.place(digest)

    def holds(self, digest: str) -> bool:
        """Whether a file lies where the blob belongs, unread."""
        return DIGEST.fullmatch(digest) is not None and self.place(digest).is_file()

    def read(self, digest: str) -> bytes:
        """The bytes, hashed again. Raises ``Damaged`` if they are not what the digest says."""
        place = self.path(digest)
        with home_faults(self._home):
            data = place.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise Damaged(
                f"The blob {digest} in {self._home} is not what its digest says.", hint=_HINT
            )
        return data

    def handfuls(self) -> Iterator[tuple[float, list[Path]]]:
        """Every file under ``blobs/``, blob or not, in order of name, a few hundred of one folder at a time; with how much of the
        folder came before (0 to 1)."""
        with home_faults(self._home):
            for folder, below, names in os.walk(self._root):
                below.sort()
                names.sort()
                shard = Path(folder).name
                done = int(shard, 16) / 256 if SHARD.fullmatch(shard) else 0.0
                for first in range(0, len(names), _HANDFUL):
                    yield done, [Path(folder, name) for name in names[first : first + _HANDFUL]]

    def is_intact(self, path: Path) -> bool:
        """Whether a file is a blob in its right place with the right bytes."""
        name = path.name
        return (
            DIGEST.fullmatch(name) is not None and path == self.place(name) and _holds(path, name)
        )

    def place(self, digest: str) -> Path:
        """Where a blob belongs, whether it is there or not."""
        return self._root / digest[:2] / digest


def _holds(path: Path, digest: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == digest


def replace_file(place: Path, data: bytes) -> None:
    """Writes a whole file beside its place, has it on the disk, and renames it there: a reader sees the old one or the new."""
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name[:12]}-", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            _sync(file.fileno())
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Has the disk know which files are in a folder."""
    """Has the names in a folder on the disk."""
    if os.name != "posix":
        return  # There, a folder cannot be opened, and a rename is journalled by the file system.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync(handle: int) -> None:
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(
            handle, fcntl.F_FULLFSYNC
        )  # Plain fsync leaves the bytes in the drive's own cache there.
    else:
        os.fsync(handle)
