"""Encryption at rest: the keys of a home, and the bytes of its files.

The home's key is 32 random bytes in the keyring of the operating system or in a file, or is derived
from a passphrase (scrypt). It never lies in the home. ``encryption.json`` in the home says where it
is, and holds no secret. Two keys are derived from the home's key: one opens the database
(SQLCipher), one wraps others.

Each user has a data key in the table ``data_key``, wrapped by the home's. An encrypted file has a
key of its own, wrapped by the data key of each user that it belongs to, or by the home's. So the
files of a user can be opened no more once the row of the data key is gone. An erasure of revisions
replaces the user's data key: the files that stay are wrapped anew, and the former row is deleted.

Invariants: AES-256-GCM with random nonces. The name of a file is authenticated with it, so files
cannot be exchanged. In a home that is not encrypted all bytes pass unchanged.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from hashlib import scrypt
from pathlib import Path
from typing import NamedTuple

from personalpeft import host
from personalpeft.errors import Damaged, HomeError, InvalidInput
from personalpeft.extras import extra_required
from personalpeft.settings import KeySettings
from personalpeft.store.database import Database, insert_rows
from personalpeft.store.error_mapping import map_home_errors

ENCRYPTION = "encryption.json"
_SERVICE = "personalpeft"
_MAGIC = b"ppe1"
_KEY, _ID, _NONCE, _TAG = 32, 16, 12, 16
_WRAPPED = _NONCE + _KEY + _TAG
# 128 MiB and about 0.4 s: what OWASP recommends for scrypt.
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P, _SCRYPT_BYTES = 2**17, 8, 1, 2**28
# The other keys of a user are being destroyed.
_CURRENT_KEY = """
select id from data_key k where user = ? and not exists (
    select 1 from pending_deletion p where p.user = k.user and p.kind = 'data_key' and p.name = k.id
)
"""
_RESTORE = "Restore the home from a backup."
_MISSING = "Without its key the home cannot be opened."


class KeySource(StrEnum):
    """Where the key of a home comes from."""

    KEYRING = "keyring"
    FILE = "file"
    PASSPHRASE = "passphrase"


@dataclass(frozen=True, slots=True)
class EncryptionInfo:
    """The content of ``encryption.json``: which key opens a home, and how to know it.

    Attributes:
        id: The id of the home's key, 32 hex digits.
        source: Where it is.
        salt: The salt of a passphrase, hex; else empty.
        check: A value derived from the key, hex. It tells a wrong key.
    """

    id: str
    source: KeySource
    salt: str
    check: str

    def to_json(self) -> bytes:
        """Return the content of the file."""
        return json.dumps({"version": 1, **asdict(self)}).encode()


class DataKey(NamedTuple):
    """A key that wraps keys of files, and its id."""

    id: bytes
    key: bytes


@dataclass(frozen=True, slots=True, repr=False)
class HomeKeys:
    """The keys that are derived from a home's key: of the database, in hex, and of all else."""

    info: EncryptionInfo
    database: str
    home: DataKey


def read_info(home: Path) -> EncryptionInfo | None:
    """Return how a home is encrypted, or None if it is not. Raises ``HomeError``."""
    path = home / ENCRYPTION
    try:
        data = json.loads(path.read_bytes())
        if data.pop("version") != 1:
            raise HomeError(
                f"{path} is from a newer version of personalpeft.", hint="Update personalpeft."
            )
        return EncryptionInfo(**{**data, "source": KeySource(data["source"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise HomeError(
            f"{path} is damaged. {_MISSING}", hint="Restore that file from a backup."
        ) from error


def load_keys(home: Path, settings: KeySettings) -> HomeKeys | None:
    """Return the keys of a home, or None if it is not encrypted.

    Raises:
        HomeError: The key is missing or wrong.
        MissingPackage: The packages of the extra ``encryption`` are not installed.
    """
    with map_home_errors(home):
        info = read_info(home)
    if info is None:
        return None
    require_encryption()
    key = _read_key(home, info, settings)
    if not hmac.compare_digest(_derive(key, "check").hex(), info.check):
        what = "passphrase" if info.source is KeySource.PASSPHRASE else f"key {info.id}"
        raise HomeError(
            f"The {what} does not open the home {home}.", hint="Nothing was changed. Try another."
        )
    return _derive_keys(info, key)


def check_takes_passphrase(home: Path) -> None:
    """Raise ``InvalidInput`` if a passphrase would not protect a home.

    Without this check a caller could take a plain home for an encrypted one.
    """
    with map_home_errors(home):
        info = read_info(home)
    if info is None:
        raise InvalidInput(
            f"A passphrase was given, and the home {home} is not encrypted.",
            hint="Encrypt it: personalpeft encrypt --key passphrase. Or give no passphrase.",
        )
    if info.source is not KeySource.PASSPHRASE:
        raise InvalidInput(
            f"A passphrase was given, and the key of the home {home} is in a {info.source}.",
            hint="Give no passphrase, or change the key: personalpeft encrypt --rotate --key "
            "passphrase.",
        )


def make_keys(
    source: KeySource | None, settings: KeySettings, entropy: Callable[[int], bytes]
) -> HomeKeys:
    """Make the key of a home and store it at its source.

    Args:
        source: Where to. None: a passphrase if the settings have one, else the keyring if the
            system has one, else a file.
        settings: The folder of key files, and the passphrase.
        entropy: Returns n random bytes.

    Raises:
        InvalidInput: There is no passphrase, or no keyring.
        HomeError: The key file cannot be written.
        MissingPackage: The packages of the extra ``encryption`` are not installed.
    """
    require_encryption()
    if source is None:
        source = KeySource.KEYRING if _has_keyring() else KeySource.FILE
        source = KeySource.PASSPHRASE if settings.passphrase else source
    key_id, key, salt = entropy(_ID).hex(), entropy(_KEY), b""
    match source:
        case KeySource.PASSPHRASE:
            if not settings.passphrase:
                raise InvalidInput(
                    "The passphrase must not be empty.", hint="Set PERSONALPEFT_PASSPHRASE."
                )
            salt = entropy(_ID)
            key = _derive_from_passphrase(settings.passphrase, salt)
        case KeySource.KEYRING:
            if not _has_keyring():
                raise InvalidInput(
                    "This system has no keyring that can be used here.",
                    hint="Use a file or a passphrase: --key file",
                )
            _write_keyring(key_id, key.hex())
        case KeySource.FILE:
            _write_key_file(settings.folder / f"{key_id}.key", key)
    info = EncryptionInfo(key_id, source, salt.hex(), _derive(key, "check").hex())
    return _derive_keys(info, key)


def delete_key(info: EncryptionInfo, settings: KeySettings) -> None:
    """Delete a key from its source, which no home uses. It never fails."""
    if info.source is KeySource.FILE:
        with suppress(OSError):
            (settings.folder / f"{info.id}.key").unlink()
    elif info.source is KeySource.KEYRING:
        import keyring
        from keyring.errors import KeyringError

        with suppress(KeyringError):
            keyring.delete_password(_SERVICE, info.id)


def describe_key(info: EncryptionInfo, settings: KeySettings) -> str:
    """Return where a key is, for a person."""
    match info.source:
        case KeySource.FILE:
            return str(settings.folder / f"{info.id}.key")
        case KeySource.KEYRING:
            return f"the system's keyring, service {_SERVICE}, name {info.id}"
    return "your passphrase"


def require_encryption() -> None:
    """Raise ``MissingPackage`` if the extra ``encryption`` is not installed."""
    with extra_required():
        import sqlcipher3  # noqa: F401
    with extra_required():
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401


class FileCipher:
    """Encrypts and decrypts the files of a home. Without keys it returns bytes as they are."""

    def __init__(
        self, database: Database, keys: HomeKeys | None, entropy: Callable[[int], bytes]
    ) -> None:
        self._database = database
        self._keys = keys
        self._entropy = entropy

    @property
    def database_key(self) -> str | None:
        """The key of the database, in hex."""
        return self._keys.database if self._keys else None

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
            new = DataKey(self._entropy(_ID), self._entropy(_KEY))
            wrapped = self._wrap(self._keys.home.key, new.key, new.id)
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
        if self._keys is None:
            return []
        found = self._database.fetch_all("select id from data_key where user = ?", user)
        return [row["id"] for row in found]

    def replace_recipient(self, stored: bytes, former: Collection[str], new: DataKey) -> bytes:
        """Return a file that a new key opens in place of former ones, given by their ids, hex.

        Its content is not encrypted again. A file that none of them opens is returned unchanged.
        """
        heads, body = _split(stored)
        for key_id, wrapped in heads:
            key = self._find_key(key_id) if key_id.hex() in former else None
            if file_key := key and _unwrap(key.key, wrapped, key_id):
                kept = [head for head in heads if head[0].hex() not in former]
                kept.append((new.id, self._wrap(new.key, file_key, new.id)))
                return _join(kept, body)
        return stored

    def encrypt(self, data: bytes, name: str, *recipients: DataKey | None) -> bytes:
        """Return the bytes of a file that each of the recipients opens."""
        if self._keys is None:
            return data
        keys = [each for each in recipients if each is not None]
        file_key = self._entropy(_KEY)
        heads = [(each.id, self._wrap(each.key, file_key, each.id)) for each in keys]
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
        host.replace_file(path, self.encrypt(data, path.name, home_key))

    def read_file(self, path: Path) -> bytes:
        """Return the content of a file. Raises ``OSError``, and as ``decrypt``."""
        return self.decrypt(path.read_bytes(), path.name)

    def recipients(self, stored: bytes) -> list[DataKey]:
        """Return the keys of this home that open a file, given its beginning."""
        if self._keys is None:
            return []
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

    def _wrap(self, key: bytes, data: bytes, name: bytes) -> bytes:
        return b"".join(self._encrypt(key, data, name))

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
    size, first = _ID + _WRAPPED, len(_MAGIC) + 1
    end = first + size * stored[first - 1]
    heads = [stored[at : at + size] for at in range(first, end, size)]
    return [(head[:_ID], head[_ID:]) for head in heads], memoryview(stored)[end:]


def _derive(key: bytes, purpose: str) -> bytes:
    # HKDF-Expand (RFC 5869) of one block: the home's key is uniform already.
    return hmac.digest(key, f"personalpeft {purpose}".encode() + b"\x01", "sha256")


def _derive_keys(info: EncryptionInfo, key: bytes) -> HomeKeys:
    home = DataKey(bytes.fromhex(info.id), _derive(key, "files"))
    return HomeKeys(info, _derive(key, "database").hex(), home)


def _derive_from_passphrase(passphrase: str, salt: bytes) -> bytes:
    return scrypt(
        passphrase.encode(),
        salt=salt,
        n=_SCRYPT_N,
        r=_SCRYPT_R,
        p=_SCRYPT_P,
        maxmem=_SCRYPT_BYTES,
        dklen=_KEY,
    )


def _read_key(home: Path, info: EncryptionInfo, settings: KeySettings) -> bytes:
    match info.source:
        case KeySource.PASSPHRASE:
            if not settings.passphrase:
                raise HomeError(
                    f"The home {home} is encrypted with a passphrase.",
                    hint="Set PERSONALPEFT_PASSPHRASE, or pass passphrase=.",
                )
            return _derive_from_passphrase(settings.passphrase, bytes.fromhex(info.salt))
        case KeySource.KEYRING:
            text = _read_keyring(info.id)
        case KeySource.FILE:
            try:
                text = (settings.folder / f"{info.id}.key").read_text("ascii")
            except (OSError, ValueError):
                text = None
    with suppress(ValueError, TypeError):
        if len(key := bytes.fromhex((text or "").strip())) == _KEY:
            return key
    raise HomeError(
        f"The home {home} is encrypted, and its key is not here: {describe_key(info, settings)}.",
        hint=f"Put the key back from your copy. {_MISSING}",
    )


def _has_keyring() -> bool:
    with extra_required():
        import keyring
    # Of lower priority are those that store nothing or plain text.
    return float(getattr(keyring.get_keyring(), "priority", 0)) >= 1


def _read_keyring(name: str) -> str | None:
    with extra_required():
        import keyring
        from keyring.errors import KeyringError
    text: str | None = None
    with suppress(KeyringError):
        text = keyring.get_password(_SERVICE, name)
    return text


def _write_keyring(name: str, text: str) -> None:
    import keyring
    from keyring.errors import KeyringError

    try:
        keyring.set_password(_SERVICE, name, text)
    except KeyringError as error:
        raise HomeError(
            f"The system's keyring does not store the key: {error}.",
            hint="Unlock the keyring, or use a file: --key file",
        ) from error


def _write_key_file(path: Path, key: bytes) -> None:
    with map_home_errors(path.parent):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with host.create_file(path) as file:
            file.write(key.hex().encode() + b"\n")
        host.sync_folder(path.parent)
