"""Opening a home, making it first where there is none, and refusing what is not one.

Invariants: a folder is touched only once it is known to be ours, or empty and given to us; a home comes into being in one transaction, so a
kill while it is made leaves something that the next opening makes anew.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from personalpeft.errors import Busy, Damaged, HomeError, PersonalFileError
from personalpeft.ids import check_layer_name, check_user_id
from personalpeft.store import database, error_mapping, schema
from personalpeft.store.base import Collected, Destroyed, Problem, Removal
from personalpeft.store.blobs import FileBlobs, replace_file
from personalpeft.store.catalog import SqliteCatalog
from personalpeft.store.database import Database
from personalpeft.store.erasure import has_errands, remove, run_errands
from personalpeft.store.gc import collect
from personalpeft.store.integrity import verify
from personalpeft.store.ledger import SqliteLedger
from personalpeft.store.locks import Holder, Leases, Lock
from personalpeft.store.maintenance import Upkeep
from personalpeft.store.sqlite_version import sqlite3
from personalpeft.store.user_export import Portable, put_in, take_out

DATABASE = "personalpeft.db"

_JOURNALS = frozenset(DATABASE + suffix for suffix in ("-wal", "-shm", "-journal"))
# What may lie in a home before its database does: locks of the process that is just making it, and cards put there beforehand.
_BEFOREHAND = frozenset({"write.lock", "write.holder", "locks", "models", "config.toml"})


class OpenHome:
    """The ``Store`` on a folder. Made by ``open_home``."""

    def __init__(
        self,
        home: Path,
        database: Database,
        *,
        now: Callable[[], datetime],
        entropy: Callable[[int], bytes],
    ) -> None:
        self._home = home
        self._database = database
        self._now = now
        self._leases = Leases(home, now=now)
        self._blobs = FileBlobs(home, database)
        self._ledger = SqliteLedger(database, now=now, entropy=entropy)
        self._catalog = SqliteCatalog(database, self._blobs, now=now)
        self._upkeep = Upkeep(home, database, self._blobs, self._leases, now=now)

    @property
    def home(self) -> Path:
        """The folder, absolute."""
        return self._home

    @property
    def ledger(self) -> SqliteLedger:
        """What was said."""
        return self._ledger

    @property
    def catalog(self) -> SqliteCatalog:
        """What was built from it."""
        return self._catalog

    @property
    def blobs(self) -> FileBlobs:
        """The files of what was built."""
        return self._blobs

    @property
    def upkeep(self) -> Upkeep:
        """What looking after the home at one's own times takes."""
        return self._upkeep

    def lease(self, name: str) -> AbstractContextManager[None]:
        """Holds a name against every other process and thread, without waiting. Raises ``Busy`` naming the holder."""
        if self._database.read_only:
            raise error_mapping.read_only(self._home)
        return self._leases.lease(name)

    def say(self, lease: str, doing: str) -> None:
        """Says what is done under a lease that is held here; never fails whoever does it."""
        self._leases.say(lease, doing)

    def holder(self, lease: str) -> Holder | None:
        """Who holds a lease now, and what they said last; None: nobody."""
        return self._leases.holder(lease)

    def save_session(self, user: str, layer: str, data: bytes) -> None:
        """Keeps the state of a learn in place of an older one. Raises ``InvalidId``, and ``HomeError`` where it cannot be written."""
        place = self._session(user, layer)
        if self._database.read_only:
            raise error_mapping.read_only(self._home)
        with error_mapping.home_faults(self._home):
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                replace_file(place, data)
            except FileNotFoundError:  # A collection took the folder away while it was still empty.
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace_file(place, data)

    def load_session(self, user: str, layer: str) -> bytes | None:
        """What was last saved and not dropped since; None where there is nothing."""
        with error_mapping.home_faults(self._home), suppress(FileNotFoundError):
            return self._session(user, layer).read_bytes()
        return None

    def drop_session(self, user: str, layer: str) -> None:
        """Throws the state of a learn away; where there is none, that is fine."""
        with error_mapping.home_faults(self._home):
            self._session(user, layer).unlink(missing_ok=True)

    def _session(self, user: str, layer: str) -> Path:
        return self._home / "sessions" / check_user_id(user) / f"{check_layer_name(layer)}.session"

    def tidy(self) -> None:
        """Does what a forgetting that was cut short has left to do. Raises ``Busy``, ``HomeError``."""
        if has_errands(self._database):
            run_errands(self._database, self._blobs, self._home)

    def verify(self) -> tuple[Problem, ...]:
        """Every dangling, missing, tampered or leftover thing; empty when all is well. Changes nothing."""
        return verify(self._database, self._blobs, self._home)

    def collect(
        self, *, dry_run: bool = False, progress: Callable[[float], None] = lambda done: None
    ) -> Collected:
        """Takes leftovers away, beside readers and writers. Raises ``HomeError`` on a read-only home unless ``dry_run``."""
        if self._database.read_only and not dry_run:
            raise error_mapping.read_only(self._home)
        if not dry_run:
            run_errands(self._database, self._blobs, self._home)
        return collect(
            self._database,
            self._blobs,
            self._home,
            now=self._now(),
            dry_run=dry_run,
            progress=progress,
        )

    def forget(self, user: str, decide: Callable[[], Removal]) -> Destroyed:
        """Destroys what ``decide`` says, called when nobody else can write. Raises as it does, and ``HomeError``, ``Busy``."""
        with self._database.turn_to_write():
            removal = decide()
            with self._database.writing() as db:
                destroyed = remove(db, user, removal, self._now())
            # From here on nothing can fail it: what cannot be done now, whoever opens the home next does.
            with suppress(Busy, HomeError):
                return replace(
                    destroyed, complete=run_errands(self._database, self._blobs, self._home, user)
                )
            return replace(destroyed, complete=False)

    def take_out(self, user: str) -> Portable:
        """A user as they are at one moment. Raises ``NotFound``."""
        with self._database.reading() as db:
            return take_out(db, user)

    def put_in(
        self, portable: Portable, user: str, files: Mapping[str, bytes], *, mark: str
    ) -> None:
        """Adds a user who was checked, under a name that is free, with the files that their revisions name. Raises ``InvalidInput``,
        ``InvalidId``, ``PersonalFileError`` for rows that do not fit together, ``HomeError``, ``Busy``."""
        check_user_id(user)
        try:
            with self._database.writing() as db:
                put_in(db, self._blobs, portable, user, files, self._now(), mark=mark)
        except sqlite3.IntegrityError as error:
            raise PersonalFileError(
                f"What is said of {portable.user} does not fit together.",
                hint="Export it again from where it came.",
            ) from error

    def close(self) -> None:
        """Closes the home. Closing twice is fine."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_home(
    home: Path,
    *,
    now: Callable[[], datetime],
    entropy: Callable[[int], bytes],
    patience: float,
    read_only: bool,
) -> OpenHome:
    """Opens or makes a home; see ``personalpeft.store.open_store``."""
    home = home.absolute()
    with error_mapping.home_faults(home):
        names = _names_in(home)
        _check_ours(home, names)
        if DATABASE not in names:
            if read_only:
                raise HomeError(
                    f"There is no home at {home} yet.",
                    hint="The first question that is asked makes it; or name another home.",
                )
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
        read_only = read_only or not _is_writable(home)
        if not read_only and stat.S_IMODE(home.stat().st_mode) != 0o700:
            home.chmod(0o700)
    writer = Lock(home / "write.lock", home=home, what=f"The home {home}", now=now)
    pool = Database(home / DATABASE, writer, patience=patience, read_only=read_only)
    with ExitStack() as unless_it_opens:
        unless_it_opens.callback(pool.close)
        try:
            _make_ready(home, pool)
        except Damaged as error:
            raise HomeError(
                error.message,
                hint="Keep a copy of the folder, then restore it from a backup or choose another home.",
            ) from error
        opened = OpenHome(home, pool, now=now, entropy=entropy)
        unless_it_opens.pop_all()
    if not read_only:
        # Of a forgetting that was killed. Who cannot do it now, since somebody writes, leaves it to the next.
        with suppress(Busy, HomeError, Damaged):
            opened.tidy()
    return opened


def _names_in(home: Path) -> frozenset[str]:
    # Tried rather than asked for first: another process may be making the same home.
    try:
        return frozenset(path.name for path in home.iterdir())
    except FileNotFoundError:
        if not home.is_symlink():
            return frozenset()
    except NotADirectoryError:
        pass
    raise HomeError(f"{home} is not a folder.", hint="Choose another home, or move that file away.")


def _check_ours(home: Path, names: Iterable[str]) -> None:
    if not home.exists():
        return
    owner = home.stat().st_uid
    if os.name == "posix" and owner != os.getuid():
        raise HomeError(
            f"The home {home} is not ours: it belongs to the account with number {owner}.",
            hint="Work under that account, or choose another home.",
        )
    if DATABASE in names:
        return
    others = sorted(set(names) - _BEFOREHAND)
    if any(name in {"blobs", "sessions"} or name in _JOURNALS for name in others):
        raise HomeError(
            f"The home {home} has lost its database {DATABASE}.",
            hint="Restore that file from a backup, or choose another home.",
        )
    if others:
        raise HomeError(
            f"The folder {home} is not ours: it holds {others[0]!a} and no {DATABASE}.",
            hint="Choose an empty folder or one that does not exist yet.",
        )


def _is_writable(home: Path) -> bool:
    file = home / DATABASE
    return os.access(home, os.W_OK | os.X_OK) and (not file.exists() or os.access(file, os.W_OK))


def _make_ready(home: Path, pool: Database) -> None:
    """Checks that the database is ours and brings it to the present schema, under the writer's lock where that needs writing."""
    with error_mapping.home_faults(home):
        if not (home / DATABASE).exists() or not _is_current(home, pool):
            _bring_up_to_date(home, pool)
        if not pool.read_only:
            pool.leave_unsafe_journal()


def _bring_up_to_date(home: Path, pool: Database) -> None:
    if pool.read_only:
        raise HomeError(
            f"The home {home} is from an older version of personalpeft and read-only.",
            hint="Make it writable and open it once, so that it can be brought up to date.",
        )
    with pool.turn_to_write():
        database.create_file(home / DATABASE)
        with pool.reading() as db:
            schema.is_current(db, home)
        if (home / DATABASE).stat().st_size == 0:
            pool.set_journal()
        with pool.writing() as db:
            if not schema.is_current(db, home):
                schema.migrate(db)


def _is_current(home: Path, pool: Database) -> bool:
    with pool.reading() as db:
        return schema.is_current(db, home, to_read=pool.read_only)
