"""Turns the encryption of a home on or off, or gives it new keys.

The home is copied with the new keys into ``.converting``, and the copy is verified. Renaming it to
``.converted`` decides: from then on the copy replaces the home's files. If a kill interrupts that,
the next opening finishes it. A kill before the rename leaves the home as it was.

Invariants: nothing of the home is deleted before the copy is whole, verified and on the disk. No
other connection to the database is open meanwhile, and none can be opened. A program that waited
for the former database is refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from personalpeft import file_system
from personalpeft.errors import Damaged
from personalpeft.store import plugin_data
from personalpeft.store.blobs import Blobs
from personalpeft.store.certificate_keys import CERTIFICATE_KEYS
from personalpeft.store.database import OPEN_MARK, Database, create_file, fetch_all, open_connection
from personalpeft.store.error_mapping import map_home_errors, sqlite3
from personalpeft.store.file_cipher import FileCipher
from personalpeft.store.home_keys import ENCRYPTION, HomeKeys
from personalpeft.store.integrity import verify
from personalpeft.store.locks import Lock
from personalpeft.store.schema import REPLACED_ID
from personalpeft.store.store import Store

_COPY, _DECIDED, _MOVING = ".converting", ".converted", ".converted-moving"
PENDING = frozenset({_COPY, _DECIDED, _MOVING})
"""The folders in a home that a re-encryption leaves when it is killed."""

_REPLACED = frozenset({"blobs", "sessions", "notes", CERTIFICATE_KEYS, ENCRYPTION})
_JOURNALS = ("-wal", "-shm", "-journal")
_TIMEOUT = 10.0
_ALONE_TIMEOUT = 1.0  # A program that is open does not close its connections meanwhile.
_BATCH_SIZE = 100


def reencrypt_home(
    store: Store, new: HomeKeys | None, progress: Callable[[float], None] = lambda done: None
) -> int:
    """Encrypt a home with new keys, or decrypt it, and return how many adapter files it has.

    Checkpoints of unfinished learns are dropped.

    Args:
        store: The open home. It is closed.
        new: The new keys; None for a plain home.
        progress: Called with the share that is done, 0 to 1.

    Raises:
        Busy: Another program has the home open.
        Damaged: The home is not whole; see ``verify``.
        HomeError: The home cannot be written. Nothing was changed.
    """
    home, path = store.home, store.database.path
    with store.database.write_lock(), map_home_errors(home):
        store.close()
        copy, key = home / _COPY, store.cipher.database_key
        with ExitStack() as on_error, closing(open_alone(path, key)) as db:
            on_error.callback(shutil.rmtree, copy, ignore_errors=True)
            copy.mkdir(mode=0o700)
            _copy_database(db, copy / path.name, new)
            files = _copy_files(store, copy, new, progress)
            file_system.replace(copy, home / _DECIDED)
            on_error.pop_all()
            file_system.sync_folder(home)
            db.execute(f"pragma application_id={REPLACED_ID}")
        finish_reencryption(home)
    return files


def is_decided(home: Path) -> bool:
    """Return whether the next opening of a home finishes a re-encryption."""
    return (home / _DECIDED).exists() or (home / _MOVING).exists()


def finish_reencryption(home: Path) -> None:
    """Finish what a killed re-encryption left, under the write lock. Raises ``OSError``."""
    if (home / _COPY).is_dir():
        shutil.rmtree(home / _COPY)
    decided, moving = home / _DECIDED, home / _MOVING
    if decided.is_dir():
        journals = [each for suffix in _JOURNALS for each in home.glob(f"*.db{suffix}")]
        folders = {path.name for path in decided.iterdir() if path.is_dir()}
        for path in (*journals, *(home / name for name in _REPLACED | folders)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        file_system.sync_folder(home)
        file_system.replace(decided, moving)
    if moving.is_dir():
        for path in sorted(moving.iterdir()):
            file_system.replace(path, home / path.name)
        file_system.sync_folder(home)
        moving.rmdir()
    file_system.sync_folder(home)


def _copy_database(db: sqlite3.Connection, path: Path, new: HomeKeys | None) -> None:
    """Copy a database with another key."""
    create_file(path)
    key = f"x'{new.database}'" if new else ""
    db.execute("attach ? as copy key ?", [f"{path.as_uri()}?mode=rw", key])
    db.execute("begin")
    db.execute("select sqlcipher_export('copy')").fetchall()
    for mark in ("application_id", "user_version"):
        (value,) = db.execute(f"pragma main.{mark}").fetchone()
        db.execute(f"pragma copy.{mark}={value}")
    for table in fetch_all(db, "select name from main.sqlite_master where type = 'table'"):
        name = table["name"]
        counts = [f"(select count(*) from {each}.{name})" for each in ("main", "copy")]
        if not db.execute(f"select {' = '.join(counts)}").fetchone()[0]:
            raise Damaged(f"The table {name} was not copied whole.", hint="Try again.")
    db.execute("commit")
    db.execute("detach copy")


def _copy_files(
    store: Store, copy: Path, new: HomeKeys | None, progress: Callable[[float], None]
) -> int:
    """Copy the files of a home into a copy of its database, verify it, and return their number."""
    home, name = store.home, store.database.path.name
    lock = Lock(copy / "write.lock", home=copy, what=f"The copy {copy} is held", now=store.now)
    database = Database(
        copy / name, lock, timeout=_TIMEOUT, read_only=False, key=new.database if new else None
    )
    with Store(copy, database, now=store.now, entropy=store.entropy, keys=new) as target:
        database.set_journal_mode()
        with database.write_transaction() as db:
            # The former keys belong to no user.
            db.execute("update data_key set user = ''")
        former = store.cipher.with_database(database)
        blobs = Blobs(home, database, former)
        rows = database.fetch_all("select distinct user, digest from revision order by digest")
        for first in range(0, len(rows), _BATCH_SIZE):
            progress(first / len(rows))
            batch = rows[first : first + _BATCH_SIZE]
            target.blobs.put_many((row["user"], blobs.read(row["digest"])) for row in batch)
        for path in (*home.glob("notes/[!.]*.json"), home / CERTIFICATE_KEYS):
            with suppress(FileNotFoundError):
                data = former.read_file(path)
                (target_path := copy / path.relative_to(home)).parent.mkdir(0o700, exist_ok=True)
                target.cipher.write_file(target_path, data)
        _copy_plugins(home, copy, former, target.cipher, new)
        with database.write_transaction() as db:
            db.execute("delete from data_key where user = ''")
        if new is not None:
            file_system.replace_file(copy / ENCRYPTION, new.info.to_json())
        if problems := verify(target):
            raise Damaged(
                f"The home has {len(problems)} problems and was not changed. The first: "
                f"{problems[0].where}: {problems[0].fault}",
                hint="Run verify --repair first.",
            )
    for name in ("write.lock", "write.holder"):
        (copy / name).unlink(missing_ok=True)
    for folder in (*copy.glob("notes"), copy):
        file_system.sync_folder(folder)
    return len({row["digest"] for row in rows})


def _copy_plugins(
    home: Path, copy: Path, former: FileCipher, cipher: FileCipher, new: HomeKeys | None
) -> None:
    """Copy what plugins keep in a home into its copy. Damaged files are left out."""
    for folder in plugin_data.plugin_folders(home):
        (target := copy / folder.name).mkdir(mode=0o700)
        for path in plugin_data.databases(folder):
            key = plugin_data.stored_key(path, former.database_key)
            with closing(open_alone(path, key)) as db:
                _copy_database(db, target / path.name, new)
        for path in plugin_data.files(folder):
            (parent := target / path.parent.name).mkdir(mode=0o700, exist_ok=True)
            if (data := plugin_data.read_file(path, former)) is not None:
                cipher.write_file(parent / path.name, data)
        for each in (*target.glob("*/"), target):
            file_system.sync_folder(each)


def open_alone(path: Path, key: str | None) -> sqlite3.Connection:
    """Open the only connection to a database, which keeps others out. Raises ``Busy`` if it is not."""
    db = open_connection(path, "mode=rw", timeout=_ALONE_TIMEOUT, key=key, exclusive=True)
    try:
        db.execute("begin exclusive")
        db.execute("commit")
        if (mark := path.parent / OPEN_MARK).exists():
            with closing(
                open_connection(mark, "mode=rw", timeout=_ALONE_TIMEOUT, key=None)
            ) as lock:
                lock.execute("begin exclusive")
    except sqlite3.Error:
        db.close()
        raise
    return db
