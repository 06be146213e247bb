"""A worker process: it opens the home and loads the base once, and learns for the users it gets.

Invariant: a worker holds nothing that the home does not have, so it may be lost at any time. The
system frees its leases, and the next learn of its users continues from what was saved or published.
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

# Seconds between attempts to get a lease that a lost worker may still hold.
_RETRY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How to open the home in another process as this one would: folder, environment, arguments."""

    home: str | Path | None
    base: str | Path
    backend: str
    folder: str
    environment: Mapping[str, str]

    @classmethod
    def from_process(cls, home: str | Path | None, base: str | Path, backend: str) -> OpenOptions:
        """Return the options with this process's folder and environment.

        The arguments are those of ``personalpeft.open``.
        """
        prefix = "PERSONALPEFT_"
        environment = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
        return cls(home, base, backend, str(Path.cwd()), environment)

    def open_read_only(self) -> Runtime:
        """Open the home in this process to read. Creates no home.

        Raises ``HomeError``, ``NotFound``, ``CardError``, ``InvalidInput``.
        """
        return personalpeft.open(self.home, self.base, self.backend, read_only=True)

    def open_in_worker(self) -> Runtime:
        """Open the home in a worker process. Raises as ``open_read_only``."""
        os.environ.update(self.environment)
        os.chdir(self.folder)
        return personalpeft.open(self.home, self.base, self.backend)


class Worker:
    """The Ray actor. One ``learn`` runs at a time; ``stop`` may be called meanwhile."""

    def __init__(self, options: OpenOptions) -> None:
        self._options = options
        self._runtime: Runtime | None = None
        self._stopping = threading.Event()

    def ready(self) -> int:
        """Return the process id."""
        return os.getpid()

    def learn(
        self, users: Sequence[str], patience: float
    ) -> tuple[LearnReport, ...] | PersonalPeftError:
        """Return one report per user, or the error that keeps all of them from learning.

        The error is returned and not raised, so that Ray does not wrap it. For ``patience``
        seconds, users whose lease is taken are tried again.
        """
        try:
            if self._runtime is None:
                self._runtime = self._options.open_in_worker()
            deadline = time.monotonic() + patience
            while True:
                reports = self._runtime.learn_many(users, cancelled=self._stopping.is_set)
                busy = any(report.error == "Busy" for report in reports)
                if not busy or time.monotonic() > deadline or self._stopping.wait(_RETRY_SECONDS):
                    return reports
        except PersonalPeftError as error:
            return error

    def stop(self) -> None:
        """End the running learn after its step. Its work is kept."""
        self._stopping.set()

    def close(self) -> None:
        """Close the home."""
        if self._runtime is not None:
            self._runtime.close()
