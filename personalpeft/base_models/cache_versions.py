"""Old versions of prepared bases: says which of them are in use, and removes those that nothing uses any more.

Invariants:

- A process that has prepared a base holds its entry until the process ends, however that happens. A held entry is never removed.
- An entry is held, made and removed by the holder of its lock alone, so none is removed between its check and its use.
- Of a base that is prepared, an entry goes that an older preparation made, or that was made from other sources at the same place,
  once nothing has used it for a week. Programs with different versions may share a cache, and an entry is quickly missed.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from personalpeft.base_models.types import Source
from personalpeft.types import canonical_digest

MANIFEST = "base.json"

_NAME = re.compile(r"(?P<key>[0-9a-f]{16})-(?P<recipe>\d+)\.(?P<facts>\d+)")
_LEFTOVER = ".tmp-"
_USE = ".use-"
_WEEK = 7 * 24 * 3600

_turn = threading.Lock()
_held: dict[tuple[int, Path], FileLock] = {}


def lock_of(entry: Path) -> FileLock:
    """Return the lock of an entry, not yet acquired."""
    return FileLock(f"{entry}.lock")


def temporary_folder(entry: Path) -> Path:
    """Return a new folder beside an entry, which is removed where its maker dies."""
    return Path(tempfile.mkdtemp(prefix=f"{entry.name}{_LEFTOVER}", dir=entry.parent))


def remove_leftovers(entry: Path) -> None:
    """Remove what dead processes left of making an entry. Only the holder of the entry's lock may call it."""
    for leftover in entry.parent.glob(f"{entry.name}{_LEFTOVER}*"):
        shutil.rmtree(leftover)


def origin_of(source: Source) -> str | None:
    """Return a digest of the place that a source has, whatever lies there; None for a source that is its own content."""
    place = {
        "package": list(source.files),
        "hub": source.repo,
        "folder": str(source.path),
        "random": None,
    }[source.kind]
    return canonical_digest([source.kind, place]) if place else None


def hold_version(entry: Path) -> None:
    """Hold an entry until this process ends. Only the holder of the entry's lock may call it. Raise ``OSError``."""
    # A child that was forked takes a hold of its own.
    key = (os.getpid(), entry)
    with _turn:
        if key in _held and Path(_held[key].lock_file).exists():
            return
        handle, path = tempfile.mkstemp(prefix=f"{entry.name}{_USE}", dir=entry.parent)
        os.close(handle)
        lock = FileLock(path)
        lock.acquire(timeout=0)
        _held[key] = lock
        atexit.register(_release, lock, os.getpid())


def remove_unused_versions(entry: Path, origin: str | None) -> None:
    """Note that an entry is used, and remove older ones of its base, and what dead processes left of any base.

    What cannot be removed stays for the next time.
    """
    with suppress(OSError):
        os.utime(entry / MANIFEST)
        now = (entry / MANIFEST).stat().st_mtime
        for folder in sorted(
            path for path in entry.parent.iterdir() if path.is_dir() and path != entry
        ):
            name, leftover, _ = folder.name.partition(_LEFTOVER)
            whose = folder.with_name(name)
            with suppress(OSError, ValueError):
                if leftover and _NAME.fullmatch(name):
                    with lock_of(whose).acquire(timeout=0):
                        remove_leftovers(whose)
                elif (
                    _is_older(folder, entry, origin)
                    and now - (folder / MANIFEST).stat().st_mtime > _WEEK
                ):
                    with lock_of(folder).acquire(timeout=0):
                        _remove_unheld(folder)


def _is_older(other: Path, entry: Path, origin: str | None) -> bool:
    """Return whether another entry was made of the same base, by an older preparation or from other sources."""
    its, ours = _NAME.fullmatch(other.name), _NAME.fullmatch(entry.name)
    if its is None or ours is None or _version(its) > _version(ours):
        return False  # No entry, or made by a newer program.
    if its["key"] == ours["key"]:
        return _version(its) < _version(ours)
    manifest = json.loads((other / MANIFEST).read_text("utf-8"))
    return origin is not None and isinstance(manifest, dict) and manifest.get("origin") == origin


def _version(name: re.Match[str]) -> tuple[int, int]:
    return int(name["recipe"]), int(name["facts"])


def _remove_unheld(entry: Path) -> None:
    for file in entry.parent.glob(f"{entry.name}{_USE}*"):
        try:
            FileLock(file).acquire(timeout=0).lock.release()
        except Timeout:
            return
        file.unlink()
    # In one step, so that no process reads half of it.
    entry.rename(temporary_folder(entry) / entry.name)
    remove_leftovers(entry)


def _release(lock: FileLock, pid: int) -> None:
    # A child that was forked has its parent's locks, and must leave them alone.
    if pid == os.getpid():
        with suppress(OSError):
            lock.release()
            Path(lock.lock_file).unlink()
