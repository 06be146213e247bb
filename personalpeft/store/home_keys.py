"""The keys of an encrypted home: make them, read them from their source, derive others.

The home's key is 32 random bytes in the keyring of the operating system or in a file, or is derived
from a passphrase (scrypt). It never lies in the home. ``encryption.json`` in the home says where it
is, and holds no secret. Two keys are derived from the home's key: one opens the database
(SQLCipher), one wraps others.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from hashlib import scrypt
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from personalpeft import file_system
from personalpeft.errors import HomeError, InvalidInput
from personalpeft.extras import extra_required
from personalpeft.settings import KeySettings
from personalpeft.store.error_mapping import map_home_errors

ENCRYPTION = "encryption.json"
_SERVICE = "personalpeft"
KEY_BYTES, ID_BYTES = 32, 16
# 128 MiB and about 0.4 s: what OWASP recommends for scrypt.
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P, _SCRYPT_BYTES = 2**17, 8, 1, 2**28
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
    if info is None or info.source is not KeySource.PASSPHRASE:
        how = "is not encrypted" if info is None else f"is encrypted with a {info.source}"
        raise InvalidInput(
            f"A passphrase was given, and the home {home} {how}.",
            hint="Give no passphrase. Or have one protect the home: personalpeft encrypt "
            f"{'--rotate ' if info else ''}--key passphrase",
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
    key_id, key, salt = entropy(ID_BYTES).hex(), entropy(KEY_BYTES), b""
    match source:
        case KeySource.PASSPHRASE:
            if not settings.passphrase:
                raise InvalidInput(
                    "The passphrase must not be empty.", hint="Set PERSONALPEFT_PASSPHRASE."
                )
            salt = entropy(ID_BYTES)
            key = _derive_from_passphrase(settings.passphrase, salt)
        case KeySource.KEYRING:
            if not _has_keyring():
                raise InvalidInput(
                    "This system has no keyring that can be used here.",
                    hint="Use a file or a passphrase: --key file",
                )
            _write_keyring(key_id, key.hex())
        case KeySource.FILE:
            with map_home_errors(settings.folder):
                settings.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with file_system.create_file(settings.folder / f"{key_id}.key") as file:
                    file.write(key.hex().encode() + b"\n")
                file_system.sync_folder(settings.folder)
    info = EncryptionInfo(key_id, source, salt.hex(), _derive(key, "check").hex())
    return _derive_keys(info, key)


def delete_key(info: EncryptionInfo, settings: KeySettings) -> None:
    """Delete a key from its source, which no home uses. It never fails."""
    if info.source is KeySource.FILE:
        with suppress(OSError):
            (settings.folder / f"{info.id}.key").unlink()
    elif info.source is KeySource.KEYRING:
        keyring = _import_keyring()
        with suppress(keyring.errors.KeyringError):
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
        dklen=KEY_BYTES,
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
            keyring, text = _import_keyring(), None
            with suppress(keyring.errors.KeyringError):
                text = keyring.get_password(_SERVICE, info.id)
        case KeySource.FILE:
            try:
                text = (settings.folder / f"{info.id}.key").read_text("ascii")
            except (OSError, ValueError):
                text = None
    with suppress(ValueError, TypeError):
        if len(key := bytes.fromhex((text or "").strip())) == KEY_BYTES:
            return key
    problem = "not here" if text is None else "damaged"
    raise HomeError(
        f"The home {home} is encrypted, and its key is {problem}: {describe_key(info, settings)}.",
        hint=f"Put the key back from your copy. {_MISSING}",
    )


def _import_keyring() -> ModuleType:
    with extra_required():
        import keyring.errors
    return keyring


def _has_keyring() -> bool:
    # Of lower priority are those that store nothing or plain text.
    return float(getattr(_import_keyring().get_keyring(), "priority", 0)) >= 1


def _write_keyring(name: str, text: str) -> None:
    keyring = _import_keyring()
    try:
        keyring.set_password(_SERVICE, name, text)
    except keyring.errors.KeyringError as error:
        raise HomeError(
            f"The system's keyring does not store the key: {error}.",
            hint="Unlock the keyring, or use a file: --key file",
        ) from error
