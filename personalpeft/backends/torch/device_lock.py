"""Share a device between passes of training or scoring and steps of the batch.

Invariants: one thread computes at a time. A pass that gives way computes on after one step, so
neither starves. While it waits, no other pass begins.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class DeviceLock:
    """The right to compute. A pass may hold it for seconds, and offers it to steps meanwhile."""

    def __init__(self) -> None:
        self._passes = threading.Lock()
        self._changed = threading.Condition()
        # The threads that compute or wait, in the order of their turns. The first one computes.
        self._turns: list[int] = []
        self._pass_thread: int | None = None

    @contextmanager
    def for_pass(self) -> Iterator[None]:
        """Hold the device for a pass."""
        with self._passes, self.for_step():
            self._pass_thread = threading.get_ident()
            try:
                yield
            finally:
                self._pass_thread = None

    @contextmanager
    def for_step(self) -> Iterator[None]:
        """Hold the device for one step of the batch."""
        thread = threading.get_ident()
        with self._changed:
            self._turns.append(thread)
        try:
            with self._changed:
                self._wait_for_turn()
            yield
        finally:
            with self._changed:
                self._turns.remove(thread)
                self._changed.notify_all()

    def is_wanted(self) -> bool:
        """Return whether the caller computes a pass for which a step waits. Takes no lock."""
        return len(self._turns) > 1 and self._pass_thread == threading.get_ident()

    def give_way(self) -> None:
        """Let the step that waits compute, and wait until it has. Only the pass may call this."""
        with self._changed:
            if len(self._turns) < 2:
                return
            self._turns[0], self._turns[1] = self._turns[1], self._turns[0]
            self._changed.notify_all()
            try:
                self._wait_for_turn()
            except BaseException:
                # Ctrl-C. The caller releases the device, so it must hold it.
                self._wait_for_turn()
                raise

    def _wait_for_turn(self) -> None:
        thread = threading.get_ident()
        self._changed.wait_for(lambda: self._turns[0] == thread)
