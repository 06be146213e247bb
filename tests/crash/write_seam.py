"""Ends or fails a program at its n-th write, where there is no strace.

It replaces the functions of ``os`` that change files, their names or their durability, and the
files that ``io.open`` opens for writing. An interrupted write of bytes leaves their first half. It
does not see what SQLite and other C code write: between two of their own calls such programs are
not interrupted.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

SETTING = "PERSONALPEFT_CRASH_SEAM"
"""The environment variable that ``install`` reads: an effect and a number, such as "kill 7"."""
KILL, FAIL = "kill", "fail"
KILLED = 9
"""The exit status of a killed program."""
_CALLS = ("fsync", "write", "rename", "replace", "link", "unlink", "rmdir", "mkdir", "utime")


class WriteSeam:
    """Counts the writes of this program below a folder, and interrupts one of them."""

    def __init__(self, folder: Path) -> None:
        self.count = 0
        self._folder = folder
        self._lock = threading.Lock()
        self._effect, _, number = os.environ.get(SETTING, "").partition(" ")
        self._number = int(number or 0)

    def install(self) -> None:
        """Replace the functions of ``os``."""
        for name in _CALLS:
            setattr(os, name, self._interrupting(getattr(os, name)))
        # os.fdopen and pathlib call it.
        io.open = self._opening(io.open)  # type: ignore[assignment]

    def _interrupting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def interrupt_or_call(what: Any, *more: Any, **options: Any) -> Any:
            if self._is_ours(what):
                self.interrupt()
            return call(what, *more, **options)

        return interrupt_or_call

    def _opening(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def open_file(what: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
            file = call(what, mode, *more, **options)
            return (
                _SeamFile(file, self) if set(mode) & set("wax+") and self._is_ours(what) else file
            )

        return open_file

    def interrupt(self, first: Callable[[], object] = lambda: None) -> None:
        """Count a write. End or fail it if it is the wanted one, after what comes ``first``."""
        with self._lock:
            self.count += 1
            is_wanted = self.count == self._number
        if not is_wanted:
            return
        first()
        if self._effect == KILL:
            os._exit(KILLED)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _is_ours(self, what: Any) -> bool:
        """Return whether a path or a descriptor is that of a file in the folder, as far as known."""
        if isinstance(what, int):
            mode = os.fstat(what).st_mode
            return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
        # A relative name is one in an open folder.
        path = Path(what)
        return not path.is_absolute() or path.is_relative_to(self._folder)


class _SeamFile:
    """A file that is open for writing, whose writes the seam interrupts in their middle."""

    def __init__(self, file: Any, seam: WriteSeam) -> None:
        self._file, self._seam = file, seam

    def write(self, data: Any) -> int:
        self._seam.interrupt(lambda: (self._file.write(data[: len(data) // 2]), self._file.flush()))
        count: int = self._file.write(data)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _SeamFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def __iter__(self) -> Any:
        return iter(self._file)
