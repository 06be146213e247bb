"""What a plugin keeps in a home: a folder of its own, with SQLite databases and immutable files.

The library knows such a folder by its form, also where the plugin is not installed: it has a file
``*.sqlite3``. So backups have it, a restore brings it back, and ``encrypt`` encrypts it. Files lie in
a folder in it and are named by the SHA-256 of their content. In an encrypted home they and the
database can be opened with the home's key.

Invariants: a file is durable when ``put_file`` returns. The plugin names it in a row afterwards, and
deletes it after its last row. So a copy of the database under its write lock, and of the files then,
is whole.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from personalpeft import file_system
from personalpeft.errors import Damaged, HomeError, InvalidInput
from personalpeft.store.blobs import DIGEST
from personalpeft.store.database import create_file, open_connection
from personalpeft.store.error_mapping import map_home_errors, read_only_error, sqlite3
from personalpeft.store.file_cipher import FileCipher

_SUFFIX = ".sqlite3"
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_OWN_FOLDERS = frozenset(("blobs", "locks", "models", "notes", "published", "sessions"))
# macOS writes a file "._<name>" beside each file on the file systems of sticks and shares.
_DATABASES = f"[!.]*{_SUFFIX}"
_PLAIN_HEADER = b"SQLite format 3\0"
_TIMEOUT = 10.0  # seconds


class PluginData:
    """One plugin's folder in an open home. Safe to use from several threads and processes.

    Made by ``Runtime.plugin_data``.
    """

    def __init__(
        self, home: Path, name: str, cipher: FileCipher, *, read_only: bool = False
    ) -> None:
        if not _NAME.fullmatch(name) or name in _OWN_FOLDERS:
            raise InvalidInput(
                f"{name[:80]!a} cannot be the folder of a plugin.",
                hint="Give small letters, digits, - and _, and no name of the home's own folders.",
            )
        self._home, self._cipher, self._read_only = home, cipher, read_only
        self.folder = home / name
        """The folder. Other files in it are in no backup, and ``encrypt`` deletes them."""
        self.files = self.folder / "files"
        """The folder of the files."""

    def create(self) -> None:
        """Create the folder if it does not exist. Raises ``HomeError``."""
        if self._read_only:
            raise read_only_error(self._home)
        with map_home_errors(self._home):
            self.files.mkdir(mode=0o700, parents=True, exist_ok=True)

    def connect(self, name: str = "data") -> sqlite3.Connection:
        """Open the database ``<name>.sqlite3``, created on first use.

        It commits each statement unless a transaction was begun. Any thread may use it, one at a
        time. Raises ``HomeError``.
        """
        self.create()
        path = self.folder / f"{name}{_SUFFIX}"
        key = self._cipher.database_key
        with map_home_errors(self.folder):
            create_file(path)
            if stored_key(path, key) != key:
                raise HomeError(
                    f"{path} is from before it was encrypted with its home.",
                    hint="Encrypt it now: personalpeft encrypt --rotate",
                )
            return open_database(path, key)

    def put_file(self, data: bytes) -> str:
        """Write a file durably and return its SHA-256 (hex). Raises ``HomeError``."""
        self.create()
        digest = hashlib.sha256(data).hexdigest()
        path = self.files / digest
        with map_home_errors(self._home):
            if read_file(path, self._cipher) is None:
                self._cipher.write_file(path, data)
            # Also where it existed: its writer may have been killed before.
            file_system.sync_folder(self.files)
        return digest

    def read_file(self, digest: str) -> bytes | None:
        """Return the content of a file, or None if it is missing or damaged."""
        with map_home_errors(self._home):
            return read_file(self.files / digest, self._cipher)

    def delete_file(self, digest: str) -> None:
        """Delete a file. A missing one is ignored. Raises ``HomeError``."""
        self.create()
        with map_home_errors(self._home):
            (self.files / digest).unlink(missing_ok=True)

    def delete_partial_files(self) -> None:
        """Delete what killed programs left. No other program may be writing. Raises ``HomeError``."""
        with map_home_errors(self._home):
            for part in self.files.glob(".*.part"):
                part.unlink(missing_ok=True)


def plugin_folders(home: Path) -> list[Path]:
    """Return the folders that plugins keep their data in."""
    return sorted({path.parent for path in home.glob(f"*/{_DATABASES}")})


def databases(folder: Path) -> list[Path]:
    """Return the databases in a plugin's folder."""
    return sorted(folder.glob(_DATABASES))


def files(folder: Path) -> Iterator[Path]:
    """Yield the files in a plugin's folder that have the name of a digest."""
    return (path for path in sorted(folder.glob("*/*")) if DIGEST.fullmatch(path.name))


def stored_key(database: Path, key: str | None) -> str | None:
    """Return the key that opens a plugin's database: the home's, or None for a plain database."""
    with database.open("rb") as file:
        return None if file.read(len(_PLAIN_HEADER)) == _PLAIN_HEADER else key


def open_database(path: Path, key: str | None) -> sqlite3.Connection:
    """Open an existing database of a plugin."""
    return open_connection(path, "mode=rw", timeout=_TIMEOUT, key=key)


def read_file(path: Path, cipher: FileCipher) -> bytes | None:
    """Return the content of a file of a plugin, or None if it is missing or damaged.

    A file from before its home was encrypted is read as well. Raises ``OSError``.
    """
    with suppress(FileNotFoundError, Damaged):
        stored = path.read_bytes()
        for data in (stored, cipher.decrypt(stored, path.name)):
            if hashlib.sha256(data).hexdigest() == path.name:
                return data
    return None
