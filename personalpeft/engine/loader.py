"""Brings stacks from disk over host memory into their slots, beside decoding.

One thread reads and stages one stack after the other, since that is this machine's work; a few attach them side by side, since that
may be another machine's, which may be slow with one of them. They are told of a load only when a slot is already free for it, so
they never wait for anything but the next load, and nobody waits for them holding a lock. What the first owns alone: the host
cache. What they call: ``read`` (the disk), ``stage`` and ``attach`` of the backend, and ``done`` for each load, with the error if it
failed; a failure is said once and not remembered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from personalpeft.adapters.compose import compose
from personalpeft.adapters.types import Adapter
from personalpeft.backends.base import Backend, Staged
from personalpeft.backends.error_mapping import model_faults
from personalpeft.engine.adapter_cache import HostCache
from personalpeft.engine.metrics import Metrics
from personalpeft.types import Stack

# Stacks that are attached at once, at most.
_AT_ONCE = 4
# Seconds between two looks at what is still attached when all shall end.
_LOOK = 0.05


@dataclass(frozen=True, slots=True)
class _Ready:
    """A stack that is staged; ``began`` is when its load did."""

    key: str
    staged: Staged
    began: float


class Loader:
    """``read`` brings an adapter by the digest of its packed file, in one read."""

    def __init__(
        self,
        backend: Backend,
        read: Callable[[str], Adapter],
        host_bytes: int,
        metrics: Metrics,
        timer: Callable[[], float],
        done: Callable[[str, Exception | None], None],
    ) -> None:
        self._backend = backend
        self._read = read
        self._host = HostCache[Staged](host_bytes)
        self._metrics = metrics
        self._timer = timer
        self._done = done
        # An empty key asks for the host memory to be cleared, None for the end.
        self._loads: SimpleQueue[tuple[str, Stack | None] | None] = SimpleQueue()
        self._ready: SimpleQueue[_Ready | None] = SimpleQueue()
        self._attaching: set[str] = set()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._stage, name="personalpeft-loader", daemon=True)
        ]
        self._threads += [
            threading.Thread(target=self._attach, name=f"personalpeft-loader-{number}", daemon=True)
            for number in range(min(_AT_ONCE, backend.slots))
        ]

    @property
    def host_bytes(self) -> int:
        """Bytes of stacks in host memory."""
        return self._host.nbytes

    def start(self) -> None:
        """Begins the threads, which ``close`` ends."""
        for thread in self._threads:
            thread.start()

    def ask(self, key: str, stack: Stack) -> None:
        """Has a stack brought into the slot that is free for it."""
        self._loads.put((key, stack))

    def forget(self) -> None:
        """Has the host memory cleared, after the loads that were asked for."""
        self._loads.put(("", None))

    def close(self) -> None:
        """Ends the threads after the loads that they are at, which the backend may give up; further ones are dropped. For the thread
        that detaches. Closing twice is fine, and before ``start``.
        """
        self._closing = True
        self._loads.put(None)
        for _ in self._threads:
            self._ready.put(None)
        for thread in self._threads:
            while thread.is_alive():
                # Again and again, since one may have been about to begin.
                for key in tuple(self._attaching):
                    self._backend.detach(key)
                thread.join(_LOOK)

    def _stage(self) -> None:
        while (load := self._loads.get()) is not None and not self._closing:
            key, stack = load
            if stack is None:
                self._host.clear()
                continue
            if failed := self._failed(partial(self._bring, key, stack)):
                self._done(key, failed)

    def _attach(self) -> None:
        while (ready := self._ready.get()) is not None and not self._closing:
            self._attaching.add(ready.key)
            failed = self._failed(partial(self._backend.attach, ready.key, ready.staged))
            self._attaching.remove(ready.key)
            if failed is None:
                self._metrics.observe("stack_load_seconds", self._timer() - ready.began)
            self._done(ready.key, failed)

    def _failed(self, work: Callable[[], None]) -> Exception | None:
        """What some work on a load failed at: whatever it is, those who wait for this stack must hear it."""
        try:
            with model_faults("The model could not take these layers."):
                work()
        except Exception as error:  # noqa: BLE001 - see above
            self._metrics.count("stack_load_failures_total")
            return error
        return None

    def _bring(self, key: str, stack: Stack) -> None:
        began = self._timer()
        self._ready.put(_Ready(key, self._staged(key, stack), began))

    def _staged(self, key: str, stack: Stack) -> Staged:
        kept = self._host.get(key)
        if kept is not None:
            self._metrics.count("stack_host_hits_total")
            return kept
        parts = [
            (self._read(entry.digest), entry.weight) for entry in stack.entries if entry.weight != 0
        ]
        staged = self._backend.stage(compose(parts))
        self._metrics.count("stack_loads_total")
        self._metrics.count("host_evictions_total", self._host.put(key, staged, staged.nbytes))
        return staged
