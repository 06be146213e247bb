"""Brings stacks from disk over host memory into their slots, beside decoding.

One thread does one load after the other. It is told of a load only when a slot is already free for it, so it never waits
for anything but the next load, and nobody waits for it holding a lock. What it owns alone: the host cache. What it calls:
``read`` (the disk), ``stage`` and ``attach`` of the backend, and ``done`` for each load, with the error if it failed; a
failure is said once and not remembered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from personalpeft.adapters.base import Adapter
from personalpeft.adapters.compose import compose
from personalpeft.backends.base import Backend, Staged
from personalpeft.backends.faults import model_faults
from personalpeft.serving.metrics import Metrics
from personalpeft.serving.residency import HostCache
from personalpeft.types import Stack


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
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="personalpeft-loader", daemon=True)

    @property
    def host_bytes(self) -> int:
        """Bytes of stacks in host memory."""
        return self._host.nbytes

    def start(self) -> None:
        """Begins the thread, which ``close`` ends."""
        self._thread.start()

    def ask(self, key: str, stack: Stack) -> None:
        """Has a stack brought into the slot that is free for it."""
        self._loads.put((key, stack))

    def forget(self) -> None:
        """Has the host memory cleared, after the loads that were asked for."""
        self._loads.put(("", None))

    def close(self) -> None:
        """Ends the thread after the load that it is at; further ones are dropped. Closing twice is fine, and before ``start``."""
        self._closing = True
        self._loads.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while (load := self._loads.get()) is not None and not self._closing:
            key, stack = load
            if stack is None:
                self._host.clear()
                continue
            began = self._timer()
            try:
                with model_faults("The model could not take these layers."):
                    self._backend.attach(key, self._staged(key, stack))
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait for this stack must hear it
                self._metrics.count("stack_load_failures_total")
                self._done(key, error)
            else:
                self._metrics.observe("stack_load_seconds", self._timer() - began)
                self._done(key, None)

    def _staged(self, key: str, stack: Stack) -> Staged:
        kept = self._host.get(key)
        if kept is not None:
            self._metrics.count("stack_host_hits_total")
            return kept
        parts = [(self._read(entry.digest), entry.weight) for entry in stack.entries if entry.weight != 0]
        staged = self._backend.stage(compose(parts))
        self._metrics.count("stack_loads_total")
        self._metrics.count("host_evictions_total", self._host.put(key, staged, staged.nbytes))
        return staged
