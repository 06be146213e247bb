"""Cache slow measurements, so that a run can resume and several processes share the work.

Invariants: a result is a whole line of JSON or missing. One process at a time works on a key. Its
claim ends with the process.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from filelock import FileLock, Timeout

from personalpeft.errors import InvalidInput

Figures: TypeAlias = Mapping[str, Any]
T = TypeVar("T")


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

    def complete(
        self,
        work: Mapping[str, T],
        measure: Callable[[T, float], Figures],
        done: Callable[[T, Figures], None] = lambda item, figures: None,
    ) -> dict[str, Figures]:
        """Measure each item whose key is neither cached nor claimed.

        Args:
            work: The items by key.
            measure: Returns the figures of an item. It also gets the share of the items before it.
            done: Called with each item that was measured, once its figures are cached.

        Returns:
            The figures of all items that are cached now, in their order.
        """
        self._locks.mkdir(parents=True, exist_ok=True)
        for place, (key, item) in enumerate(work.items()):
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
                self._add({"key": key, **measure(item, place / len(work))})
            finally:
                lock.release()
                (self._locks / key).unlink(missing_ok=True)
            done(item, self.figures()[key])
        with suppress(OSError):
            self._locks.rmdir()
        kept = self.figures()
        return {key: kept[key] for key in work if key in kept}

    def _add(self, figures: Figures) -> None:
        line = json.dumps(figures, ensure_ascii=False, allow_nan=False) + "\n"
        # One append, which is atomic against kills and other processes.
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
