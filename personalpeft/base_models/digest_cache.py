"""Remember the digests of large files, so that a start does not read all of them.

A seal holds a file's digest beside its size, times of change, inode and device. A file that differs
in one of these is hashed again. Writing to a file changes its ctime. No program can set it back.

Invariants:

- Only files at rest are sealed: none changed while it was hashed, or just before.
- A seal of another owner, or one that others can write, is ignored. So is a damaged one.
- A folder that cannot be written keeps no seals, and the files are hashed each time.

Threat: a program that can write the cache can write seals, and also the weights that they cover.
Seals find damage and changes by accident. ``personalpeft verify`` reads all bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from personalpeft import file_system
from personalpeft.base_models.files import hash_files

_REST_NS = 2_000_000_000  # Longer than the steps of any file system's clock.
_State = list[list[int]]


def sealed_digest(
    files: Sequence[Path], cache: Path, report: Callable[[float], None] = lambda done: None
) -> str:
    """Return the digest of files, and read them only if their seal is missing or broken.

    Args:
        files: The files, in a row.
        cache: The folder of the seals.
        report: Called with the share that is hashed.

    Returns:
        ``hash_files(files)``.

    Raises:
        WeightsError: A file cannot be read.
    """
    before = _state(files)
    if before is None:
        return hash_files(files, report)
    paths = [str(path.absolute()) for path in files]
    name = hashlib.sha256(json.dumps(paths).encode()).hexdigest()[:32]
    seal = cache / "seals" / f"{name}.json"
    about = {"paths": paths, "state": before}
    digest = _read(seal, about)
    if digest is None:
        started = time.time_ns()
        digest = hash_files(files, report)
        newest = max((max(mtime, ctime) for _, mtime, ctime, _, _ in before), default=0)
        if _state(files) == before and started - newest > _REST_NS:
            with suppress(OSError):
                seal.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                content = json.dumps({**about, "digest": digest})
                file_system.replace_file(seal, content.encode())
    return digest


def _state(files: Sequence[Path]) -> _State | None:
    """Return what a seal compares, or None where files have no time of change."""
    if not file_system.has_posix_files():
        return None
    try:
        found = [path.stat() for path in files]
    except OSError:
        return None  # Hashing names the file that cannot be read.
    return [[s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev] for s in found]


def _read(seal: Path, about: Mapping[str, object]) -> str | None:
    """Return the digest in a seal; None unless it is of these files in this state."""
    try:
        with seal.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if not (file_system.is_owner(found) and file_system.only_owner_writes(found)):
                return None
            content = json.load(file)
        digest = str(content["digest"])
        return digest if content == {**about, "digest": digest} else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
