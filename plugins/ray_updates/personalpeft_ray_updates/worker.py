"""What runs in a worker process: the home is opened once, the base loaded once, and users learn there as they are handed out.

Invariant: a worker keeps nothing that the home does not have, so it may be lost at any moment: the system frees the leases of
its users with it, and whoever learns for them next goes on from what was saved, or finds that all was published.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import personalpeft
from personalpeft import LearnReport, PersonalPeftError, Runtime

# Seconds between two tries to get a lease that a lost worker may just be letting go of.
_AGAIN = 0.2


@dataclass(frozen=True, slots=True)
class Opening:
    """How to open the home from any process of this machine as the caller would: from the same folder, with the same settings."""

    home: str | Path | None
    base: str | Path
    backend: str
    folder: str
    environment: Mapping[str, str]

    @classmethod
    def here(cls, home: str | Path | None, base: str | Path, backend: str) -> Opening:
        """As this process opens it."""
        ours = {
            name: value for name, value in os.environ.items() if name.startswith("PERSONALPEFT_")
        }
        return cls(home, base, backend, str(Path.cwd()), ours)

    def to_look(self) -> Runtime:
        """Opened in this process, to read only; makes no home. Raises ``HomeError``, ``NotFound``, ``CardError``, ``InvalidInput``."""
        return personalpeft.open(self.home, self.base, self.backend, read_only=True)

    def to_learn(self) -> Runtime:
        """Opened in a worker's process. Raises as ``to_look``."""
        os.environ.update(self.environment)
        os.chdir(self.folder)
        return personalpeft.open(self.home, self.base, self.backend)


class Worker:
    """The actor. ``learn`` is asked of it once at a time; ``stop`` beside it."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._runtime: Runtime | None = None
        self._stopping = threading.Event()

    def ready(self) -> int:
        """The id of its process, once that is there."""
        return os.getpid()

    def learn(
        self, users: Sequence[str], patience: float
    ) -> tuple[LearnReport, ...] | PersonalPeftError:
        """One report for each. For so many seconds it asks again where another learn of a user runs. What keeps everybody from
        learning (a disk that is full, weights that are not there) is given back, not raised: so it arrives as it is.
        """
        try:
            if self._runtime is None:
                self._runtime = self._opening.to_learn()
            end = time.monotonic() + patience
            while True:
                reports = self._runtime.learn_many(users, cancelled=self._stopping.is_set)
                busy = any(report.error == "Busy" for report in reports)
                if not busy or time.monotonic() > end or self._stopping.wait(_AGAIN):
                    return reports
        except PersonalPeftError as error:
            return error

    def stop(self) -> None:
        """Has the learn that runs end after its step, with what it did kept."""
        self._stopping.set()

    def close(self) -> None:
        """Closes the home."""
        if self._runtime is not None:
            self._runtime.close()
