"""Encrypt a home, give it another key, or store it without encryption again."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from personalpeft.clock import SYSTEM, Clock
from personalpeft.errors import InvalidInput
from personalpeft.settings import KeySettings, resolve
from personalpeft.store import home_keys
from personalpeft.store.home import open_store
from personalpeft.store.home_keys import ENCRYPTION, EncryptionInfo, KeySource
from personalpeft.store.reencryption import is_decided, reencrypt_home
from personalpeft.store.replacement import other_copies
from personalpeft.store.store import Store
from personalpeft.types import Progress


@dataclass(frozen=True, slots=True)
class EncryptionReport:
    """How a home is encrypted after a change.

    Attributes:
        home: The folder.
        source: Where its key comes from: "keyring", "file" or "passphrase". None: not encrypted.
        key: Where the key is, for a person.
        former_key: Where the former key is. Older backups need it.
        files: How many adapter files were written anew.
        plain_copies: Backups and former homes that are not encrypted.
    """

    home: Path
    source: KeySource | None
    key: str | None
    former_key: str | None
    files: int
    plain_copies: tuple[Path, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.home}: {'encrypted' if self.key else 'not encrypted any more'}"]
        if self.key:
            lines.append(f"  its key: {self.key}")
            lines.append("  keep a copy of the key elsewhere: without it all is lost")
        if self.former_key:
            lines.append(f"  the former key, which older backups need: {self.former_key}")
        if self.key and self.plain_copies:
            lines.append("  not encrypted, so delete them when you have a new backup:")
            lines += [f"    {path}" for path in self.plain_copies]
        return "\n".join(lines)


def encrypt(
    home: str | Path | None = None,
    key: str | None = None,
    *,
    rotate: bool = False,
    passphrase: str | None = None,
    new_passphrase: str | None = None,
    clock: Clock | None = None,
    progress: Progress = lambda stage, done: None,
) -> EncryptionReport:
    """Encrypt a home, or give an encrypted one new keys. A missing folder is created.

    The home is copied with the new keys. The copy is verified and then replaces the home. A kill at
    any moment loses nothing. No other program may have the home open. Checkpoints of unfinished
    learns are dropped.

    Args:
        home: The folder, as for ``open``.
        key: Where the home's key comes from. "keyring" is that of the operating system. "file" is a
            file in ``PERSONALPEFT_KEYS``, else in the platform's folder for settings. "passphrase"
            derives it. None: as before; else a passphrase if one is given, else the keyring if the
            system has one, else a file.
        rotate: Whether the home is encrypted already and gets new keys.
        passphrase: The passphrase, as for ``open``.
        new_passphrase: Another passphrase from now on.
        clock: Source of time and randomness. Defaults to the system's.
        progress: Called with a stage and the share of it that is done, 0 to 1.

    Raises:
        InvalidInput: The home is encrypted already, or is not; there is no keyring or passphrase.
        Busy: Another program has the home open.
        Damaged: The home is not whole; see ``Runtime.verify``.
        HomeError: The present key is missing or wrong, or the home cannot be written.
        MissingPackage: The extra ``encryption`` is not installed.
    """
    settings, clock = resolve(home, os.environ, passphrase), clock or SYSTEM
    home, keys = settings.home, settings.keys
    if key is not None and key not in list(KeySource):
        raise InvalidInput(
            f"key must be {', '.join(KeySource)}, got {key!a}.", hint="See personalpeft.encrypt."
        )
    if home in (keys.folder, *keys.folder.parents):
        raise InvalidInput(
            f"The folder of keys {keys.folder} is in the home.",
            hint="Set PERSONALPEFT_KEYS to a folder elsewhere.",
        )
    with _open(home, keys, clock) as store:
        before = home_keys.read_info(home)
        if bool(before) is not rotate:
            raise InvalidInput(
                f"The home {home} is {'already' if before else 'not'} encrypted.",
                hint="To give it a new key: --rotate" if before else "Leave --rotate out.",
            )
        wanted = KeySource(key) if key else before.source if before else None
        target = dataclasses.replace(keys, passphrase=new_passphrase or keys.passphrase)
        new = home_keys.make_keys(wanted, target, clock.entropy)
        with ExitStack() as on_error:
            on_error.callback(_drop_unused_key, home, new.info, keys)
            files = reencrypt_home(store, new, lambda done: progress("Encrypting", done))
            on_error.pop_all()
    # Opening the home drops the admin API key that the plain home had as text.
    _open(home, target, clock).close()
    where = home_keys.describe_key(new.info, keys)
    former = home_keys.describe_key(before, keys) if before else None
    copies = tuple(_plain_copies(store))
    return EncryptionReport(home, new.info.source, where, former, files, copies)


def decrypt(
    home: str | Path | None = None,
    *,
    passphrase: str | None = None,
    clock: Clock | None = None,
    progress: Progress = lambda stage, done: None,
) -> EncryptionReport:
    """Store an encrypted home without encryption again. Its key stays, for older backups.

    Args:
        home: The folder, as for ``open``.
        passphrase: The passphrase, as for ``open``.
        clock: Source of time and randomness. Defaults to the system's.
        progress: Called with a stage and the share of it that is done, 0 to 1.

    Raises:
        InvalidInput: The home is not encrypted, or there is none.
        PersonalPeftError: As ``encrypt``.
    """
    settings, clock = resolve(home, os.environ, passphrase), clock or SYSTEM
    if not settings.home.exists():
        # To open it would create it.
        raise InvalidInput(
            f"There is no home at {settings.home}.", hint="Name the home to decrypt: --home"
        )
    with _open(settings.home, settings.keys, clock) as store:
        before = home_keys.read_info(settings.home)
        if before is None:
            raise InvalidInput(
                f"The home {settings.home} is not encrypted.", hint="There is nothing to do."
            )
        files = reencrypt_home(store, None, lambda done: progress("Decrypting", done))
    former = home_keys.describe_key(before, settings.keys)
    return EncryptionReport(settings.home, None, None, former, files)


def _open(home: Path, keys: KeySettings, clock: Clock) -> Store:
    return open_store(home, now=clock.now, entropy=clock.entropy, keys=keys)


def _plain_copies(store: Store) -> Iterator[Path]:
    """Yield the known copies of a home that are not encrypted."""
    backups = [each for folder in store.erasures.folders() for each in folder.glob("copy-*")]
    for path in (*backups, *other_copies(store.home)):
        if path.is_dir() and not (path / ENCRYPTION).exists():
            yield path


def _drop_unused_key(home: Path, info: EncryptionInfo, keys: KeySettings) -> None:
    """Delete the key of a re-encryption that failed, unless the home has it or will have it."""
    if not is_decided(home) and home_keys.read_info(home) != info:
        home_keys.delete_key(info, keys)
