"""Files as all systems have them: durable, private and temporary ones.

Each function has a plain fallback for a feature that a system lacks.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import IO

_DIGEST = hashlib.sha256().digest_size  # bytes
# The codes of "access denied" and "sharing violation", and how often a rename is tried again.
_IN_USE = (5, 32)
_RENAME_TRIES, _RENAME_PAUSE = 20, 0.02
_NO_WINDOWS_NAME = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?|.*\.")
# Of the names of temporary folders. No other program's have it.
_TEMPORARY = "personalpeft-private-"
# Characters of a file's name in that of its unfinished one.
_PREFIX_LENGTH = 12


def shared_memory() -> Path | None:
    """Return a folder in memory, or None on a system without one."""
    folder = Path("/dev/shm")
    return folder if os.access(folder, os.W_OK) else None


@contextmanager
def temporary_file(name: str) -> Iterator[Path]:
    """Yield a path to write a file to and to read it by. The file is deleted at the end.

    On Linux it lies in memory under no name of its own, so a killed process leaves nothing of it.
    Elsewhere it lies in a ``temporary_folder``. Only this process can open the path.
    """
    handle = -1
    with suppress(AttributeError, OSError):
        handle = os.memfd_create(name)
    path = Path(f"/proc/self/fd/{handle}")
    try:
        if path.exists():
            yield path
            return
    finally:
        if handle >= 0:
            os.close(handle)
    with temporary_folder() as folder:
        yield folder / name


@contextmanager
def temporary_folder(size: int = 1 << 28) -> Iterator[Path]:
    """Yield a new folder that only this account can read. It is deleted at the end.

    It lies in memory where there is room for ``size`` bytes, by default the files of an adapter.
    ``remove_leftover_folders`` deletes what a killed process leaves of one. Raises ``OSError``.
    """
    memory = shared_memory()
    if memory is not None and shutil.disk_usage(memory).free < size:
        memory = None
    folder, lock = _make_locked_folder(memory)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def remove_leftover_folders() -> None:
    """Delete the temporary folders of processes that were killed. It never fails.

    Windows has no locks of folders, which tell a living process. There they stay.
    """
    # A system may have no folder for temporary files.
    with suppress(OSError):
        for parent in filter(None, (shared_memory(), Path(tempfile.gettempdir()))):
            for folder in parent.glob(f"{_TEMPORARY}*"):
                lock = _lock_folder(folder, wait=False)
                if lock is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(lock)


def _make_locked_folder(parent: Path | None) -> tuple[Path, int | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=parent))
        lock = _lock_folder(folder, wait=True)
        if folder.exists():
            return folder, lock
        # Another process took it for a leftover before it was locked.
        if lock is not None:
            os.close(lock)


def _lock_folder(folder: Path, *, wait: bool) -> int | None:
    """Return a descriptor that locks a folder of this account, or None if that cannot be had.

    The system releases the lock when the process ends.
    """
    with suppress(ImportError, AttributeError, OSError):
        import fcntl

        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_owner(os.fstat(handle)):
                return handle
        os.close(handle)
    return None


def has_posix_files() -> bool:
    """Return whether files have an owner, modes and a time of change. Those of Windows do not."""
    return hasattr(os, "geteuid")


def is_owner(status: os.stat_result) -> bool:
    """Return whether a file belongs to this account."""
    return not has_posix_files() or status.st_uid == os.geteuid()


def only_owner_writes(status: os.stat_result) -> bool:
    """Return whether no other account can write to a file."""
    return not has_posix_files() or not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def only_owner_reads(status: os.stat_result) -> bool:
    """Return whether no other account can read a file or write to it."""
    return not has_posix_files() or not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def all_can_replace_in(status: os.stat_result) -> bool:
    """Return whether every account can replace the files in a folder."""
    sticky = status.st_mode & (stat.S_IWOTH | stat.S_ISVTX)
    return has_posix_files() and sticky == stat.S_IWOTH


def sync_file(handle: int) -> None:
    """Flush the bytes of a file that is open for writing to the disk."""
    with suppress(ImportError, OSError):
        import fcntl

        # On macOS plain fsync leaves the bytes in the drive's own cache.
        if full := getattr(fcntl, "F_FULLFSYNC", None):
            fcntl.fcntl(handle, full)
            return
    os.fsync(handle)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows cannot open a folder. Its file system journals renames.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def to_folder_name(name: str) -> str:
    """Return the name of a folder for a name that begins with a letter or digit.

    Windows drops a final dot, and has devices such as ``con`` and ``aux.x``.
    """
    if has_posix_files() or _NO_WINDOWS_NAME.fullmatch(name) is None:
        return name
    return f"_{name}_"


def from_folder_name(folder: str) -> str:
    """Return the name that ``to_folder_name`` got."""
    return folder[1:-1] if folder.startswith("_") else folder


def is_in_use(error: OSError) -> bool:
    """Return whether Windows refused a change of a file that a program may have open."""
    return getattr(error, "winerror", None) in _IN_USE


def replace(source: Path, target: Path) -> None:
    """Rename a file over another. Raises ``OSError``.

    Windows refuses that while a program reads the target, so it is tried for a moment.
    """
    for _ in range(_RENAME_TRIES - 1):
        try:
            source.replace(target)
            return
        except OSError as error:
            if not is_in_use(error):
                raise
        time.sleep(_RENAME_PAUSE)
    source.replace(target)


@contextmanager
def create_file(target: Path) -> Iterator[IO[bytes]]:
    """Open a new file that gets its name when it is whole and on the disk. Mode 0600.

    On Linux a killed process leaves nothing of it. Elsewhere it leaves a file ``.*.part``. Raises
    ``OSError``.
    """
    handle = -1
    with suppress(AttributeError, OSError):
        handle = os.open(target.parent, os.O_TMPFILE | os.O_RDWR, 0o600)
    if handle == -1:
        with _replacing(target, ".new-") as file:
            yield file
        return
    with os.fdopen(handle, "wb") as file:
        yield file
        file.flush()
        sync_file(handle)
        # With a folder given, the link is followed to the file that has no name yet.
        os.link(f"/proc/self/fd/{handle}", target, src_dir_fd=handle, follow_symlinks=True)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file durably: readers see the old one or the new. Mode 0600. Raises ``OSError``."""
    with _replacing(path, f".{path.name[:_PREFIX_LENGTH]}-") as file:
        file.write(data)


@contextmanager
def _replacing(target: Path, prefix: str) -> Iterator[IO[bytes]]:
    """Open a partial file, which replaces the target when it is whole and on the disk."""
    # The mode of a file made by mkstemp is 0600 from the start.
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=prefix, suffix=".part")
    part = target.with_name(PurePath(name).name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            sync_file(file.fileno())
        replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def unfinished_files(path: Path) -> list[Path]:
    """Return the files that ``replace_file`` calls for this path have not finished."""
    return list(path.parent.glob(f".{path.name[:_PREFIX_LENGTH]}-*.part"))


def write_file_atomically(path: Path, data: bytes) -> None:
    """Write a file as ``replace_file``, in a folder that need not exist yet. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)


def write_checked_file(path: Path, data: bytes) -> None:
    """Write a file for ``read_checked_file``. Raises ``OSError``."""
    write_file_atomically(path, hashlib.sha256(data).digest() + data)


def read_checked_file(path: Path) -> bytes | None:
    """Return what was written, or None if the file is absent or damaged. Raises ``OSError``."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, data = content[:_DIGEST], content[_DIGEST:]
    return data if hashlib.sha256(data).digest() == digest else None
