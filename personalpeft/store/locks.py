"""The write lock of a home, and leases on names.

Invariants: the operating system keeps a lock (``flock`` on an open file). So it ends with its
holder, even after a kill. The file beside it only names the holder and its status. It is believed
only while that process is alive.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from personalpeft import host
from personalpeft.errors import Busy, HomeError
from personalpeft.store.error_mapping import map_home_errors, read_only_error

_SUBCOMMAND = re.compile(r"[a-z][a-z-]{0,23}")
_POLL_SECONDS = 0.005
_HOLDER_BYTES = 1024


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The process that holds a lock: its id, its command, since when (ISO 8601, UTC), and its last
    status text.
    """

    pid: int
    command: str
    since: str
    status: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command}, since {self.since})"


class Lock:
    """A lock file with its holder's name beside it.

    The thread that holds it may take it again; no other thread may.
    """

    def __init__(self, path: Path, *, home: Path, what: str, now: Callable[[], datetime]) -> None:
        self._home = home
        self._holder_path = path.with_suffix(".holder")
        self._what = what
        self._now = now
        self._file_lock = FileLock(path, poll_interval=_POLL_SECONDS)
        self._pid = os.getpid()
        self._start_mark = host.start_mark(self._pid)
        self._since = ""

    @contextmanager
    def acquire(self, timeout: float) -> Iterator[None]:
        """Hold the lock for the block.

        Raises ``Busy``, which names the holder, after ``timeout`` seconds.
        """
        if self._pid != os.getpid():
            raise HomeError(
                f"The home {self._home} is not open in this process.", hint="Open it again."
            )
        if self._file_lock.is_locked:
            yield
            return
        # Ctrl-C may raise between any two calls here. So the release is forced, and is repeated if it
        # was interrupted. It does nothing in a thread that does not hold the lock.
        try:
            with map_home_errors(self._home):
                try:
                    self._file_lock.acquire(timeout=timeout)
                except Timeout:
                    raise self._busy_error() from None
                self._since = self._now().isoformat(timespec="seconds")
                self._holder_path.touch(mode=0o600)
                self.set_status("")
            yield
        finally:
            try:
                # It was deleted if its user is gone. Its name must not come back.
                if self._file_lock.is_locked:
                    with map_home_errors(self._home), suppress(FileNotFoundError):
                        self._write_holder("")
            finally:
                try:
                    self._file_lock.release(force=True)
                except BaseException:
                    self._file_lock.release(force=True)
                    raise

    def set_status(self, status: str) -> None:
        """Write the holder's name and status beside the lock.

        Only its holder may call it. Raises ``OSError``.
        """
        # The keys are read by processes of other versions.
        holder = {
            "pid": self._pid,
            "born": self._start_mark,
            "command": _command(),
            "since": self._since,
            "doing": status,
        }
        self._write_holder(json.dumps(holder, ensure_ascii=False))

    def _write_holder(self, text: str) -> None:
        # The old content is overwritten with the same length. Some file systems flush a file that
        # is truncated and written again. Each write would then be as slow as its commit.
        file = os.open(self._holder_path, os.O_WRONLY)
        try:
            os.write(file, text.encode(errors="replace").ljust(_HOLDER_BYTES))
        finally:
            os.close(file)

    def _busy_error(self) -> Busy:
        holder = _read_holder(self._holder_path)
        if holder is not None and holder.pid == os.getpid():
            by, hint = "another thread of this process", "Wait until it is done, and try again."
        else:
            by = str(holder) if holder else "another process"
            hint = "Wait until it is done, or end that process, and try again."
        return Busy(f"{self._what} by {by}.", hint=hint)


def learn_lease(user: str) -> str:
    """Return the name of the lease under which a user's layers and ledger are rewritten."""
    return f"learn-{user}"


def publish_lease(user: str) -> str:
    """Return the name of the lease under which a user's published files are written."""
    return f"publish-{user}"


def _describe(lease: str) -> str:
    """Return what the holder of a lease does, to be followed by its name."""
    purpose, _, user = lease.partition("-")
    match purpose:
        case "learn":
            return f"The layers of {user} are being changed"
        case "publish":
            return f"The stack of {user} is being published"
    return f"The lease {lease!r} is held"


class Leases:
    """Names that one process or thread at a time may hold, such as ``learn-ada``. Thread-safe."""

    def __init__(self, home: Path, *, now: Callable[[], datetime], read_only: bool) -> None:
        self._home = home
        self._now = now
        self._read_only = read_only
        self._mutex = threading.Lock()
        self._held: dict[str, Lock] = {}

    @contextmanager
    def acquire(self, name: str, *, timeout: float = 0.0) -> Iterator[None]:
        """Hold a name for the block against all other processes and threads.

        The system frees it when the holder dies.

        Args:
            name: The name.
            timeout: Seconds to wait for it.

        Raises:
            Busy: It is held; the message names the holder.
            HomeError: The home is read-only.
        """
        if self._read_only:
            raise read_only_error(self._home)
        folder = self._home / "locks"
        with map_home_errors(self._home):
            folder.mkdir(mode=0o700, exist_ok=True)
        # A new lock object each time: a second lease in the same thread must be refused, not
        # nested.
        lock = Lock(folder / f"{name}.lock", home=self._home, what=_describe(name), now=self._now)
        with lock.acquire(timeout):
            with self._mutex:
                self._held[name] = lock
            try:
                yield
            finally:
                with self._mutex:
                    del self._held[name]

    def set_status(self, name: str, status: str) -> None:
        """Store one short line for ``holder`` to return, if this object holds the lease.

        Not durable; never fails.
        """
        # Under the mutex: a lease that was just released must not get a status.
        with self._mutex, suppress(OSError):
            if name in self._held:
                self._held[name].set_status(status)

    def delete_files(self, user: str) -> None:
        """Delete the files of the leases on a user who is gone. None of them is held."""
        for name in (learn_lease(user), publish_lease(user)):
            for suffix in (".lock", ".holder"):
                (self._home / "locks" / f"{name}{suffix}").unlink(missing_ok=True)

    def holder(self, name: str) -> LockHolder | None:
        """Return the process that holds a name now and its status, or None.

        Reads one small file.
        """
        return _read_holder(self._home / "locks" / f"{name}.holder")


def _command() -> str:
    """Return the program and its subcommand. Further arguments may be private text."""
    program = Path(sys.argv[0]).name[:80] if sys.argv and sys.argv[0] else "python"
    subcommand = sys.argv[1] if len(sys.argv) > 1 and _SUBCOMMAND.fullmatch(sys.argv[1]) else ""
    return f"{program} {subcommand}".strip()


def _read_holder(path: Path) -> LockHolder | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        holder = LockHolder(
            int(data["pid"]), str(data["command"]), str(data["since"]), str(data.get("doing", ""))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # Empty or half-written: the lock has just changed hands.
    if not host.is_alive(holder.pid):
        return None
    # Process ids are reused: another process may have the id of one that was killed.
    return holder if data.get("born", "") in ("", host.start_mark(holder.pid)) else None
