"""An open home: its parts, and the training state of unfinished learns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Self

from personalpeft import file_system
from personalpeft.errors import Damaged
from personalpeft.ids import check_layer_name, check_user_id
from personalpeft.store.blobs import Blobs
from personalpeft.store.catalog import Catalog
from personalpeft.store.database import Database
from personalpeft.store.erasure_log import ErasureLog
from personalpeft.store.error_mapping import map_home_errors, read_only_error
from personalpeft.store.exports import Exports
from personalpeft.store.file_cipher import FileCipher
from personalpeft.store.home_keys import HomeKeys
from personalpeft.store.ledger import Ledger
from personalpeft.store.locks import Leases
from personalpeft.store.publications import Publications


class Store:
    """An open home, made by ``open_store``. Safe to use from several threads and processes.

    Use it as a context manager, or close it.
    """

    def __init__(
        self,
        home: Path,
        database: Database,
        *,
        now: Callable[[], datetime],
        entropy: Callable[[int], bytes],
        keys: HomeKeys | None = None,
    ) -> None:
        self.home = home
        self.database = database
        self.now = now
        self.entropy = entropy
        self.read_only = database.read_only
        """Whether every write raises ``HomeError``."""
        self.encrypted = keys is not None
        self.leases = Leases(home, now=now, read_only=self.read_only)
        self.cipher = FileCipher(database, keys, entropy)
        self.blobs = Blobs(home, database, self.cipher)
        self.ledger = Ledger(database, now=now, entropy=entropy)
        self.catalog = Catalog(database, self.blobs, now=now)
        self.publications = Publications(database)
        self.exports = Exports(database, now)
        self.erasures = ErasureLog(home)

    def check_writable(self) -> None:
        """Raise ``HomeError`` if every write would, before work whose result is to be written."""
        if self.read_only:
            raise read_only_error(self.home)

    def save_checkpoint(self, user: str, layer: str, data: bytes) -> None:
        """Save what a running learn of a layer needs to resume, in place of its last state.

        Raises ``InvalidId``, ``HomeError``.
        """
        path = self._session_path(user, layer)
        self.check_writable()
        data = self.cipher.encrypt(data, path.name, self.cipher.user_key(user))
        with map_home_errors(self.home):
            try:
                file_system.replace_file(path, data)
            except FileNotFoundError:  # The first one, or a collection deleted the empty folder.
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                file_system.replace_file(path, data)

    def load_checkpoint(self, user: str, layer: str) -> bytes | None:
        """Return the last saved state, or None."""
        path = self._session_path(user, layer)
        with map_home_errors(self.home), suppress(FileNotFoundError, Damaged):
            return self.cipher.decrypt(path.read_bytes(), path.name)
        return None

    def delete_checkpoint(self, user: str, layer: str) -> None:
        """Delete the saved state, if any, and what killed learns left of a save.

        The caller has the user's learn lease, so nobody else saves one.
        """
        path = self._session_path(user, layer)
        with map_home_errors(self.home):
            for file in (path, *path.parent.glob(".*.part")):
                file.unlink(missing_ok=True)

    def has_sessions(self, user: str) -> bool:
        """Return whether any training state of a user is saved."""
        return any(self.session_folder(user).glob("*"))

    def session_folder(self, user: str) -> Path:
        """Return the folder of a user's training state. It need not exist."""
        return self.home / "sessions" / file_system.to_folder_name(check_user_id(user))

    def _session_path(self, user: str, layer: str) -> Path:
        return self.session_folder(user) / f"{check_layer_name(layer)}.session"

    def close(self) -> None:
        """Close the home. Closing twice is fine."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
