"""Implement ``personalpeft.restore``: put a backup in place of a home.

Invariants: what was forgotten since the backup is forgotten again before the copy becomes the home.
The home is replaced in one step, after the copy is whole, verified and on the disk. Until then it
is as it was, and a kill leaves a folder that the next restore deletes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from personalpeft import host
from personalpeft.clock import Clock
from personalpeft.errors import Damaged, Forgotten, InvalidInput, NotFound
from personalpeft.runtime import Runtime
from personalpeft.settings import Settings
from personalpeft.store.backup import COPY_NAME
from personalpeft.store.erasure_log import (
    LoggedErasure,
    find_owner,
    merge_logs,
    read_tombstones,
)
from personalpeft.store.error_mapping import map_home_errors
from personalpeft.store.home import DATABASE, open_store
from personalpeft.store.integrity import verify
from personalpeft.store.locks import Lock
from personalpeft.types import Progress

# Of another process, or made again.
_LEFT_OUT = frozenset({"locks", "write.lock", "write.holder", "sessions"})


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did.

    Attributes:
        home: The restored home.
        backup: The copy that it was made of.
        forgotten: How many items and users were forgotten again.
        replaced: Where the former home lies now; None if there was none.
    """

    home: Path
    backup: Path
    forgotten: int
    replaced: Path | None

    def __str__(self) -> str:
        lines = [f"{self.home}: restored from {self.backup}"]
        if self.forgotten:
            lines.append(f"  forgotten again: {self.forgotten}, since the backup still had them")
        if self.replaced:
            lines.append(f"  the former home is {self.replaced}; delete it when nothing is missing")
        return "\n".join(lines)


def restore(
    backup: Path,
    settings: Settings,
    base: str | Path,
    *,
    replace: bool,
    forgotten_in: Sequence[Path],
    clock: Clock,
    progress: Progress,
) -> RestoreReport:
    """Implement ``personalpeft.restore``, which documents the arguments."""
    home, backup = settings.home, _newest_copy(backup.expanduser().absolute())
    exists = home.is_dir() and any(home.iterdir())
    if exists and not replace:
        raise InvalidInput(
            f"{home} is not empty.",
            hint="Restore to another folder, or allow to replace it: --replace",
        )
    part = home.with_name(f"{home.name}.restoring")
    with map_home_errors(home):
        if part.exists():
            shutil.rmtree(part)
        _copy(backup, part, progress)
        logs = (backup, backup.parent, home, *(each.expanduser() for each in forgotten_in))
        erasures = (*merge_logs(logs, part), *read_tombstones(home / DATABASE))
    progress("Forgetting", 0.0)
    count = _forget_again(part, settings, base, erasures, clock)
    _check(part, clock)
    replaced = None
    with map_home_errors(home):
        if exists:
            # Only asked for: the lock's file moves with the home.
            lock = Lock(home / "write.lock", home=home, what=f"The home {home}", now=clock.now)
            with lock.acquire(0.0):
                replaced = _free_name(home)
            host.replace(home, replaced)
            if home in backup.parents:
                backup = replaced / backup.relative_to(home)
        elif home.exists():
            home.rmdir()
        host.replace(part, home)
        host.sync_folder(home.parent)
    return RestoreReport(home, backup, count, replaced)


def _newest_copy(folder: Path) -> Path:
    """Return the folder if it is a copy of a home, or else the newest copy in it."""
    if (folder / DATABASE).is_file():
        return folder
    copies = []
    with suppress(OSError):
        copies = sorted(
            each
            for each in folder.iterdir()
            if COPY_NAME.fullmatch(each.name) and (each / DATABASE).is_file()
        )
    if not copies:
        raise NotFound(
            f"There is no backup in {folder}.",
            hint="Name a folder that `personalpeft backup` wrote.",
        )
    return copies[-1]


def _copy(backup: Path, part: Path, progress: Progress) -> None:
    """Copy the files of a backup durably. Links are not followed."""
    files = [path for path in _files(backup) if path.is_file() and not path.is_symlink()]
    for number, path in enumerate(files):
        progress("Copying", number / len(files))
        target = part / path.relative_to(backup)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("rb") as source, os.fdopen(_create(target), "wb") as copy:
            shutil.copyfileobj(source, copy)
            copy.flush()
            host.sync_file(copy.fileno())
    for folder in (part, *(path for path in part.rglob("*") if path.is_dir())):
        host.sync_folder(folder)


def _files(backup: Path) -> Iterator[Path]:
    for path in sorted(backup.iterdir()):
        if path.name in _LEFT_OUT:
            continue
        yield from sorted(path.rglob("*")) if path.is_dir() and not path.is_symlink() else [path]


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)


def _forget_again(
    part: Path,
    settings: Settings,
    base: str | Path,
    erasures: Sequence[LoggedErasure],
    clock: Clock,
) -> int:
    """Forget in a copy what was forgotten since, verify the copy, and return how much it was."""
    count = 0
    copied = Settings(part, settings.cache, settings.plugins, settings.vllm)
    with Runtime(copied, base, "auto", clock=clock) as runtime:
        for each in erasures:
            with (
                open_store(part, now=clock.now, entropy=clock.entropy, read_only=True) as store,
                store.database.read_transaction() as db,
            ):
                owner = find_owner(db, each.item)
            if owner is None:
                continue
            with suppress(Forgotten, NotFound):
                if each.kind == "user":
                    runtime.forget_user(owner)
                else:
                    runtime.user(owner, create=False).forget(each.item, rebuild=False)
                count += 1
    return count


def _check(part: Path, clock: Clock) -> None:
    """Raise ``Damaged`` if a copy is not whole."""
    with open_store(part, now=clock.now, entropy=clock.entropy) as store:
        problems = verify(store)
    if problems:
        raise Damaged(
            f"The backup has {len(problems)} problems, and nothing was restored. The first: "
            f"{problems[0].where}: {problems[0].fault}",
            hint="Restore an older copy.",
        )


def _free_name(home: Path) -> Path:
    """Return a path beside a home that does not exist."""
    numbers = (home.with_name(f"{home.name}.replaced-{number}") for number in range(1, 10_000))
    return next(path for path in numbers if not path.exists())
