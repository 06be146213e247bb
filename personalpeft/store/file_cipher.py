"""Encrypt and decrypt the files of a home.

Each user has a data key in the table ``data_key``, wrapped by the home's. An encrypted file has a
key of its own, wrapped by the data key of each user that it belongs to, or by the home's. So the
files of a user can be opened no more once the row of the data key is gone. An erasure of revisions
replaces the user's data key: the files that stay are wrapped anew, and the former row is deleted.

Invariants: AES-256-GCM with random nonces. The name of a file is authenticated with it, so files
cannot be exchanged. In a home that is not encrypted all bytes pass unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from personalpeft import file_system
from personalpeft.errors import Damaged
from personalpeft.store.database import Database, insert_rows
from personalpeft.store.home_keys import ID_BYTES, KEY_BYTES, DataKey, HomeKeys

_MAGIC = b"ppe1"
_NONCE, _TAG = 12, 16
_WRAPPED = _NONCE + KEY_BYTES + _TAG
# The other keys of a user are being destroyed.
_CURRENT_KEY = """
select id from data_key k where user = ? and not exists (
    select 1 from pending_deletion p where p.user = k.user and p.kind = 'data_key' and p.name = k.id
)
"""
_RESTORE = "Restore the home from a backup."


class FileCipher:
    """Encrypts and decrypts the files of a home. Without keys it returns bytes as they are."""

    def __init__(
        self, database: Database, keys: HomeKeys | None, entropy: Callable[[int], bytes]
    ) -> None:
        self._database = database
        self._keys = keys
        self._entropy = entropy
        self.database_key = keys.database if keys else None
        """The key of the database, in hex."""

    def with_database(self, database: Database) -> FileCipher:
        """Return a cipher with the same keys that finds data keys in a copy of the database."""
        return FileCipher(database, self._keys, self._entropy)

    def user_key(self, user: str) -> DataKey | None:
        """Return the data key of a user, made on first use; None in a plain home."""
        if self._keys is None:
            return None
        if known := self._current_key(user):
            return known
        with self._database.write_transaction() as db:
            # Another process may have made it meanwhile.
            if known := self._current_key(user):
                return known
            new = DataKey(self._entropy(ID_BYTES), self._entropy(KEY_BYTES))
            wrapped = b"".join(self._encrypt(self._keys.home.key, new.key, new.id))
            insert_rows(db, "data_key", ("id", "user", "wrapped"), [(new.id.hex(), user, wrapped)])
            return new

    def _current_key(self, user: str) -> DataKey | None:
        row = self._database.fetch_one(_CURRENT_KEY, user)
        if row is None:
            return None
        if (key := self._find_key(bytes.fromhex(row["id"]))) is None:
            raise Damaged(f"The data key of {user} is damaged.", hint=_RESTORE)
        return key

    def user_key_ids(self, user: str) -> list[str]:
        """Return the ids of the data keys of a user, hex. More than one while one is replaced."""
        if self._keys is None:  # An earlier version's home may lack the table.
            return []
        found = self._database.fetch_all("select id from data_key where user = ?", user)
        return [row["id"] for row in found]

    def replace_recipient(self, stored: bytes, former: Collection[str], new: DataKey) -> bytes:
        """Return a file that a new key opens in place of former ones, given by their ids, hex.

        Its content is not encrypted again. A file that none of them opens is returned unchanged.
        """
        heads, body = _split(stored)
        kept = [head for head in heads if head[0].hex() not in former]
        for key_id, wrapped in heads:
            key = self._find_key(key_id) if key_id.hex() in former else None
            if file_key := key and _unwrap(key.key, wrapped, key_id):
                return _join([*kept, self._wrap(new, file_key)], body)
        return stored

    def encrypt(self, data: bytes, name: str, *recipients: DataKey | None) -> bytes:
        """Return the bytes of a file that each of the recipients opens."""
        if self._keys is None:
            return data
        file_key = self._entropy(KEY_BYTES)
        heads = [self._wrap(each, file_key) for each in recipients if each is not None]
        return _join(heads, *self._encrypt(file_key, data, name.encode()))

    def decrypt(self, stored: bytes, name: str) -> bytes:
        """Return the content of a file from its bytes on disk.

        Raises ``Damaged`` if it or its name was changed, or its key was destroyed.
        """
        if self._keys is None:
            return stored
        heads, body = _split(stored)
        for key_id, wrapped in heads:
            key = self._find_key(key_id)
            file_key = key and _unwrap(key.key, wrapped, key_id)
            data = file_key and _unwrap(file_key, body, name.encode())
            if data is not None:
                return data
        raise Damaged(
            f"{name[:80]!a} cannot be decrypted.",
            hint="It was changed, or its key was destroyed. Run verify for details.",
        )

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a file durably that belongs to no user. Raises ``OSError``."""
        home_key = self._keys.home if self._keys else None
        file_system.replace_file(path, self.encrypt(data, path.name, home_key))

    def read_file(self, path: Path) -> bytes:
        """Return the content of a file. Raises ``OSError``, and as ``decrypt``."""
        return self.decrypt(path.read_bytes(), path.name)

    def recipients(self, stored: bytes) -> list[DataKey]:
        """Return the keys of this home that open a file, given its beginning."""
        found = [self._find_key(key_id) for key_id, _ in _split(stored)[0]]
        return [key for key in found if key is not None]

    def _find_key(self, key_id: bytes) -> DataKey | None:
        if self._keys is None:
            return None
        if key_id == self._keys.home.id:
            return self._keys.home
        sql = "select wrapped from data_key where id = ?"
        row = self._database.fetch_one(sql, key_id.hex())
        key = row and _unwrap(self._keys.home.key, row["wrapped"], key_id)
        return DataKey(key_id, key) if key else None

    def _wrap(self, recipient: DataKey, file_key: bytes) -> tuple[bytes, bytes]:
        """Return the id of a recipient of a file, and the file's key that it opens."""
        return recipient.id, b"".join(self._encrypt(recipient.key, file_key, recipient.id))

    def _encrypt(self, key: bytes, data: bytes, name: bytes) -> tuple[bytes, bytes]:
        """Return a nonce and the encrypted bytes, apart: joining them copies a whole adapter."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = self._entropy(_NONCE)
        return nonce, AESGCM(key).encrypt(nonce, data, name)


def _unwrap(key: bytes, wrapped: bytes | memoryview, name: bytes) -> bytes | None:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        data: bytes = AESGCM(key).decrypt(bytes(wrapped[:_NONCE]), wrapped[_NONCE:], name)
    except (InvalidTag, ValueError):
        return None
    return data


def _join(heads: Sequence[tuple[bytes, bytes]], *body: bytes | memoryview) -> bytes:
    """Return a file of its recipients, each with the wrapped key, and the encrypted bytes."""
    return b"".join(
        [_MAGIC, bytes([len(heads)]), *(part for head in heads for part in head), *body]
    )


def _split(stored: bytes) -> tuple[list[tuple[bytes, bytes]], memoryview]:
    """Return the ids of the recipients of a file with the wrapped key of each, and the rest."""
    if not stored.startswith(_MAGIC) or len(stored) == len(_MAGIC):
        return [], memoryview(b"")
    size, first = ID_BYTES + _WRAPPED, len(_MAGIC) + 1
    end = first + size * stored[first - 1]
    heads = [stored[at : at + size] for at in range(first, end, size)]
    return [(head[:ID_BYTES], head[ID_BYTES:]) for head in heads], memoryview(stored)[end:]
