"""Immutable files named by the SHA-256 of their bytes: ``blobs/<2 hex>/<64 hex>``.

In an encrypted home the name is the SHA-256 of the bytes before they were encrypted.

Invariants: a file gets its name only when it is whole and on the disk. Its content never changes,
except that right bytes replace damaged ones, and that its key is wrapped anew. Files are written
and deleted under the write lock, so a leftover can be told from a new blob.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from personalpeft import file_system
from personalpeft.errors import Damaged
from personalpeft.store.database import Database
from personalpeft.store.error_mapping import map_home_errors
from personalpeft.store.file_cipher import FileCipher

DIGEST = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_PART = ".part"
_BATCH_SIZE = 500
_HINT = "Run verify for details; roll back to another revision, or restore the file from a backup."


class Blobs:
    """The adapter files of a home."""

    def __init__(self, home: Path, database: Database, cipher: FileCipher) -> None:
        self._home = home
        self._root = home / "blobs"
        self._database = database
        self._cipher = cipher

    def put(self, user: str, data: bytes) -> str:
        """Store bytes durably and return their digest. The key of ``user`` can decrypt them.

        The blob may be another user's as well. Raises ``HomeError`` if it cannot be written.
        """
        return self.put_many([(user, data)])[0]

    def put_many(self, blobs: Iterable[tuple[str, bytes]]) -> list[str]:
        """Store blobs of users as ``put`` does. Each folder is synced once, after all writes."""
        with self._database.write_lock(), map_home_errors(self._home):
            digests = [self._write(user, data) for user, data in blobs]
            # Also for blobs that existed: their writer may have been killed between rename and
            # sync.
            for folder in sorted({self.expected_path(digest).parent for digest in digests}):
                file_system.sync_folder(folder)
        return digests

    def _write(self, user: str, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        path = self.expected_path(digest)
        for folder in (self._root, path.parent):
            if not folder.is_dir():
                folder.mkdir(mode=0o700)
                file_system.sync_folder(folder.parent)
        key = self._cipher.user_key(user)
        intact = self.is_intact(path)
        recipients = self._cipher.recipients(path.read_bytes()) if intact and key else []
        if intact and (key is None or key in recipients):
            # Its age starts again, so that it is not collected before a row names it.
            os.utime(path)
        else:
            file_system.replace_file(path, self._cipher.encrypt(data, digest, key, *recipients))
        return digest

    def replace_keys(self, user: str, former: Collection[str]) -> None:
        """Wrap the keys of a user's files anew, with the user's present data key.

        Afterwards no file needs the data keys with the ids ``former``, hex. Call it under the write
        lock. After a kill it can be called again. Raises ``HomeError``; then each file opens with
        its former key or the new one.
        """
        sql = "select distinct digest from revision where user = ? order by digest"
        digests = [row["digest"] for row in self._database.fetch_all(sql, user)]
        key = self._cipher.user_key(user) if digests else None
        if key is None:
            return
        with map_home_errors(self._home):
            for path in map(self.expected_path, digests):
                # Of a call that was killed. Under the write lock no other writer has any.
                for part in file_system.unfinished_files(path):
                    part.unlink()
                with suppress(FileNotFoundError):
                    stored = path.read_bytes()
                    wrapped = self._cipher.replace_recipient(stored, former, key)
                    if wrapped != stored:
                        file_system.replace_file(path, wrapped)
                        file_system.sync_folder(path.parent)

    def path(self, digest: str) -> Path:
        """Return the path of an existing blob, unread. Raises ``Damaged`` if it is missing."""
        if not self.exists(digest):
            raise Damaged(f"The blob {digest[:80]!a} is missing from {self._home}.", hint=_HINT)
        return self.expected_path(digest)

    def exists(self, digest: str) -> bool:
        """Return whether a file has this blob's name, unread."""
        return DIGEST.fullmatch(digest) is not None and self.expected_path(digest).is_file()

    def read(self, digest: str) -> bytes:
        """Return the bytes after hashing them.

        Raises ``Damaged`` if they do not match the digest.
        """
        return self._read(digest)[1]

    def read_stored(self, digest: str, copy: Path | None = None) -> bytes:
        """Return the bytes of the file, encrypted in an encrypted home. Raises as ``read``.

        ``copy`` is a copy of this home, to read the file there.
        """
        return Blobs(copy or self._home, self._database, self._cipher)._read(digest)[0]

    def _read(self, digest: str) -> tuple[bytes, bytes]:
        """Return the bytes as they are in the file, and decrypted."""
        path = self.path(digest)
        with map_home_errors(self._home):
            stored = path.read_bytes()
            try:
                data = self._cipher.decrypt(stored, digest)
            except Damaged:
                # Its key may have been replaced since the file was read.
                stored = path.read_bytes()
                data = self._cipher.decrypt(stored, digest)
        if hashlib.sha256(data).hexdigest() != digest:
            raise Damaged(
                f"The blob {digest} in {self._home} does not match its digest.", hint=_HINT
            )
        return stored, data

    def batches(self) -> Iterator[tuple[float, list[Path]]]:
        """Yield every file under ``blobs/`` in order of name, a few hundred of one folder at a
        time.

        Each batch comes with the share of the tree before it, 0 to 1. Hidden files that are not
        ours are left out: systems write some into the folders that they show or copy.
        """
        with map_home_errors(self._home):
            for folder, subfolders, names in os.walk(self._root):
                subfolders.sort()
                names = sorted(n for n in names if not n.startswith(".") or n.endswith(_PART))
                shard = Path(folder).name
                done = int(shard, 16) / 256 if _SHARD.fullmatch(shard) else 0.0
                for first in range(0, len(names), _BATCH_SIZE):
                    yield done, [Path(folder, name) for name in names[first : first + _BATCH_SIZE]]

    def is_intact(self, path: Path) -> bool:
        """Return whether a file is a blob at its own path with the right bytes."""
        if DIGEST.fullmatch(path.name) is None or path != self.expected_path(path.name):
            return False
        with suppress(Damaged):
            return bool(self._read(path.name))
        return False

    def expected_path(self, digest: str) -> Path:
        """Return the path of a blob, whether it exists or not."""
        return self._root / digest[:2] / digest
