"""Cache slow measurements, so that a run can resume and several processes share the work.

Invariants: a result is a whole line of JSON or missing. One process at a time works on a key. Its
claim ends with the process.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock, Timeout

from personalpeft.errors import InvalidInput

Figures: TypeAlias = Mapping[str, Any]


def make_key(*parts: object) -> str:
    """Return a key that can be the name of a file."""
    return re.sub(r"[^\w.]+", "-", "-".join(map(str, parts)))


class ResultCache:
    """A file of JSON lines in a folder, each with its ``key``. The folder is created if missing."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.jsonl"
        self._locks = folder / f".{name}.locks"

    def figures(self) -> dict[str, Figures]:
        """Return the cached results by key, in the order of the lines.

        Raises:
            InvalidInput: The file is something else.
        """
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
        """Measure each key that is neither cached nor claimed; yield it once cached."""
        self._locks.mkdir(parents=True, exist_ok=True)
        for key in keys:
            lock = FileLock(self._locks / key)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            try:
                # Read again each time, since others write too; under the lock, so that finished
                # work is not repeated.
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
        # One append, which is atomic against kills and other processes.
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
