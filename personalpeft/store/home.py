"""Opens a home, creates it if needed, and refuses folders that are not homes.

Invariants: a folder is changed only if it is ours, or empty. A home is created in one transaction,
so a kill during it leaves something that the next opening completes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path

from personalpeft import file_system
from personalpeft.errors import Busy, Damaged, HomeError
from personalpeft.settings import KeySettings
from personalpeft.store.api_keys import ADMIN_KEY_FILE, ApiKeys
from personalpeft.store.database import Database, create_file
from personalpeft.store.erasure import delete_pending_files
from personalpeft.store.error_mapping import map_home_errors
from personalpeft.store.home_keys import ENCRYPTION, HomeKeys, load_keys, read_info
from personalpeft.store.locks import Lock
from personalpeft.store.reencryption import PENDING, finish_reencryption
from personalpeft.store.replacement import finish_replacement, is_replaced
from personalpeft.store.schema import is_current, migrate
from personalpeft.store.store import Store

DATABASE = "personalpeft.db"

_JOURNALS = frozenset(DATABASE + suffix for suffix in ("-wal", "-shm", "-journal"))
# What may exist before the database: locks of a process that is creating the home, and cards.
_BEFORE_DATABASE = frozenset({"write.lock", "write.holder", "locks", "models", "config.toml"})
_IN_HOME = frozenset({"blobs", "sessions", ENCRYPTION})


def open_store(
    home: Path,
    *,
    now: Callable[[], datetime],
    entropy: Callable[[int], bytes],
    timeout: float = 10.0,
    read_only: bool = False,
    keys: KeySettings | None = None,
) -> Store:
    """Open a home, and create it if it does not exist.

    A home that cannot be written opens for reading; each write then raises ``HomeError``.

    Args:
        home: The folder.
        now: Returns aware datetimes.
        entropy: Returns n random bytes.
        timeout: Seconds that a second writer waits before ``Busy`` names the first.
        read_only: Open for reading, and create no home.
        keys: Where the key of an encrypted home is. None: in the platform's folder.

    Raises:
        HomeError: The folder is no home, or belongs to another account. The database is damaged or
            from a newer version. The key of an encrypted home is missing or wrong. The disk is
            full. Nothing was changed.
        Busy: Another program has just encrypted or decrypted the home.
        MissingPackage: The home is encrypted, and the extra ``encryption`` is not installed.
    """
    home = home.absolute()
    with map_home_errors(home):
        names = _list_names(home)
        if not names and is_replaced(home):
            _check_may_finish(f"The home {home} was being restored", read_only)
            finish_replacement(home)
            names = _list_names(home)
        _check_is_home(home, names)
        if DATABASE not in names and not read_only:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
        read_only = read_only or not _is_writable(home)
        if DATABASE not in names and read_only:
            raise HomeError(
                f"There is no home at {home}.",
                hint="Ask or teach something, which creates one where that may be written; or name "
                "another home: --home",
            )
        if not read_only and stat.S_IMODE(home.stat().st_mode) != 0o700:
            home.chmod(0o700)
    writer = Lock(home / "write.lock", home=home, what=f"The home {home} is held", now=now)
    if names & PENDING:
        _check_may_finish(f"The encryption of {home} was being changed", read_only)
        with writer.acquire(timeout), map_home_errors(home):
            finish_reencryption(home)
    home_keys = load_keys(home, keys or KeySettings())
    database = Database(
        home / DATABASE,
        writer,
        timeout=timeout,
        read_only=read_only,
        key=home_keys.database if home_keys else None,
    )
    with ExitStack() as on_error:
        on_error.callback(database.close)
        try:
            _prepare_database(home, database)
            database.mark_open()
        except Damaged as error:
            raise HomeError(
                error.message,
                hint="Copy the folder, then restore it from a backup or choose another home.",
            ) from error
        finally:
            _check_not_reencrypted(home, home_keys)
        store = Store(home, database, now=now, entropy=entropy, keys=home_keys)
        on_error.pop_all()
    if not read_only:
        # Left by an erasure that was killed. If it cannot be done beside a writer or a reader, the
        # next opening does it. A replication may read without end, so no opening waits for it.
        with suppress(Busy, HomeError, Damaged):
            delete_pending_files(store, wait=False)
        if store.encrypted and (home / ADMIN_KEY_FILE).exists():
            # Of an earlier version, or written before the home was encrypted.
            with suppress(Busy, HomeError):
                ApiKeys(store).drop_admin_key_file()
    return store


def _check_may_finish(what: str, read_only: bool) -> None:
    """Raise ``HomeError`` if what a killed program left cannot be finished."""
    if read_only:
        raise HomeError(
            f"{what} when the program ended.",
            hint="Open the home for writing once, which finishes it.",
        )


def _list_names(home: Path) -> frozenset[str]:
    # Tried without a check: another process may be creating the same home.
    try:
        return frozenset(path.name for path in home.iterdir())
    except FileNotFoundError:
        if not home.is_symlink():
            return frozenset()
    except NotADirectoryError:
        pass
    raise HomeError(f"{home} is not a folder.", hint="Choose another home, or move that file away.")


def _check_is_home(home: Path, names: Iterable[str]) -> None:
    if not home.exists():
        return
    if not file_system.is_owner(home.stat()):
        raise HomeError(
            f"The home {home} belongs to another account (number {home.stat().st_uid}).",
            hint="Work under that account, or choose another home.",
        )
    others = sorted(set(names) - _BEFORE_DATABASE - {DATABASE})
    if DATABASE in names:
        # One that is being created has nothing beside its empty database and the journals. SQLite
        # would take an empty database for a new one, and delete its journal.
        has_more = any(name not in _JOURNALS and not name.startswith(".") for name in others)
        if has_more and not (home / DATABASE).stat().st_size:
            raise _lost_database(home, "is empty")
        return
    if any(name in _IN_HOME or name in _JOURNALS for name in others):
        raise _lost_database(home, "is missing")
    if others:
        raise HomeError(
            f"The folder {home} is not a home: it holds {others[0]!a} and no {DATABASE}.",
            hint="Choose an empty folder or one that does not exist yet.",
        )


def _lost_database(home: Path, how: str) -> HomeError:
    return HomeError(
        f"The home {home} has lost its database: {DATABASE} {how}.",
        hint="Restore that file from a backup, or choose another home.",
    )


def _check_not_reencrypted(home: Path, keys: HomeKeys | None) -> None:
    """Raise ``Busy`` if the database that was opened is no longer that of the home."""
    with map_home_errors(home):
        info = read_info(home)
    if info != (keys and keys.info) or any((home / name).exists() for name in PENDING):
        raise Busy(
            f"Another program has just changed the encryption of {home}.", hint="Open it again."
        )


def _is_writable(home: Path) -> bool:
    file = home / DATABASE
    return os.access(home, os.W_OK | os.X_OK) and (not file.exists() or os.access(file, os.W_OK))


def _prepare_database(home: Path, database: Database) -> None:
    """Check that the database is ours, and migrate it under the write lock if needed."""
    with map_home_errors(home):
        current = False
        if (home / DATABASE).exists():
            with database.read_transaction() as db:
                current = is_current(db, home, to_read=database.read_only)
        if not current:
            _migrate(home, database)
        if not database.read_only:
            database.leave_unsafe_wal()


def _migrate(home: Path, database: Database) -> None:
    if database.read_only:
        raise HomeError(
            f"The home {home} is read-only and from an earlier version of personalpeft.",
            hint="Make it writable and open it once, so that it can be migrated.",
        )
    with database.write_lock():
        create_file(home / DATABASE)
        if (home / DATABASE).stat().st_size == 0:
            database.set_journal_mode()
        with database.write_transaction() as db:
            if not is_current(db, home):
                migrate(db)
