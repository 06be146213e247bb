"""Checked copies of stacks for one process: downloaded once, kept until the process ends.

vLLM remembers a stack's path as long as it runs, and reads it again after the stack left its
memory. A missing folder then ends the whole server, and vLLM does not tell which names it still
uses. So copies are never deleted while the process runs; a full cache refuses new stacks and logs
that. The next process deletes what earlier ones left.

Invariants: a returned path holds exactly what its name says, in a folder that only this user can
write. A digest's folder has a whole stack. Concurrent requests for a stack share one download.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from personalpeft_vllm_resolver.bucket import Bucket
from personalpeft_vllm_resolver.settings import PREFIX, Settings
from personalpeft_vllm_resolver.sources import (
    FILES,
    Copy,
    InvalidCopy,
    MissingCopy,
    Server,
    SharedFolder,
    Source,
)

# Below vLLM's logger, so that its settings apply.
log = logging.getLogger("vllm.personalpeft_resolver")

_NAME = re.compile(r"personalpeft:([0-9a-f]{64})")
# More bytes than any file of a stack needs, with rank 512 on the largest models.
_MAX_BYTES = {FILES[0]: 1 << 20, FILES[1]: 8 << 30}
_MAX_DOWNLOADS = 4
_PROCESS_PREFIX = "process-"
_LOCK = ".lock"


class CacheFull(Exception):
    """The cache has no room for a stack."""


def parse_digest(name: str) -> str | None:
    """Return the digest in a stack's name; None for another name."""
    found = _NAME.fullmatch(name)
    return found[1] if found else None


def open_cache(settings: Settings) -> Cache:
    """Return the cache for some settings.

    Raises ``OSError``, also for wrong permissions, and ``ValueError`` for a missing package.
    """
    sources: list[Source] = []
    if settings.folder is not None:
        sources.append(SharedFolder(settings.folder))
    if settings.bucket is not None:
        sources.append(Bucket(settings.bucket, settings.timeout))
    if settings.url is not None:
        sources.append(Server(settings.url, settings.token, settings.certificate, settings.timeout))
    place = settings.cache or Path(tempfile.gettempdir()) / f"personalpeft-resolver-{os.getuid()}"
    return Cache(place, settings.cache_bytes, sources)


class Cache:
    """Up to ``max_bytes`` of stacks of this process, below a ``place`` that processes share.

    Copies come from the first of the ``sources`` with a valid one. Safe to use from several
    threads. Raises ``PermissionError`` if other users can write to the place.
    """

    def __init__(self, place: Path, max_bytes: int, sources: Sequence[Source]) -> None:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(
                f"{place} must be a folder that only this user can write ({PREFIX}CACHE)."
            )
        self._place, self._max_bytes, self._sources = place, max_bytes, sources
        # Own threads, so that unknown names do not block the threads that vLLM needs.
        self._threads = ThreadPoolExecutor(
            _MAX_DOWNLOADS, thread_name_prefix="personalpeft-resolver"
        )
        self._lock = threading.Lock()
        self._own: Path | None = None
        self._process = self._lock_file = -1
        # By the temporary folder of each copy.
        self._bytes: Counter[Path] = Counter()
        self._downloads: dict[str, Future[Path | None]] = {}

    async def find(self, name: str) -> Path | None:
        """Return ``get`` of a stack's name without blocking the loop; None for other names."""
        digest = parse_digest(name)
        if digest is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.get, digest)

    def get(self, digest: str) -> Path | None:
        """Return the folder of a stack, downloaded if needed; None, with a log line, on failure."""
        with self._lock:
            own = self._process_folder()
            if (own / digest).is_dir():
                return own / digest
            download = self._downloads.get(digest)
            if download is None:
                mine = self._downloads[digest] = Future()
        if download is not None:
            return download.result()
        path = None
        try:
            path = self._download_from_sources(digest, own)
        finally:
            with self._lock:
                del self._downloads[digest]
            mine.set_result(path)
        return path

    def close(self) -> None:
        """Delete all copies of this process. Closing twice is allowed."""
        with self._lock:
            # A forked child also runs this at exit, and must not delete its parent's copies.
            if self._own is not None and self._process == os.getpid():
                shutil.rmtree(self._own, ignore_errors=True)
                os.close(self._lock_file)
                self._own = None
                self._bytes.clear()

    def _process_folder(self) -> Path:
        """Return this process's folder, made on first use: most processes of vLLM need none."""
        if self._own is None:
            with (self._place / _LOCK).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._sweep()
                self._own = Path(tempfile.mkdtemp(prefix=_PROCESS_PREFIX, dir=self._place))
                # Locked as long as this process or a child of it runs.
                self._lock_file = os.open(self._own / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(self._lock_file, fcntl.LOCK_EX)
            self._process = os.getpid()
            atexit.register(self.close)
        return self._own

    def _sweep(self) -> None:
        for folder in self._place.glob(f"{_PROCESS_PREFIX}*"):
            try:
                with (folder / _LOCK).open("ab") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            except OSError:
                # Its process runs, or it cannot be deleted.
                continue

    def _download_from_sources(self, digest: str, own: Path) -> Path | None:
        name = f"personalpeft:{digest}"
        for source in self._sources:
            try:
                for copy in source.copies(digest):
                    try:
                        path = self._download_checked(copy, digest, own)
                        log.info("%s was downloaded from %s", name, copy.place)
                        return path
                    except MissingCopy:
                        continue
                    except (InvalidCopy, OSError) as error:
                        log.warning("%s cannot be downloaded from %s: %s", name, copy.place, error)
            except CacheFull:
                log.error(
                    "%s is not downloaded: the cache of %d bytes is full until the process ends. "
                    "Restart it, or set %sCACHE_BYTES.",
                    name,
                    self._max_bytes,
                    PREFIX,
                )
                return None
            except OSError as error:
                log.warning("a source of stacks cannot be read: %s", error)
        log.warning("%s is in no source", name)
        return None

    def _download_checked(self, copy: Copy, digest: str, own: Path) -> Path:
        temporary = Path(tempfile.mkdtemp(prefix=".", dir=own))
        try:
            lines = [f"{self._download(copy, file, temporary)}  {file}\n" for file in FILES]
            if hashlib.sha256("".join(lines).encode()).hexdigest() != digest:
                raise InvalidCopy("its digest is not the one of its name")
            temporary.rename(own / digest)
            return own / digest
        except BaseException:
            with self._lock:
                del self._bytes[temporary]
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _download(self, copy: Copy, file: str, temporary: Path) -> str:
        """Write a file of a copy, and return its SHA-256."""
        digest, remaining = hashlib.sha256(), _MAX_BYTES[file]
        with closing(copy.read(file)) as chunks, (temporary / file).open("xb") as target:
            for chunk in chunks:
                remaining -= len(chunk)
                if remaining < 0:
                    raise InvalidCopy(f"its {file} is too large")
                with self._lock:
                    if self._bytes.total() + len(chunk) > self._max_bytes:
                        raise CacheFull
                    self._bytes[temporary] += len(chunk)
                digest.update(chunk)
                target.write(chunk)
        (temporary / file).chmod(0o400)
        return digest.hexdigest()
