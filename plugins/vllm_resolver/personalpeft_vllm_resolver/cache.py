"""Checked copies of stacks, for one process: pulled once, kept until the process ends.

vLLM remembers the path of a stack as long as it runs, whatever it has loaded: when a stack leaves its memory and is asked for again,
it reads the path anew, in the loop of its engine, where a folder that is gone ends the whole server. It tells nobody which
names it still knows. So nothing that was given out is ever taken away in the life of a process; instead a cache that is full takes
nothing new in, and says so. What a process leaves behind, however it ended, the next one sweeps.

Invariants: a path that is given out holds exactly what its name stands for, and lies in a folder that only this user can write to;
under a digest there is all of a stack or nothing; however many ask for a stack at once, it is pulled once.
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
    Missing,
    Server,
    SharedFolder,
    Source,
    Unfit,
)

# Beneath vLLM's own logger, so that its settings hold.
log = logging.getLogger("vllm.personalpeft_resolver")

_NAME = re.compile(r"personalpeft:([0-9a-f]{64})")
# Bytes that no file of a stack needs: rank 512 on the largest models is below.
_LARGEST = {FILES[0]: 1 << 20, FILES[1]: 8 << 30}
# So many stacks are pulled at once.
_AT_ONCE = 4
_PART = "process-"
_LOCK = ".lock"


class Full(Exception):
    """There is no room for a stack."""


def digest_in(name: str) -> str | None:
    """The digest in a name of ours; None in another's."""
    found = _NAME.fullmatch(name)
    return found[1] if found else None


def opened(settings: Settings) -> Cache:
    """The cache that the settings describe. Raises ``OSError``, ``PermissionError`` among them, and ``ValueError`` where
    something that they need is not here.
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
    """Up to ``most`` bytes of stacks of this process, below a ``place`` that others share, from the first of the ``sources`` that
    has a sound copy. Safe to use from several threads. Raises ``PermissionError`` for a place that others may write to.
    """

    def __init__(self, place: Path, most: int, sources: Sequence[Source]) -> None:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(
                f"{place} must be a folder of this user, in which nobody else can write ({PREFIX}CACHE)."
            )
        self._place, self._most, self._sources = place, most, sources
        # Threads of its own: names that do not exist shall not keep those busy that vLLM needs.
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="personalpeft-resolver")
        self._turn = threading.Lock()
        self._own: Path | None = None
        self._process = self._held = -1
        # Of each copy, under the name that it had while it was taken in.
        self._bytes: Counter[Path] = Counter()
        self._pulls: dict[str, Future[Path | None]] = {}

    async def find(self, name: str) -> Path | None:
        """As ``get``, of a stack by its name, while others go on in the loop that waits; None also for a name that is not ours."""
        digest = digest_in(name)
        if digest is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.get, digest)

    def get(self, digest: str) -> Path | None:
        """The folder of a stack, pulled where it is not there yet; None where that cannot be, which is logged."""
        with self._turn:
            own = self._part()
            if (own / digest).is_dir():
                return own / digest
            pull = self._pulls.get(digest)
            if pull is None:
                mine = self._pulls[digest] = Future()
        if pull is not None:
            return pull.result()
        path = None
        try:
            path = self._pulled(digest, own)
        finally:
            with self._turn:
                del self._pulls[digest]
            mine.set_result(path)
        return path

    def close(self) -> None:
        """Takes all of this process's copies away. Closing twice is fine."""
        with self._turn:
            # What this process forked ends with the same words, and must not take away what is read here.
            if self._own is not None and self._process == os.getpid():
                shutil.rmtree(self._own, ignore_errors=True)
                os.close(self._held)
                self._own = None
                self._bytes.clear()

    def _part(self) -> Path:
        """This process's part, made when the first stack is asked for: most of vLLM's processes never ask."""
        if self._own is None:
            with (self._place / _LOCK).open("ab") as one_at_a_time:
                fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
                self._sweep()
                self._own = Path(tempfile.mkdtemp(prefix=_PART, dir=self._place))
                # Held as long as this process is there, and what it forks.
                self._held = os.open(self._own / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(self._held, fcntl.LOCK_EX)
            self._process = os.getpid()
            atexit.register(self.close)
        return self._own

    def _sweep(self) -> None:
        for part in self._place.glob(f"{_PART}*"):
            try:
                with (part / _LOCK).open("ab") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(part)
            except OSError:
                # Its process is there, or it cannot be taken away, which stops nobody.
                continue

    def _pulled(self, digest: str, own: Path) -> Path | None:
        name = f"personalpeft:{digest}"
        for source in self._sources:
            try:
                for copy in source.copies(digest):
                    try:
                        path = self._checked(copy, digest, own)
                        log.info("%s is pulled from %s", name, copy)
                        return path
                    except Missing:
                        continue
                    except (Unfit, OSError) as error:
                        log.warning("%s cannot be had from %s: %s", name, copy, error)
            except Full:
                log.error(
                    "%s is not pulled: this process keeps its %d bytes of stacks until it ends. Restart it, or set %sCACHE_BYTES.",
                    name,
                    self._most,
                    PREFIX,
                )
                return None
            except OSError as error:
                log.warning("stacks cannot be looked for: %s", error)
        log.warning("%s is nowhere to be had", name)
        return None

    def _checked(self, copy: Copy, digest: str, own: Path) -> Path:
        half = Path(tempfile.mkdtemp(prefix=".", dir=own))
        try:
            read = [f"{self._taken_in(copy, file, half)}  {file}\n" for file in FILES]
            if hashlib.sha256("".join(read).encode()).hexdigest() != digest:
                raise Unfit("what it has is not what the name stands for")
            half.rename(own / digest)
            return own / digest
        except BaseException:
            with self._turn:
                del self._bytes[half]
            shutil.rmtree(half, ignore_errors=True)
            raise

    def _taken_in(self, copy: Copy, file: str, half: Path) -> str:
        """Writes a file of a copy, and gives its SHA-256."""
        sum_of_it, most = hashlib.sha256(), _LARGEST[file]
        with closing(copy.read(file)) as chunks, (half / file).open("xb") as target:
            for chunk in chunks:
                most -= len(chunk)
                if most < 0:
                    raise Unfit(f"its {file} is larger than one is")
                with self._turn:
                    if self._bytes.total() + len(chunk) > self._most:
                        raise Full
                    self._bytes[half] += len(chunk)
                sum_of_it.update(chunk)
                target.write(chunk)
        (half / file).chmod(0o400)
        return sum_of_it.hexdigest()
