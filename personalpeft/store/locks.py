"""Who may act: the writer's lock of a home, and leases on names.

Invariants: the operating system keeps the lock (``flock`` on an open file), so it ends with its holder, however that dies; the file
beside it only says who the holder is and what it does, and is believed only while the very process that it names is alive.
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

from personalpeft.errors import Busy, HomeError, InvalidInput
from personalpeft.store.error_mapping import home_faults

_LEASE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_SUBCOMMAND = re.compile(r"[a-z][a-z-]{0,23}")
_POLL_SECONDS = 0.005
_HOLDER_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock: process, the name it was started under, since when (ISO 8601, UTC), and what it last said that it
    does.
    """

    pid: int
    command: str
    since: str
    doing: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command}, since {self.since})"


class Lock:
    """One lock file, with its holder's name beside it. A thread that holds it may take it again; no other thread may."""

    def __init__(self, path: Path, *, home: Path, what: str, now: Callable[[], datetime]) -> None:
        self._home = home
        self._beside = path.with_suffix(".holder")
        self._what = what
        self._now = now
        self._file_lock = FileLock(path, poll_interval=_POLL_SECONDS)
        self._pid = os.getpid()
        self._born = _born(self._pid)
        self._since = ""

    @contextmanager
    def held(self, patience: float) -> Iterator[None]:
        """Holds the lock for the block. Raises ``Busy``, naming the holder, when ``patience`` seconds were not enough."""
        if self._file_lock.is_locked and self._pid == os.getpid():
            yield
            return
        if self._pid != os.getpid():
            raise HomeError(
                f"The home {self._home} is not open in this process.", hint="Open it again."
            )
        with home_faults(self._home):
            try:
                self._file_lock.acquire(timeout=patience)
            except Timeout:
                raise self._busy() from None
        try:
            with home_faults(self._home):
                self._since = self._now().isoformat(timespec="seconds")
                self.say("")
            yield
        finally:
            try:
                with home_faults(self._home):
                    self._unsign()
            finally:
                self._file_lock.release()

    def say(self, doing: str) -> None:
        """Signs it, with what its holder does; only whoever holds it may. Raises ``OSError``."""
        holder = {"pid": self._pid, "born": self._born, "command": _command(), "since": self._since}
        self._write_beside(json.dumps({**holder, "doing": doing}, ensure_ascii=False))

    def _unsign(self) -> None:
        self._write_beside("")

    def _write_beside(self, text: str) -> None:
        # Always the same length and over what was there: some file systems flush a file that is truncated and written again, which
        # would cost each write as much as its own commit does.
        handle = os.open(self._beside, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.write(handle, text.encode(errors="replace").ljust(_HOLDER_BYTES))
        finally:
            os.close(handle)

    def _busy(self) -> Busy:
        holder = _read_holder(self._beside)
        by = f"by {holder}" if holder else "by another process"
        return Busy(
            f"{self._what} is held {by}.",
            hint="Wait until it is done, or end that process, and try again.",
        )


class Leases:
    """Names that one process or thread at a time may hold (``learn-ada``)."""

    def __init__(self, home: Path, *, now: Callable[[], datetime]) -> None:
        self._home = home
        self._now = now
        self._turn = threading.Lock()
        self._held: dict[str, Lock] = {}

    @contextmanager
    def lease(self, name: str) -> Iterator[None]:
        """Holds the name for the block, without waiting. Raises ``Busy`` naming the holder, ``InvalidInput`` for a name that cannot be."""
        if _LEASE_NAME.fullmatch(name) is None:
            raise InvalidInput(
                f"{ascii(name)[:80]} cannot be the name of a lease.",
                hint="Use 1 to 128 of a-z, 0-9, '.', '_' and '-', starting with a letter or digit.",
            )
        folder = self._home / "locks"
        with home_faults(self._home):
            folder.mkdir(mode=0o700, exist_ok=True)
        # A lock object of its own each time: a second lease in the same thread must be refused, not nested.
        lock = Lock(
            folder / f"{name}.lock", home=self._home, what=f"The lease {name!r}", now=self._now
        )
        with lock.held(0):
            with self._turn:
                self._held[name] = lock
            try:
                yield
            finally:
                with self._turn:
                    del self._held[name]

    def say(self, name: str, doing: str) -> None:
        """Has ``holder`` tell what is done under a lease that is held here. A mark for the moment, of one short line: it never
        fails whoever does it, and of a lease that is not held here nothing is said.
        """
        # With the turn, so that nothing is said of a lease that has just been let go.
        with self._turn, suppress(OSError):
            if name in self._held:
                self._held[name].say(doing)

    def holder(self, name: str) -> Holder | None:
        """Who holds the name now, as far as can be told from beside; None: nobody."""
        return _read_holder(self._home / "locks" / f"{name}.holder")


def _command() -> str:
    """The program and, where it looks like one, its subcommand. No further arguments: they may be somebody's private text."""
    program = Path(sys.argv[0]).name[:80] if sys.argv and sys.argv[0] else "python"
    subcommand = sys.argv[1] if len(sys.argv) > 1 and _SUBCOMMAND.fullmatch(sys.argv[1]) else ""
    return f"{program} {subcommand}".strip()


def _read_holder(path: Path) -> Holder | None:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        holder = Holder(
            int(said["pid"]), str(said["command"]), str(said["since"]), str(said.get("doing", ""))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # Empty or half-written: the lock has just changed hands.
    # Numbers are given again: another process may have that of one that was killed.
    return (
        holder
        if _is_alive(holder.pid) and said.get("born", "") in ("", _born(holder.pid))
        else None
    )


def _is_alive(pid: int) -> bool:
    if os.name != "posix":
        return True  # There, signal 0 is not a question but Ctrl+C.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _born(pid: int) -> str:
    """When a process began, in ticks since the system did; empty where the system does not tell."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name before the parenthesis may hold anything, further ones too.
    return told.rpartition(")")[2].split()[19]
