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
        self._held = False
        self._pass_thread: int | None = None
        self._waiting_steps = 0
        self._gave_way = False

    @contextmanager
    def for_pass(self) -> Iterator[None]:
        """Hold the device for a pass."""
        with self._passes:
            self._acquire()
            self._pass_thread = threading.get_ident()
            try:
                yield
            finally:
                self._pass_thread = None
                self._release()

    @contextmanager
    def for_step(self) -> Iterator[None]:
        """Hold the device for one step of the batch."""
        with self._changed:
            self._waiting_steps += 1
        try:
            self._acquire()
        finally:
            with self._changed:
                self._waiting_steps -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            self._release()

    def is_wanted(self) -> bool:
        """Return whether the caller computes a pass for which a step waits. Takes no lock."""
        return self._waiting_steps > 0 and self._pass_thread == threading.get_ident()

    def give_way(self) -> None:
        """Let the step that waits compute, and wait until it has. Only the pass may call this."""
        with self._changed:
            if not self._waiting_steps:
                return
            self._held, self._gave_way = False, True
            self._changed.notify_all()
            try:
                self._changed.wait_for(
                    lambda: not self._gave_way or not (self._held or self._waiting_steps)
                )
            except BaseException:
                # Ctrl-C. The caller releases the device, so it must hold it.
                if self._gave_way:
                    self._gave_way = False
                    self._changed.wait_for(lambda: not self._held)
                raise
            finally:
                self._held, self._gave_way = True, False

    def _acquire(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._held)
            self._held = True

    def _release(self) -> None:
        with self._changed:
            # A pass that gave way holds the device again, before any other step.
            self._held, self._gave_way = self._gave_way, False
            self._changed.notify_all()
