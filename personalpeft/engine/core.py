"""The engine's thread: it runs the batch, in which requests start and finish between two steps.

One iteration drops requests that are cancelled, late or cannot be loaded. Then it assigns slots,
starts requests, makes one step and hands out its chunks. An idle iteration checks a reply.

Who may touch what:

- The engine's thread alone starts, preempts and finishes requests, and calls the backend's
  ``admit``, ``step``, ``remove`` and ``detach``. So what it read under the lock still holds when it
  acts without the lock.
- ``_changed`` guards the scheduler. It is held for bookkeeping only, never during reads,
  computation or a caller's function.
- Callers queue requests and pin adapters that are ready. The loader reports loads.

Progress: the loader waits for nothing but its next loads. A reserved slot becomes free: every
running request ends, and new ones start only with reserved keys. A thread that pins an adapter
waits for nothing else. When the engine's thread ends, it first ends all that wait for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import replace

from personalpeft.adapters.types import Adapter
from personalpeft.backends.base import Backend, OutOfBlocks
from personalpeft.backends.error_mapping import to_serving_error
from personalpeft.backends.sequence import OutputChunk
from personalpeft.clock import Clock
from personalpeft.engine.fair_queue import FairQueue
from personalpeft.engine.loader import AdapterLoader
from personalpeft.engine.metrics import Metrics
from personalpeft.engine.request import RequestGroup, RequestState, RequestStatus
from personalpeft.engine.scheduler import Scheduler
from personalpeft.engine.self_check import SelfCheck
from personalpeft.errors import (
    DeadlineExceeded,
    PersonalPeftError,
    ServingFailed,
    format_origin,
)
from personalpeft.settings import Serving

log = logging.getLogger(__name__)

# Seconds between two polls of the callers' functions while requests wait and none runs.
_POLL_SECONDS = 0.05
# Longest wait before a step while another engine answers users, so that a learn never stands still.
_GIVE_WAY_SECONDS = 0.25
REOPEN = "Close the runtime and open it again."


class EngineCore:
    """The engine's thread and what it shares with others. ``Engine`` has the callers' methods."""

    def __init__(
        self,
        backend: Backend,
        read_adapter: Callable[[str], Adapter],
        serving: Serving,
        clock: Clock,
        give_way: Callable[[float], None],
    ) -> None:
        self.backend = backend
        self._give_way = give_way
        self._timer = clock.timer
        self._metrics = Metrics()
        self._check = SelfCheck(backend, serving.self_check, clock.entropy, self._metrics)
        self._loader = AdapterLoader(
            backend, read_adapter, serving.host_bytes, self._metrics, clock.timer, self._on_loaded
        )
        self._thread = threading.Thread(target=self._run, name="personalpeft-serving", daemon=True)
        self._changed = threading.Condition(threading.Lock())
        queue = FairQueue(
            max_waiting=serving.max_queue,
            max_waiting_per_user=serving.max_queue_per_user,
            max_running_per_user=serving.max_running_per_user,
        )
        self._scheduler = Scheduler(queue, backend.slots, backend.rows)
        # Loads that failed since the last iteration, by key.
        self._failed: dict[str, Exception] = {}
        # Keys to evict as soon as they are unpinned, and the callers that wait for it.
        self._evicting: set[str] = set()
        self._clearing: list[threading.Event] = []
        self._has_news = False
        self._started = False
        self._ended: PersonalPeftError | None = None

    def _notify(self) -> None:
        self._has_news = True
        self._changed.notify_all()

    def _on_loaded(self, key: str, error: Exception | None) -> None:
        with self._changed:
            self._scheduler.loaded(key, error)
            if error is not None:
                self._failed[key] = error
            self._notify()

    def _run(self) -> None:
        error = None
        try:
            while self._wait_for_work():
                self._drop()
                self._evict()
                self._start_requests(self._load())
                if self._scheduler.running:
                    self._give_way(_GIVE_WAY_SECONDS)
                    self._step()
                elif self._check and not self._scheduler.queue:
                    self._check.run_one(self._scheduler.adapters.is_ready)
        except Exception as bug:  # noqa: BLE001 - each waiting reply ends with it
            log.error("serving has ended: %s", format_origin(bug))
            error = to_serving_error("Serving has stopped after an error.", bug, hint=REOPEN)
        finally:
            self._end(error)

    def _wait_for_work(self) -> bool:
        """Wait for something to do. Return False when it is time to end."""
        with self._changed:
            queue = self._scheduler.queue
            busy = self._scheduler.running or (self._check and not queue)
            if not (self._has_news or busy or self._ended):
                self._changed.wait(_POLL_SECONDS if queue else None)
            self._has_news = False
            return self._ended is None

    def _drop(self) -> None:
        """End requests that are cancelled, late, or cannot be loaded."""
        with self._changed:
            requests = [*self._scheduler.queue, *self._scheduler.running.values()]
            failed, self._failed = self._failed, {}
        now = self._timer()
        polled: dict[RequestGroup, bool | Exception] = {}
        for request in requests:
            group = request.group
            if group not in polled:
                polled[group] = group.poll()
            cancelled = polled[group]
            if isinstance(cancelled, Exception):
                self._end_early(request, cancelled)
            elif cancelled:
                self._end_early(request)
            elif request.deadline is not None and request.deadline <= now:
                self._end_early(request, _deadline_error(request))
            elif request.adapter_key in failed and request.status is not RequestStatus.RUNNING:
                self._end_early(request, failed[request.adapter_key])

    def _evict(self) -> None:
        """Evict the adapters that ``clear_caches`` marked and that are no longer in use."""
        with self._changed:
            adapters = self._scheduler.adapters
            clearing, self._clearing = self._clearing, []
            if clearing:
                self._evicting |= {*adapters.keys}
            elif not self._evicting:
                return
            # A preempted request is to finish on the revision that it began with.
            preempted = {request.adapter_key for request in self._scheduler.queue.preempted}
            evicted = [k for k in adapters.unpinned() if k in self._evicting - preempted]
            for key in evicted:
                adapters.remove(key)
            self._evicting = self._evicting & {*adapters.keys}
        for key in evicted:
            self.backend.detach(key)
        if clearing or evicted:
            self._check.clear()
            self._clear_cache()
        if clearing:
            self._loader.clear()
            with self._changed:
                for each in clearing:
                    each.set()
                self._notify()

    def _clear_cache(self) -> None:
        try:
            self.backend.clear_cache()
        except Exception as error:  # noqa: BLE001 - each running request ends with it
            # llama.cpp copies what running replies read. Without memory for that they end, since
            # what is erased must not stay in the cache.
            self._end_running("clearing the cache", error)
            self.backend.clear_cache()

    def _load(self) -> Container[str]:
        """Load the adapters that are waited for. Return the keys with which requests may start."""
        with self._changed:
            # Requests for an adapter that just failed end in the next iteration.
            reserved, loads = self._scheduler.plan_loads(self._failed)
        for load in loads:
            if load.evicted is not None:
                self._metrics.count("stack_evictions_total")
                self.backend.detach(load.evicted)
            self._loader.load(load.key, load.stack)
        return reserved

    def _start_requests(self, reserved: Container[str]) -> None:
        """Start and resume requests while the backend has room."""
        while True:
            with self._changed:
                request = self._scheduler.next_ready(reserved)
            if request is None:
                return
            try:
                number = self.backend.admit(request)
                if number is None and not self._scheduler.running:
                    raise MemoryError("an empty batch has no room for this request")
            except Exception as error:  # noqa: BLE001 - the caller of this request gets it
                self._end_early(
                    request, to_serving_error("The model could not take this request.", error)
                )
                continue
            if number is None:
                return
            is_resumed = request.status is RequestStatus.PREEMPTED
            with self._changed:
                self._scheduler.start(request)
            if not is_resumed:
                request.started = self._timer()
                self._metrics.record_start(request)

    def _step(self) -> None:
        try:
            chunks = self._step_backend()
        except Exception as error:  # noqa: BLE001 - each running request ends with it
            self._end_running("a step", error)
            return
        now = self._timer()
        for chunk in chunks:
            request = self._scheduler.running[chunk.index]
            if chunk.error is not None:
                self._fail(request, chunk.error)
                continue
            self._metrics.record_chunk(request, chunk, now)
            if request.is_checked:
                request.output_logprobs += chunk.logprobs[: len(chunk.tokens)]
            if chunk.finish is not None:
                if request.is_checked:
                    self._check.add(request)
                with self._changed:
                    self._scheduler.finish(request)
                    self._notify()
            request.group.outputs.put(replace(chunk, index=request.index))

    def _step_backend(self) -> Sequence[OutputChunk]:
        """Make a step, and preempt requests until there is memory for it."""
        while True:
            try:
                return self.backend.step()
            except OutOfBlocks:
                request = self._scheduler.choose_victim()
                if request is None:
                    raise
                self.backend.remove(request.number)
                self._metrics.count("num_preemptions_total")
                with self._changed:
                    self._scheduler.preempt(request)

    def _end_running(self, action: str, error: Exception) -> None:
        """End all running requests, since an action of the backend failed."""
        log.error("%s failed; the running requests end: %s", action, format_origin(error))
        for request in tuple(self._scheduler.running.values()):
            self._fail(request, error)

    def _fail(self, request: RequestState, error: Exception) -> None:
        what = "The model failed while it wrote this reply."
        self._end_early(request, to_serving_error(what, error))

    def _end_early(self, request: RequestState, error: Exception | None = None) -> None:
        """End a request wherever it is, as cancelled or with an error."""
        if request.status is RequestStatus.RUNNING:
            self.backend.remove(request.number)
        with self._changed:
            self._scheduler.finish(request)
            # A waiting request may start now, even if nothing else runs.
            self._notify()
        self._put_last(request, error)

    def _put_last(self, request: RequestState, error: Exception | None) -> None:
        """Hand out the text that was still buffered, and how the request ended."""
        last = replace(request.finish("cancelled"), index=request.index)
        if error is None:
            self._metrics.count("cancellations_total")
            request.group.outputs.put(last)
            return
        is_late = isinstance(error, DeadlineExceeded)
        self._metrics.count("deadline_errors_total" if is_late else "failures_total")
        if last.text:
            request.group.outputs.put(replace(last, finish=None))
        request.group.outputs.put(error)

    def _end(self, error: PersonalPeftError | None) -> None:
        """End all requests and loads, so that no caller waits, and detach unpinned adapters."""
        with self._changed:
            self._ended = error or self._ended or closed_error()
            requests = (*self._scheduler.running.values(), *self._scheduler.queue)
            running = tuple(self._scheduler.running)
            for request in requests:
                self._scheduler.finish(request)
            self._changed.notify_all()
        for number in running:
            # After a bug the backend may be in any state, and callers must still get their last
            # chunk.
            with suppress(Exception):
                self.backend.remove(number)
        for request in requests:
            self._put_last(request, error)
        self._loader.close()
        # A pinned adapter is being read by another thread. Closing the backend frees it.
        with self._changed:
            unpinned = list(self._scheduler.adapters.unpinned())
            for key in unpinned:
                self._scheduler.adapters.remove(key)
        for key in unpinned:
            with suppress(Exception):
                self.backend.detach(key)


def _deadline_error(request: RequestState) -> DeadlineExceeded:
    seconds = (request.deadline or request.arrived) - request.arrived
    progress = "had not begun" if request.order < 0 else "was not complete"
    return DeadlineExceeded(
        f"The reply {progress} after {seconds:g} s.",
        hint="Give it more time, or ask for a shorter reply (max_tokens).",
    )


def closed_error() -> ServingFailed:
    """Return the error of requests that meet a closed engine."""
    return ServingFailed("The engine is closed.", hint=REOPEN)
