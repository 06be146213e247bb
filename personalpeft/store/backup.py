"""Copies of a home that are homes themselves.

``personalpeft.restore`` puts a copy in place of a home. A copy is the folder
``<folder>/copy-<number>-<day>/``. It has the database at one moment, every file that a revision in it
names, and what plugins keep in the home. It has no training state, locks or API keys. It has no records of publications, since
it must not remove what the home published.

Invariants:

- A copy gets its name only when it is whole and on the disk. A killed copy leaves a ``.part`` that
  the next one deletes.
- A folder has the copies of one home. A random id tells homes apart. It lies in the home, in its
  copies and beside them.
- Numbers grow whatever the clock says, and the copies with the lowest numbers are deleted first.
- A copy shares files with the one before where the file system can, if they have the home's bytes.
  So damage to a copy does not reach the next one. It never shares them with the home, so damage to
  a file of the home does not reach the copies.
- A copy of an encrypted home is encrypted with the same keys.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from personalpeft import file_system
from personalpeft.errors import Damaged, HomeError, InvalidInput
from personalpeft.store import plugin_data
from personalpeft.store.blobs import Blobs
from personalpeft.store.certificate_keys import CERTIFICATE_KEYS
from personalpeft.store.database import Database, create_file, fetch_all, has_table
from personalpeft.store.error_mapping import map_home_errors, sqlite3
from personalpeft.store.home_keys import ENCRYPTION
from personalpeft.store.store import Store

HOME_ID = "home-id"
"""The file with the random id of a home."""
COPY_NAME = re.compile(r"copy-(\d{6})-\d{8}")
_PART = ".part"
_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Backup:
    """One copy of a home.

    - ``files``: how many adapter files it has.
    - ``missing``: the digests of files that are missing or damaged in the home.
    - ``removed``: the earlier copies that were deleted for it.
    """

    path: Path
    files: int
    missing: tuple[str, ...]
    removed: tuple[Path, ...]


def back_up(store: Store, folder: Path, keep: int) -> Backup:
    """Implement ``Maintenance.back_up``, which documents the arguments."""
    home = store.home
    with map_home_errors(folder):
        delete_unfinished(folder)
        copies = sorted(p for p in folder.iterdir() if COPY_NAME.fullmatch(p.name) and p.is_dir())
        previous = copies[-1] if copies else None
        number = int(previous.name.split("-")[1]) + 1 if previous else 1
        path = folder / f"copy-{number:06}-{store.now():%Y%m%d}"
        part = path.with_name(path.name + _PART)
        part.mkdir(mode=0o700)
        try:
            digests, missing = _copy_contents(store, part, previous)
            settings = ("config.toml", HOME_ID, CERTIFICATE_KEYS, ENCRYPTION)
            for file in (*(home / name for name in settings), *sorted(home.glob("models/*.toml"))):
                with suppress(FileNotFoundError):
                    (target := part / file.relative_to(home)).parent.mkdir(0o700, exist_ok=True)
                    file_system.replace_file(target, file.read_bytes())
            for plugin in plugin_data.plugin_folders(home):
                _copy_plugin(store, plugin, part, previous)
            for each in sorted(part.glob("**/"), reverse=True):
                file_system.sync_folder(each)
            file_system.replace(part, path)
        except BaseException:
            # On a full disk it would leave no room for feedback.
            shutil.rmtree(part, ignore_errors=True)
            raise
        file_system.sync_folder(folder)
        removed = [*copies, path][:-keep]
        for old in removed:
            shutil.rmtree(old)
    return Backup(path, len(digests) - len(missing), tuple(missing), tuple(removed))


def is_folder_of(home: Path, folder: Path) -> bool:
    """Return whether a folder may have a home's copies. Earlier versions wrote no id."""
    with map_home_errors(folder):
        return read_home_id(folder) in (None, read_home_id(home))


def claim_folder(store: Store, folder: Path) -> None:
    """List a folder in the home, and write the home's log and id into it. A home gets an id first.

    Raises ``InvalidInput`` if the folder has the copies of another home. That home would lose its
    copies, and a restore would take those of this one.
    """
    if not is_folder_of(store.home, folder):
        raise InvalidInput(
            f"{folder} has the backups of another home.",
            hint="Name another folder: each home needs one of its own.",
        )
    store.erasures.copy_to(folder)
    with map_home_errors(folder):
        home_id = read_home_id(store.home) or store.entropy(_ID_BYTES).hex().encode()
        for each in (store.home, folder):
            if read_home_id(each) is None:
                file_system.replace_file(each / HOME_ID, home_id)


def read_home_id(folder: Path) -> bytes | None:
    """Return the id in a home, a copy or a folder of copies; None if there is none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return (folder / HOME_ID).read_bytes()
    return None


def _copy_contents(store: Store, part: Path, previous: Path | None) -> tuple[list[str], list[str]]:
    """Copy the database and the files, and return the digests of all files and the missing ones."""
    path = part / store.database.path.name
    while True:
        digests, keys = _copy_database(store.database, path)
        missing = [each for each in digests if not _copy_blob(store.blobs, each, part, previous)]
        # A forget that destroyed a key meanwhile gave the files another, which the copy has not.
        with store.database.read_transaction() as db:
            if keys <= _read_keys(db):
                return digests, missing
        for each in part.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()


def _read_keys(db: sqlite3.Connection) -> set[str]:
    """Return the ids of all data keys."""
    if not has_table(db, "data_key"):
        return set()
    return {row["id"] for row in fetch_all(db, "select id from data_key")}


def delete_unfinished(folder: Path) -> int:
    """Delete the copies that killed programs left; return how many there were. Raises ``OSError``."""
    parts = list(folder.glob(f"copy-*{_PART}"))
    for part in parts:
        shutil.rmtree(part)
    return len(parts)


def _copy_database(database: Database, path: Path) -> tuple[list[str], set[str]]:
    """Copy the database at one moment, and return the digests of its revisions and its data keys."""
    create_file(path)
    with closing(database.open_other(path)) as copy:
        # No other connection has the file, and no empty journal is to stay beside it.
        copy.execute("pragma journal_mode=delete").fetchall()
        # Inside: an error of the copy must not name the home.
        with database.read_transaction() as db, map_home_errors(path.parent):
            db.backup(copy)
        _check_copy(copy, database.path)
        if has_table(copy, "publication"):
            copy.execute("delete from publication")
        sql = "select distinct digest from revision order by digest"
        digests, keys = [digest for (digest,) in copy.execute(sql)], _read_keys(copy)
    _sync(path)
    return digests, keys


def _check_copy(copy: sqlite3.Connection, source: Path) -> None:
    if copy.execute("pragma quick_check").fetchone()[0] != "ok":
        raise Damaged(
            f"The database {source} is damaged and was not copied.",
            hint="Run verify; keep the older copies.",
        )


def _copy_plugin(store: Store, folder: Path, copy: Path, previous: Path | None) -> None:
    """Copy the databases and files of a plugin."""
    home = store.home

    def copy_files() -> None:
        for path in plugin_data.files(folder):
            name = path.relative_to(home)
            if not (copy / name).exists():
                with suppress(FileNotFoundError):  # The plugin has just deleted it.
                    data = path.read_bytes()
                    if plugin_data.read_file(path, store.cipher) is None and previous is not None:
                        with suppress(OSError):
                            if plugin_data.read_file(previous / name, store.cipher) is not None:
                                data = (previous / name).read_bytes()
                    _write(data, name, copy, previous)

    # Most of them before the plugin has to wait.
    copy_files()
    for source in plugin_data.databases(folder):
        path = copy / source.relative_to(home)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        create_file(path)
        its_key = plugin_data.stored_key(source, store.cipher.database_key)
        # SQLite copies nothing from a connection that may write, so another one holds the lock.
        with (
            closing(plugin_data.open_database(source, its_key)) as lock,
            closing(plugin_data.open_database(source, its_key)) as db,
            closing(plugin_data.open_database(path, its_key)) as target,
        ):
            target.execute("pragma journal_mode=delete").fetchall()
            lock.execute("begin immediate")
            db.backup(target)
            _check_copy(target, source)
            copy_files()
        _sync(path)


def _copy_blob(blobs: Blobs, digest: str, copy: Path, previous: Path | None) -> bool:
    """Copy one file, and return whether it was intact in the home or in the copy before."""
    data = None
    with suppress(Damaged):
        data = blobs.read_stored(digest)
    if data is None and previous is not None:
        with suppress(Damaged, HomeError):
            data = blobs.read_stored(digest, previous)
    if data is None:
        return False
    _write(data, Path("blobs", digest[:2], digest), copy, previous)
    return True


def _write(data: bytes, name: Path, copy: Path, previous: Path | None) -> None:
    """Write a file of a copy, or share that of the copy before if it has the same bytes."""
    path = copy / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if previous is not None:
        with suppress(OSError):
            if (previous / name).read_bytes() == data:
                os.link(previous / name, path)
                return
    file_system.replace_file(path, data)


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        file_system.sync_file(file.fileno())
