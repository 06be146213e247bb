"""The cache of files that are made of bases.

Invariants:

- An entry is complete or missing: it is made in a temporary folder and renamed. Only the holder of
  its lock makes or removes it. An entry that was changed is made again.
- An entry that was opened lately stays: programs of several versions share a cache. A process may
  still read the files of a removed entry that it has mapped. Windows does not remove them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from personalpeft.base_models.digest_cache import sealed_digest
from personalpeft.base_models.files import MANIFEST, hash_files
from personalpeft.base_models.types import ModelCard
from personalpeft.errors import PersonalPeftError, WeightsError
from personalpeft.types import Json, Progress, canonical_digest, canonical_json

_log = logging.getLogger(__name__)

_ENTRY_NAME = re.compile(r"[0-9a-f]{16}-\d+\.\d+")
_LEFTOVER = ".tmp-"
_MONTH = 30 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder of the cache: facts about its source, and the SHA-256 of its files by name."""

    folder: Path
    facts: Json
    files: Mapping[str, str]


def cached_entry(
    card: ModelCard,
    key: str,
    version: str,
    cache: Path,
    make: Callable[[Path], Json | None],
    report: Progress = lambda stage, done: None,
) -> Entry:
    """Return an entry; make it if it is missing or changed.

    Args:
        card: The card of the base, for messages.
        key: The digest of what the entry is made of.
        version: Of how it is made: two numbers with a point between.
        cache: The folder of the cache.
        make: Writes the files into a new folder, and returns the facts, if there are any.
        report: Called with the stage and its progress, 0 to 1.

    Raises:
        WeightsError: It cannot be made, or the cache cannot be written.
    """
    folder = cache / "bases" / f"{key[:16]}-{version}"
    with _cache_errors(card, cache):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A read-only cache can be used.
        with suppress(OSError), _locked(folder, report):
            os.utime(folder / MANIFEST)
        entry = _read_entry(folder, key, cache)
        if entry is None:
            with _locked(folder, report):
                entry = _read_entry(folder, key, cache)
                entry = entry or _make_entry(card, key, folder, report, make)
        return entry


def _make_entry(
    card: ModelCard, key: str, folder: Path, report: Progress, make: Callable[[Path], Json | None]
) -> Entry:
    _remove_leftovers(folder)
    if folder.exists():
        _log.warning(
            "The cached copy of %s in %s was changed; it is made again.", card.name, folder
        )
    fresh = _temporary_folder(folder)
    report(f"Preparing {card.name}", 0.0)
    facts = make(fresh) or {}
    files = {path.name: hash_files([path]) for path in sorted(fresh.iterdir())}
    content = {"source": key, "files": files, "facts": facts}
    sealed = {**content, "seal": canonical_digest(content)}
    (fresh / MANIFEST).write_text(canonical_json(sealed), "utf-8")
    if folder.exists():
        folder.rename(_temporary_folder(folder) / "changed")
    fresh.rename(folder)
    _remove_leftovers(folder)
    report(f"Preparing {card.name}", 1.0)
    return Entry(folder, facts, files)


def find_changed_files(cache: Path) -> list[Path]:
    """Return the prepared files that differ from their manifests. Reads all bytes."""
    changed = []
    for entry in sorted((cache / "bases").glob("*")):
        with suppress(FileNotFoundError):
            if _ENTRY_NAME.fullmatch(entry.name) and entry.is_dir():
                content = _read_manifest(entry)
                if content is None:
                    changed.append(entry / MANIFEST)
                    continue
                changed += [
                    entry / name
                    for name, digest in content["files"].items()
                    if not (entry / name).is_file() or hash_files([entry / name]) != digest
                ]
    return changed


def collect_bases(cache: Path, *, dry_run: bool = False) -> list[int]:
    """Remove bases that were not opened for 30 days, and what killed processes left of any.

    What another process makes or cannot give up stays until the next call. With ``dry_run`` nothing
    is removed. Return the bytes of each folder.
    """
    bases = cache / "bases"
    try:
        # The file system's time, since it is compared with a file's.
        with tempfile.TemporaryFile(dir=bases) as file:
            before = os.fstat(file.fileno()).st_mtime - _MONTH
    except OSError:
        return []
    sizes = []
    for name in sorted({path.name.partition(_LEFTOVER)[0] for path in bases.iterdir()}):
        entry = bases / name
        if _ENTRY_NAME.fullmatch(name):
            with suppress(OSError), FileLock(f"{entry}.lock").acquire(timeout=0):
                manifest = entry / MANIFEST
                is_unused = manifest.exists() and manifest.stat().st_mtime < before
                removed = [*_leftovers(entry), *([entry] if is_unused else [])]
                sizes += [_size(folder) for folder in removed]
                if not dry_run:
                    if is_unused:
                        # One step, so that no process reads half an entry.
                        entry.rename(_temporary_folder(entry) / name)
                    _remove_leftovers(entry)
    return sizes


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return an entry's manifest unless it is missing or changed."""
    try:
        content = json.loads((folder / MANIFEST).read_text("utf-8"))
        seal = content.pop("seal")
        return content if seal == canonical_digest(content) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _read_entry(folder: Path, key: str, cache: Path) -> Entry | None:
    """Return an entry unless it is missing, incomplete or changed."""
    content = _read_manifest(folder)
    if content is None or content["source"] != key:
        return None
    files = content["files"]
    try:
        if {path.name for path in folder.iterdir()} != {MANIFEST, *files}:
            return None
    except FileNotFoundError:
        return None  # Another process has removed it.
    if any(sealed_digest([folder / name], cache) != digest for name, digest in files.items()):
        return None
    return Entry(folder, content["facts"], files)


def _locked(folder: Path, report: Progress) -> AbstractContextManager[object]:
    """Lock an entry; the system releases the lock of a process that dies."""
    lock = FileLock(f"{folder}.lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        report("Waiting for another process that prepares the same base", 0.0)
        return lock.acquire()


@contextmanager
def _cache_errors(card: ModelCard, cache: Path) -> Iterator[None]:
    try:
        yield
    except PersonalPeftError:
        raise
    # tokenizers raises a plain Exception, and transformers errors of its own, for files of strangers.
    except Exception as error:
        raise WeightsError(
            f"{card.name} cannot be prepared in {cache}: {error}.",
            hint="Make room there, or set PERSONALPEFT_CACHE to a folder that can be written. "
            "This version of transformers or gguf may also not know this kind of model.",
        ) from error


def _temporary_folder(entry: Path) -> Path:
    """Make a folder beside an entry. Later calls remove it if this process dies."""
    return Path(tempfile.mkdtemp(prefix=f"{entry.name}{_LEFTOVER}", dir=entry.parent))


def _leftovers(entry: Path) -> Iterator[Path]:
    return entry.parent.glob(f"{entry.name}{_LEFTOVER}*")


def _remove_leftovers(entry: Path) -> None:
    """Remove temporary folders of dead processes. The caller holds the entry's lock."""
    for leftover in _leftovers(entry):
        shutil.rmtree(leftover)
