"""Which requests wait, run or are preempted, as plain data: no thread, no clock, no tensor.

Invariants: each running request and each ``pin`` outside of the batch pins its adapter once. The
first running request in the order of preemption is never preempted, so it finishes and progress is
certain. A preempted request resumes before new ones of its class start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import chain, count

from personalpeft.engine.adapter_cache import AdapterCache, AdapterLoad
from personalpeft.engine.fair_queue import FairQueue
from personalpeft.engine.request import RequestState, RequestStatus
from personalpeft.types import Stack


@dataclass(eq=False, slots=True)
class PinRequest:
    """A thread outside of the batch that waits for an adapter to be attached."""

    adapter_key: str
    stack: Stack
    error: Exception | None = None


class Scheduler:
    """The state of one batch. Not thread-safe: its owner holds a lock."""

    def __init__(self, queue: FairQueue, num_slots: int, max_rows: int) -> None:
        self.queue = queue
        self.adapters = AdapterCache(num_slots)
        self.running: dict[int, RequestState] = {}
        self.pin_requests: list[PinRequest] = []
        # Pins that threads outside of the batch hold, by key.
        self._outside_pins: Counter[str] = Counter()
        self._max_rows = max_rows
        self._orders = count()

    def plan_loads(self, skipped: Container[str]) -> tuple[Container[str], list[AdapterLoad]]:
        """Give slots to the adapters that are waited for, in queue order. The caller loads them.

        Return the reserved keys, with which requests may start, and the adapters to load. Keys that
        are ``skipped`` are not loaded now.
        """
        waiting: Iterator[PinRequest | RequestState]
        waiting = chain(self.pin_requests, self.queue.in_order())
        reserved = self.adapters.reserve(
            (each.adapter_key, each.stack)
            for each in waiting
            if each.adapter_key is not None and each.adapter_key not in skipped
        )
        return reserved, self.adapters.allocate(reserved)

    def loaded(self, key: str, error: Exception | None) -> None:
        """Record that a load ended. An error reaches the threads that wait to pin the adapter."""
        if error is None:
            self.adapters.mark_ready(key)
            return
        self.adapters.remove(key)
        for each in self.pin_requests:
            if each.adapter_key == key:
                each.error = error
        # Their threads wake after the scheduler ran. It must not load the key again for them.
        self.pin_requests = [each for each in self.pin_requests if each.error is None]

    def next_ready(self, reserved: Container[str]) -> RequestState | None:
        """Return the request to start or resume next, None if none can now."""

        def is_ready(request: RequestState) -> bool:
            if request.status is not RequestStatus.PREEMPTED and request.group.is_paused:
                return False
            # Background work leaves one row free for a foreground request that arrives meanwhile.
            if request.background and 0 < len(self.running) >= self._max_rows - 1:
                return False
            key = request.adapter_key
            return key is None or (key in reserved and self.adapters.is_ready(key))

        return self.queue.next_ready(is_ready)

    def start(self, request: RequestState) -> None:
        """Record that the backend admitted a request."""
        if request.order < 0:
            request.order = next(self._orders)
        request.status = RequestStatus.RUNNING
        self.running[request.number] = request
        self.queue.start(request)
        if request.adapter_key is not None:
            self.adapters.pin(request.adapter_key)

    def choose_victim(self) -> RequestState | None:
        """Return the request to preempt: the youngest background one, else the youngest.

        The oldest foreground request, or the oldest if all are background, is never chosen.
        """
        if len(self.running) < 2:
            return None
        return max(self.running.values(), key=lambda r: (r.background, r.order))

    def preempt(self, request: RequestState) -> None:
        """Put a running request back into the queue. It keeps its tokens and gives up its pin."""
        self._stop(request)
        request.status = RequestStatus.PREEMPTED
        self.queue.preempt(request)

    def finish(self, request: RequestState) -> None:
        """Record that a request ended, wherever it is."""
        if request.status is RequestStatus.RUNNING:
            self._stop(request)
            self.queue.finish(request)
        else:
            self.queue.drop(request)
        request.status = RequestStatus.FINISHED

    def pin(self, key: str) -> None:
        """Pin a ready adapter for a thread outside of the batch."""
        self.adapters.pin(key)
        self._outside_pins[key] += 1

    def unpin(self, key: str) -> None:
        """End a ``pin``."""
        self.adapters.unpin(key)
        self._outside_pins[key] -= 1

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` unless statuses, pins and slots agree with who runs and waits."""
        for number, request in self.running.items():
            if request.status is not RequestStatus.RUNNING or request.number != number:
                raise RuntimeError(f"sequence {number} belongs to a request {request.status}")
        waiting = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if any(request.status not in waiting for request in self.queue):
            raise RuntimeError("a request that does not wait is in the queue")
        uses = self._outside_pins + Counter(
            r.adapter_key for r in self.running.values() if r.adapter_key
        )
        self.adapters.check_integrity(uses)

    def _stop(self, request: RequestState) -> None:
        del self.running[request.number]
        if request.adapter_key is not None:
            self.adapters.unpin(request.adapter_key)
