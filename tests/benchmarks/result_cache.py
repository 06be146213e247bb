"""Figures that take long to get are kept one by one, so that a benchmark that was stopped goes on, and several processes
can share its work.

Invariants: a figure is a whole line of JSON, or it is not there; one process at a time works on a key, and what it holds
ends with it, however it dies.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock, Timeout

from personalpeft.errors import InvalidInput

Figures: TypeAlias = Mapping[str, Any]


class ResultCache:
    """A file of JSON lines in a folder, which is made where there is none. Each line says its ``key``."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.jsonl"
        self._locks = folder / f".{name}.locks"

    def figures(self) -> dict[str, Figures]:
        """What is kept, by key, in the order of the lines. Raises ``InvalidInput`` for a file that is something else."""
        kept: dict[str, Figures] = {}
        lines = self.path.read_text("utf-8").splitlines() if self.path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
                kept[found["key"]] = found
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidInput(
                    f"{self.path}, line {number}: this is no kept figure.",
                    hint="Name a folder that the benchmark made itself, or take this line out.",
                ) from error
        return kept

    def complete(self, keys: Iterable[str], measure: Callable[[str], Figures]) -> Iterator[str]:
        """Measures each key that is not kept and that nobody else works on, and gives it once its figures are kept."""
        self._locks.mkdir(parents=True, exist_ok=True)
        for key in keys:
            lock = FileLock(self._locks / key)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            try:
                # Read anew each time: others write too. And only under the lock, or what was just done is done again.
                if key in self.figures():
                    continue
                self._add({"key": key, **measure(key)})
            finally:
                lock.release()
                (self._locks / key).unlink(missing_ok=True)
            yield key
        with suppress(OSError):
            self._locks.rmdir()

    def _add(self, figures: Figures) -> None:
        line = json.dumps(figures, ensure_ascii=False, allow_nan=False) + "\n"
        # One write to the end of the file, which no kill and no other process can come between.
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
