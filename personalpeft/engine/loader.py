"""Loads adapters from disk through host memory into their slots, beside decoding.

One thread reads and stages the stacks one after the other, since that is local work. A few threads
attach stacks side by side, since a remote server may attach one of them slowly. A load starts only
when its slot is free, so these threads wait for nothing but the next load. No thread waits for them
with a lock held. A failure is reported once and not remembered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from personalpeft.adapters.compose import compose
from personalpeft.adapters.types import Adapter
from personalpeft.backends.base import Backend, StagedStack
from personalpeft.backends.error_mapping import map_model_errors
from personalpeft.engine.metrics import Metrics
from personalpeft.lru_cache import LRUCache
from personalpeft.types import Stack

_MAX_ATTACHING = 4
# Seconds between two attempts to give up what is still being attached when the engine closes.
_POLL_SECONDS = 0.05


class AdapterLoader:
    """Stages and attaches stacks.

    Args:
        backend: Where the stacks are attached.
        read_adapter: Reads an adapter by the digest of its packed file.
        host_bytes: Bytes of staged stacks to keep in host memory.
        metrics: Where loads are counted.
        timer: The engine's clock, in seconds.
        on_loaded: Called from a loader thread with the key of each load, and its error if it
            failed.
    """

    def __init__(
        self,
        backend: Backend,
        read_adapter: Callable[[str], Adapter],
        host_bytes: int,
        metrics: Metrics,
        timer: Callable[[], float],
        on_loaded: Callable[[str, Exception | None], None],
    ) -> None:
        self._backend = backend
        self._read_adapter = read_adapter
        self._host = LRUCache[str, StagedStack](host_bytes, lambda stack: stack.nbytes)
        self._metrics = metrics
        self._timer = timer
        self._on_loaded = on_loaded
        # A stack of None asks to clear the host memory, None instead of a pair ends the thread.
        self._loads: SimpleQueue[tuple[str, Stack | None] | None] = SimpleQueue()
        # Key, staged stack, and when its load began.
        self._staged: SimpleQueue[tuple[str, StagedStack, float] | None] = SimpleQueue()
        self._attaching: set[str] = set()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run_staging, name="personalpeft-loader", daemon=True)
        ]
        self._threads += [
            threading.Thread(
                target=self._run_attaching, name=f"personalpeft-loader-{number}", daemon=True
            )
            for number in range(min(_MAX_ATTACHING, backend.slots))
        ]

    @property
    def host_bytes(self) -> int:
        """Bytes of stacks in host memory."""
        return self._host.weight

    def start(self) -> None:
        """Start the threads. ``close`` ends them."""
        for thread in self._threads:
            thread.start()

    def load(self, key: str, stack: Stack) -> None:
        """Load a stack into the slot that is free for it."""
        self._loads.put((key, stack))

    def clear(self) -> None:
        """Clear the host memory after the loads that were requested before."""
        self._loads.put(("", None))

    def close(self) -> None:
        """End the threads after their current loads. The backend may give those up.

        Later loads are dropped. Call it from the thread that detaches. Closing twice is fine, and
        before ``start``.
        """
        self._closing = True
        self._loads.put(None)
        for _ in self._threads:
            self._staged.put(None)
        for thread in self._threads:
            while thread.is_alive():
                # Repeated, since a thread may have been about to attach.
                for key in tuple(self._attaching):
                    self._backend.detach(key)
                thread.join(_POLL_SECONDS)

    def _run_staging(self) -> None:
        while (load := self._loads.get()) is not None and not self._closing:
            key, stack = load
            if stack is None:
                self._host.drop(lambda key: True)
            elif error := self._try(partial(self._stage, key, stack)):
                self._on_loaded(key, error)

    def _run_attaching(self) -> None:
        while (load := self._staged.get()) is not None and not self._closing:
            key, staged, began = load
            self._attaching.add(key)
            error = self._try(partial(self._backend.attach, key, staged))
            self._attaching.remove(key)
            if error is None:
                self._metrics.observe("stack_load_seconds", self._timer() - began)
            self._on_loaded(key, error)

    def _try(self, work: Callable[[], None]) -> Exception | None:
        """Return what some work raised. It must reach the requests that wait for the stack."""
        try:
            with map_model_errors("The model could not take these layers."):
                work()
        except Exception as error:  # noqa: BLE001 - see above
            self._metrics.count("stack_load_failures_total")
            return error
        return None

    def _stage(self, key: str, stack: Stack) -> None:
        began = self._timer()
        staged = self._host.get(key)
        if staged is None:
            parts = [
                (self._read_adapter(entry.digest), entry.weight)
                for entry in stack.entries
                if entry.weight != 0
            ]
            staged = self._backend.stage(compose(parts))
            self._metrics.count("stack_loads_total")
            evicted = self._host.put(key, staged)
            self._metrics.count("host_evictions_total", evicted)
        else:
            self._metrics.count("stack_host_hits_total")
        self._staged.put((key, staged, began))
