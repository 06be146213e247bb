"""Put a backup in place of a home.

Invariants: what was forgotten since the backup is forgotten again before the copy becomes the home.
The home is as it was until the copy is verified and on the disk. An error before that leaves
nothing, and a kill leaves a folder that the next restore deletes. A kill later loses nothing: see
``store.replacement``.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from personalpeft import file_system
from personalpeft.adapters.formats.published import PublishedSubfolder
from personalpeft.arguments import check_path
from personalpeft.clock import SYSTEM, Clock
from personalpeft.errors import (
    Damaged,
    Forgotten,
    HomeError,
    InvalidInput,
    MissingPackage,
    NotFound,
)
from personalpeft.formatting import pluralize
from personalpeft.publishing import PUBLISHED
from personalpeft.runtime import Runtime
from personalpeft.settings import Settings, resolve
from personalpeft.store import erasure_log, replacement
from personalpeft.store.backup import COPY_NAME, HOME_ID, is_folder_of, read_home_id
from personalpeft.store.blobs import DIGEST
from personalpeft.store.certificate_keys import CERTIFICATE_KEYS
from personalpeft.store.database import Row, open_connection
from personalpeft.store.erasure_log import LOG, ErasureLog, LoggedErasure
from personalpeft.store.error_mapping import map_home_errors, sqlite3
from personalpeft.store.file_cipher import FileCipher
from personalpeft.store.gc import delete_unnamed_blobs
from personalpeft.store.home import DATABASE, open_store
from personalpeft.store.home_keys import ENCRYPTION, HomeKeys, load_keys
from personalpeft.store.integrity import find_lost_blobs, verify_database
from personalpeft.store.locks import Lock
from personalpeft.store.maintenance import RESTORED, Maintenance
from personalpeft.store.publications import read_publications
from personalpeft.store.reencryption import open_alone
from personalpeft.store.store import Store
from personalpeft.types import DEFAULT_BASE, Progress
from personalpeft.user import User

_T = TypeVar("_T")

# Of another process, or made again.
_LEFT_OUT = frozenset({"locks", "write.lock", "write.holder", "sessions"})
_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did.

    Attributes:
        home: The restored home.
        backup: The copy that it was made of.
        forgotten: How many items and users were forgotten again.
        replaced: Where the former home lies now; None if there was none.
        lost_encryption: Whether the home was encrypted and the backup is not.
        missing: The digests of adapter files that are missing or damaged in the backup.
        unreadable: How many lines of logs of forgotten items are damaged.
    """

    home: Path
    backup: Path
    forgotten: int
    replaced: Path | None
    lost_encryption: bool = False
    missing: tuple[str, ...] = ()
    unreadable: int = 0

    def __str__(self) -> str:
        lines = [f"{self.home}: restored from {self.backup}"]
        if self.forgotten:
            lines.append(f"  forgotten again: {self.forgotten}, since the backup still had them")
        if self.unreadable:
            lines.append(
                f"  damaged in {LOG}: {pluralize(self.unreadable, 'line')}; what they name may be "
                "back, unless another log has it: --forgotten-in"
            )
        if self.missing:
            lost = pluralize(len(self.missing), "adapter")
            lines.append(f"  missing or damaged: {lost}; build again: personalpeft verify --repair")
        if self.replaced:
            lines.append(f"  the former home is {self.replaced}; delete it when nothing is missing")
        if self.lost_encryption:
            lines.append("  the backup is from before the home was encrypted: personalpeft encrypt")
        return "\n".join(lines)


def restore(
    backup: str | Path,
    home: str | Path | None = None,
    base: str | Path = DEFAULT_BASE,
    *,
    replace: bool = False,
    forgotten_in: Sequence[str | Path] = (),
    passphrase: str | None = None,
    clock: Clock | None = None,
    progress: Progress = lambda stage, done: None,
) -> RestoreReport:
    """Put a backup in place of a home. What was forgotten since is forgotten again first.

    What was forgotten stands in ``forgotten.jsonl`` in the home and beside its backups. Both are
    read, as far as they are there. Loads no model.

    Args:
        backup: A copy that ``Maintenance.back_up`` made, or a folder of them, for the newest.
        home: The home to restore. Defaults to ``PERSONALPEFT_HOME``, else the platform's data
            folder.
        base: Ignored, since a restore needs no base.
        replace: Whether a home that is there may be replaced. It is kept beside the new one.
        forgotten_in: More folders with a ``forgotten.jsonl``, or with a newer database.
        passphrase: The passphrase of the backup, as for ``open``.
        clock: Source of time and randomness. Defaults to the system's.
        progress: Called with a stage and the share of it that is done, 0 to 1.

    Returns:
        What was done.

    Raises:
        NotFound: There is no backup.
        InvalidInput: The home is not empty, or is a mount point.
        Damaged: The database of the backup or in ``forgotten_in`` is not whole. Nothing was
            restored.
        Busy: Another program has the home open.
        HomeError: The home cannot be written, or a database in ``forgotten_in`` cannot be opened.
    """
    settings, clock = resolve(home, os.environ, passphrase), clock or SYSTEM
    # A link to a home is kept: what is replaced is the folder that it leads to.
    home = Path(os.path.realpath(settings.home))
    backup = _newest_copy(check_path("backup", backup))
    if not (backup / DATABASE).stat().st_size:
        raise _damaged_backup(backup)
    with map_home_errors(home):
        replacement.finish_replacement(home)
        exists = home.is_dir() and any(home.iterdir())
    if exists and not replace:
        raise InvalidInput(
            f"{home} is not empty.",
            hint="Restore to another folder, or allow to replace it: --replace",
        )
    if os.path.ismount(home):
        raise InvalidInput(
            f"{home} is the root of a file system, such as a container's volume, and cannot be "
            "renamed.",
            hint=f"Restore to a folder in it, and use that as home: {home / 'home'}",
        )
    others = [check_path("forgotten_in", each) for each in forgotten_in]
    for folder in others:
        if not any((folder / name).is_file() for name in (LOG, DATABASE)):
            raise NotFound(
                f"There is neither {LOG} nor {DATABASE} in {folder}.",
                hint="Name a home or a folder of backups.",
            )
    erased_there = [each for folder in others for each in _erased_in(folder, settings)]
    part, keys = replacement.unfinished_folder(home), None
    with suppress(HomeError, MissingPackage):  # Of a home that is encrypted, if they can be had.
        keys = load_keys(home, settings.keys)
    if exists:
        _check_unused(home, keys, clock)
    with ExitStack() as on_error:
        # It may have what was forgotten since the backup.
        on_error.callback(shutil.rmtree, part, ignore_errors=True)
        with map_home_errors(home):
            for left in (part, *replacement.new_folders(home).values()):
                if left.exists():
                    shutil.rmtree(left)
            _copy(backup, part, progress)
            logs = tuple(dict.fromkeys((backup, backup.parent, home, *others)))
            erasures = (*erasure_log.merge_logs(logs, part), *erased_there)
            unreadable = sum(map(erasure_log.count_unreadable_lines, logs))
            _keep_home_id(part, backup, home)
            # What is replaced may be damaged.
            with suppress(sqlite3.Error):
                erasures = (*erasures, *_read_database(home, keys, erasure_log.read_tombstones))
        progress("Forgetting", 0.0)
        try:
            copy = _open(part, settings, clock)
        except HomeError as error:
            if isinstance(error.__cause__, Damaged):
                raise _damaged_backup(backup) from error
            raise
        with copy as store:
            _keep_keys(home, keys, store)
            Maintenance(store).write_note(RESTORED, clock.now().isoformat())
            owners = erasure_log.find_owners(store.database, erasures)
        count = _forget_again(part, settings, erasures, owners, clock)
        with _open(part, settings, clock) as store:
            published: list[Row] = []
            with suppress(sqlite3.Error):
                published = _read_database(home, keys, read_publications)
            unpublished = store.publications.take_over(published)
            missing = _check(store)
        replaced = None
        with map_home_errors(home):
            folders = ErasureLog(home).folders()
            if COPY_NAME.fullmatch(backup.name):
                folders = (*folders, backup.parent)
            ErasureLog(part).list_folders(folders)
            if exists:
                _check_unused(home, keys, clock)
                replaced = replacement.replace_home(part, home)
                _bring_backups(replaced, home, folders)
            else:
                if home.exists():
                    home.rmdir()
                file_system.replace(part, home)
                file_system.sync_folder(home.parent)
        on_error.pop_all()
    for each in unpublished:
        with suppress(OSError):
            PublishedSubfolder(Path(each["folder"])).remove(each["digest"])
    with map_home_errors(home):
        # What only another folder listed as forgotten is listed beside all backups from now on.
        log = ErasureLog(home)
        log.append(*log.read())
    if replaced is not None and home in backup.parents and not backup.exists():
        backup = replaced / backup.relative_to(home)
    lost = (replaced or home).joinpath(ENCRYPTION).exists() and not (home / ENCRYPTION).exists()
    return RestoreReport(home, backup, count, replaced, lost, missing, unreadable)


def _damaged_backup(backup: Path) -> Damaged:
    return Damaged(
        f"The database of the backup {backup} is damaged, and nothing was restored.",
        hint="Restore an older copy.",
    )


def _check_unused(home: Path, keys: HomeKeys | None, clock: Clock) -> None:
    """Raise ``Busy`` if another program has a home open: its writes would go to the former home.

    This is only asked, and nothing is held: the files move with the home.
    """
    lock = Lock(home / "write.lock", home=home, what=f"The home {home} is held", now=clock.now)
    with lock.acquire(0.0), suppress(Damaged, HomeError), map_home_errors(home):
        open_alone(home / DATABASE, keys.database if keys else None).close()


def _bring_backups(former: Path, home: Path, folders: Sequence[Path]) -> None:
    """Move the folders of backups that lay in a home from the former home into the new one.

    The former home is deleted some day. What cannot be moved stays in it.
    """
    for folder in folders:
        if home in folder.parents:
            source = former / folder.relative_to(home)
            with suppress(OSError, HomeError):
                if source.is_dir() and not folder.exists() and is_folder_of(home, source):
                    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    file_system.replace(source, folder)


def _newest_copy(folder: Path) -> Path:
    """Return the folder if it is a copy of a home, or else the newest copy in it."""
    if (folder / DATABASE).is_file():
        return folder
    databases = folder.glob(f"*/{DATABASE}")
    copies = sorted(each.parent for each in databases if COPY_NAME.fullmatch(each.parent.name))
    if not copies:
        raise NotFound(
            f"There is no backup in {folder}.",
            hint="Name a folder that `personalpeft backup` wrote.",
        )
    return copies[-1]


def _copy(backup: Path, part: Path, progress: Progress) -> None:
    """Copy the files of a backup durably. Links are not followed.

    Hidden files, and others among the adapters, are of programs that show or copy folders.
    """
    files = [
        path
        for path in sorted(backup.rglob("*"))
        if path.relative_to(backup).parts[0] not in _LEFT_OUT
        and (path.relative_to(backup).parts[0] != "blobs" or DIGEST.fullmatch(path.name))
        and not path.name.startswith(".")
        and path.is_file()
        and not path.is_symlink()
    ]
    for number, path in enumerate(files):
        progress("Copying", number / len(files))
        target = part / path.relative_to(backup)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("rb") as source, file_system.create_file(target) as copy:
            shutil.copyfileobj(source, copy)
    for folder in (part, *(path for path in part.rglob("*") if path.is_dir())):
        file_system.sync_folder(folder)


def _forget_again(
    part: Path,
    settings: Settings,
    erasures: Sequence[LoggedErasure],
    owners: Mapping[str, Iterable[str]],
    clock: Clock,
) -> int:
    """Forget in a copy what was forgotten since, and return how much it was."""
    count = 0
    # To forget needs no base: a new machine may not have it yet.
    with Runtime(dataclasses.replace(settings, home=part), "fake", "fake", clock=clock) as runtime:
        for each in erasures:
            for owner in sorted(owners[each.owner_key]):
                # An earlier one may have erased it as well.
                with suppress(Forgotten, NotFound):
                    if each.kind == "user":
                        runtime.forget_user(owner)
                        count += 1
                        continue
                    user = runtime.user(owner, create=False)
                    for name in _names_of(each, user):
                        user.forget(name, rebuild=False)
                        count += 1
    return count


def _names_of(erasure: LoggedErasure, user: User) -> list[str]:
    """Return what to forget of a user: the item, or the layer if it is there."""
    if erasure.kind == "item":
        return [erasure.name]
    return [each.layer for each in user.revisions() if each.at.isoformat() == erasure.name][:1]


def _check(store: Store) -> tuple[str, ...]:
    """Return the adapter files that a copy lacks. Raise ``Damaged`` if its database is not whole.

    What no revision in it names is deleted first. A lost adapter may be built again from the
    ledger, so it does not hold back what all users said.
    """
    delete_unnamed_blobs(store)
    if problems := verify_database(store):
        raise Damaged(
            f"The backup has {len(problems)} problems, and nothing was restored. The first: "
            f"{problems[0].where}: {problems[0].fault}",
            hint="Restore an older copy.",
        )
    return tuple(each.digest for each in find_lost_blobs(store))


def _open(part: Path, settings: Settings, clock: Clock) -> Store:
    return open_store(part, now=clock.now, entropy=clock.entropy, keys=settings.keys)


def _erased_in(folder: Path, settings: Settings) -> tuple[LoggedErasure, ...]:
    """Return what the database in a folder names as forgotten, if it has one.

    Raises ``HomeError``, ``Damaged`` or ``MissingPackage`` if it cannot be read: the caller named
    the folder lest something come back.
    """
    if not (folder / DATABASE).is_file():
        return ()
    with map_home_errors(folder):
        keys = load_keys(folder, settings.keys)
        return _read_database(folder, keys, erasure_log.read_tombstones)


def _read_database(
    folder: Path, keys: HomeKeys | None, read: Callable[[sqlite3.Connection], _T]
) -> _T:
    """Return what a function reads from the database in a folder. Raises ``sqlite3.Error``."""
    path, key = folder / DATABASE, keys.database if keys else None
    with closing(open_connection(path, "mode=ro", timeout=_TIMEOUT, key=key)) as db:
        return read(db)


def _keep_home_id(part: Path, backup: Path, home: Path) -> None:
    """Give a restored home the id of its folder of backups, if the copy is from before there was one.

    Without it that folder would be of another home.
    """
    if read_home_id(part) is None:
        is_copy = COPY_NAME.fullmatch(backup.name) is not None
        home_id = (read_home_id(backup.parent) if is_copy else None) or read_home_id(home)
        if home_id is not None:
            file_system.replace_file(part / HOME_ID, home_id)


def _keep_keys(home: Path, keys: HomeKeys | None, store: Store) -> None:
    """Copy into a restored home what the former one signs and publishes with.

    The backup may have an older key of certificates. It has no name of published folders.
    """
    if keys is None and (home / ENCRYPTION).exists():
        return
    former = FileCipher(store.database, keys, store.entropy)
    for path in (Path(CERTIFICATE_KEYS), Path("notes", f"{PUBLISHED}.json")):
        with map_home_errors(store.home), suppress(FileNotFoundError, NotADirectoryError, Damaged):
            data = former.read_file(home / path)
            (store.home / path).parent.mkdir(mode=0o700, exist_ok=True)
            store.cipher.write_file(store.home / path, data)
