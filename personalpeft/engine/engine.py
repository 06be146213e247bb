"""Answers requests of many users on one backend: stacks and messages in, chunks of text out.

Invariants: requests of one batch may name different stacks, and a reply depends on its own request
alone. An adapter in use keeps its slot, so a reply finishes on the stack that it started with. The
adapters of an attached stack had their own digests checked.

Safe to use from any thread; ``core`` has the threads.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from personalpeft.adapters.formats.packed import pack
from personalpeft.adapters.types import Adapter
from personalpeft.backends.base import Backend, Continuation, Score
from personalpeft.backends.error_mapping import map_model_errors
from personalpeft.backends.openmp import release_threads
from personalpeft.backends.sequence import Request, Tokens
from personalpeft.clock import SYSTEM, Clock
from personalpeft.engine.core import REOPEN, EngineCore, closed_error
from personalpeft.engine.fair_queue import QueueLimit
from personalpeft.engine.metrics import Snapshot
from personalpeft.engine.request import OutputStream, Predicate, RequestGroup, RequestState
from personalpeft.engine.scheduler import PinRequest
from personalpeft.errors import BaseMismatch, Cancelled, PromptTooLong, QueueFull, ServingFailed
from personalpeft.settings import Serving
from personalpeft.types import Stack

__all__ = ["Engine", "Request"]

log = logging.getLogger(__name__)


class Engine(EngineCore):
    """Serves stacks on one backend. Close it before the backend: its threads run until then.

    Args:
        backend: The loaded base.
        read_adapter: Reads an adapter by the digest of its packed file, and checks it.
        serving: How much is served at once and how much may wait.
        clock: The time, in seconds, and the entropy.
        give_way: Waits, for at most the given seconds, while another engine answers users. It is
            called before each step.
    """

    def __init__(
        self,
        backend: Backend,
        read_adapter: Callable[[str], Adapter],
        serving: Serving = Serving(),
        clock: Clock = SYSTEM,
        give_way: Callable[[float], None] = lambda max_seconds: None,
    ) -> None:
        self._stored_adapter = read_adapter
        self._temporary: dict[str, Adapter] = {}
        self._sources: tuple[Callable[[str], Adapter | None], ...] = ()
        super().__init__(backend, self.read_adapter, serving, clock, give_way)
        if not backend.batch_invariant:
            log.info("batch invariance does not hold (%s)", backend.description)

    def read_adapter(self, digest: str) -> Adapter:
        """Return an adapter by the digest of its packed file: temporary, of a source, or stored."""
        adapter = self._temporary.get(digest)
        for read in self._sources:
            adapter = adapter or read(digest)
        return self._stored_adapter(digest) if adapter is None else adapter

    def add_source(self, read: Callable[[str], Adapter | None]) -> None:
        """Let stacks name adapters that a plugin keeps.

        The engine's threads call ``read`` with the digest of a packed file. It returns the adapter,
        checked, or None for another's.
        """
        self._sources = (*self._sources, read)

    @contextmanager
    def temporary_adapter(self, adapter: Adapter) -> Iterator[str]:
        """Yield a digest by which stacks may name an adapter that is not stored, in the block."""
        digest = hashlib.sha256(pack(adapter)).hexdigest()
        self._temporary[digest] = adapter
        try:
            yield digest
        finally:
            # Another caller may have registered the same one, and has to do so again.
            self._temporary.pop(digest, None)

    def tokenize(self, request: Request) -> Tokens:
        """Return the prompt as tokens.

        Raises:
            PromptTooLong: Prompt and reply together exceed the base's context.
        """
        backend = self.backend
        if request.tokens:
            tokens = request.tokens
        elif request.template:
            tokens = backend.render(request.messages) + backend.encode(
                request.reply_prefix(backend.base.tool_format)
            )
        else:
            text = "".join(message.content for message in request.messages)
            tokens = backend.bos_tokens + backend.encode(text)
        max_tokens = request.sampling.max_tokens
        context = min(backend.base.card.context, backend.max_length)
        excess = len(tokens) + max_tokens - context
        if excess > 0:
            room = context - max_tokens
            raise PromptTooLong(
                f"The prompt has {len(tokens)} tokens; with {max_tokens} for the reply that is "
                f"{excess} more than the {context} of {backend.base.card.name}.",
                hint=f"Shorten the prompt to {room} tokens, or ask for a shorter reply."
                if room > 0
                else "Ask for a shorter reply.",
                excess=excess,
            )
        return tokens

    def stream(
        self,
        requests: Sequence[Request],
        *,
        cancelled: Predicate | None = None,
        paused: Predicate | None = None,
    ) -> OutputStream:
        """Tokenize requests and return their chunks as they come, in one stream.

        The requests are submitted with the first chunk that is read. There may be more of them than
        the batch has rows. A reply that is cancelled has a last chunk that says so.

        Args:
            requests: What to answer; their stacks may differ.
            cancelled: Called between steps by the engine's thread, so it must be quick. Once it
                returns True, what has not finished ends. Closing the stream does the same.
            paused: Called likewise. While it returns True, no request of the call starts.

        Raises:
            PromptTooLong: A prompt and its reply exceed the base's context.
            BaseMismatch: A stack was built on another base.

        The first chunk raises ``QueueFull`` if the queue is full; then none of the requests is
        served. Later chunks raise ``DeadlineExceeded``, ``ServingFailed``, or what loading raised.
        """
        group = RequestGroup(cancelled, paused)
        group.requests += [
            RequestState(
                request,
                self.tokenize(request),
                self._key(request.stack),
                group=group,
                index=index,
            )
            for index, request in enumerate(requests)
        ]
        return OutputStream(group, self._submit, self.backend.base.tool_format)

    def complete(
        self,
        requests: Sequence[Request],
        *,
        cancelled: Predicate | None = None,
        paused: Predicate | None = None,
    ) -> list[str]:
        """Return whole replies in the order of the requests, or what there is when ``cancelled``.

        The arguments are those of ``stream``. Also raises ``Cancelled``, if the engine was closed.
        """
        replies = self.stream(requests, cancelled=cancelled, paused=paused).read()
        # A learn must not judge half a reply as a whole one.
        if not (cancelled and cancelled()) and any(r.finish == "cancelled" for r in replies):
            raise Cancelled("The engine was closed while it wrote.", hint="Open the runtime again.")
        return [reply.text for reply in replies]

    def score(
        self, items: Sequence[Continuation], stack: Stack, *, kl: bool = False, top: int = 0
    ) -> tuple[Score, ...]:
        """Return how likely continuations are under a stack, as ``Backend.score``.

        Raises ``ServingFailed``, or what ``pin`` raises.
        """
        if not items:
            return ()
        with (
            self.pin(stack) as key,
            map_model_errors("The model failed while it compared answers."),
        ):
            return self.backend.score(items, key, kl=kl, top=top)

    @contextmanager
    def pin(self, stack: Stack) -> Iterator[str | None]:
        """Keep a stack in a slot inside the block and yield its key, None for the bare base.

        Waits for a slot. Inside, ask the engine for nothing else: it could need the pinned slot.

        Raises:
            BaseMismatch: The stack was built on another base.
            ServingFailed: The engine is closed; or whatever loading raised.
        """
        key = self._key(stack)
        if key is None:
            yield None
            return
        with self._changed:
            self._start()
            if not self._scheduler.adapters.is_ready(key):
                self._wait_until_ready(key, stack)
            self._scheduler.pin(key)
        try:
            yield key
        finally:
            with self._changed:
                self._scheduler.unpin(key)
                self._notify()

    def yield_to_foreground(self, max_seconds: float) -> None:
        """Wait while foreground requests wait or run, at most ``max_seconds``.

        Work that takes turns with replies calls this first.
        """
        self._wait_while(lambda: self._scheduler.queue.has_foreground, max_seconds)

    def yield_to_requests(self, max_seconds: float) -> None:
        """Wait while any requests wait or run, at most ``max_seconds``."""
        self._wait_while(lambda: self._scheduler.queue or self._scheduler.running, max_seconds)

    def clear_caches(self) -> None:
        """Drop what is cached for all users: unpinned adapters, host memory, and prompt caches.

        An adapter in use is dropped as soon as its last reply has ended.
        """
        done = threading.Event()
        with self._changed:
            if not self._started or self._ended is not None:
                return
            self._clearing.append(done)
            self._notify()
            self._changed.wait_for(lambda: done.is_set() or self._ended)

    def metrics(self) -> Snapshot:
        """Return all metrics; ``docs/reference/metrics.md`` explains the names."""
        occupancy = self.backend.occupancy()
        with self._changed:
            gauges = {
                "num_requests_running": len(self._scheduler.running),
                "num_requests_waiting": len(self._scheduler.queue),
                "rows": self.backend.rows,
                "slots_used": len(self._scheduler.adapters.keys),
                "slots": self.backend.slots,
                "host_bytes": self._loader.host_bytes,
                "kv_cache_usage_perc": occupancy.used_tokens / max(1, occupancy.total_tokens),
            }
        return self._metrics.snapshot(gauges, {"prefix_cache_hits_total": occupancy.reused_tokens})

    def check_integrity(self) -> None:
        """Check slots, pins and key-value blocks against the running requests. For an idle engine.

        Raises:
            RuntimeError: Something leaked; the message says what.
        """
        with self._changed:
            self._scheduler.check_integrity()
        self.backend.check_integrity()

    def close(self) -> None:
        """Cancel what runs or waits, detach all adapters that are not in use, and end the threads.

        Closing twice is fine.
        """
        with self._changed:
            self._ended = self._ended or closed_error()
            self._notify()
        if self._thread.is_alive():
            self._thread.join()
        # The engine's thread does this, unless it never ran.
        self._loader.close()

    def _submit(self, group: RequestGroup) -> None:
        """Queue all requests of a group, or none.

        Raises:
            QueueFull: The queue, or the user's share of it, has no room; with a hint when to retry.
            ServingFailed: The engine has ended.
        """
        # This thread waits now. Idle threads of its own would keep those of a step from spinning.
        release_threads()
        now = self._timer()
        for request in group.requests:
            request.arrived = now
            timeout = request.request.timeout
            request.deadline = None if timeout is None else now + timeout
            request.is_checked = self._check.is_sampled()
            request.logprobs = request.logprobs or request.is_checked
        with self._changed:
            self._start()
            limit = self._scheduler.queue.exceeded(group.requests)
            if limit is not None:
                self._metrics.count("refusals_total")
                raise self._queue_full(limit, len(group.requests))
            for request in group.requests:
                if request.adapter_key is not None:
                    is_hit = self._scheduler.adapters.is_ready(request.adapter_key)
                    self._metrics.count("stack_hits_total" if is_hit else "stack_misses_total")
            self._scheduler.queue.add(group.requests)
            self._notify()

    def _wait_while(self, busy: Callable[[], object], max_seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not busy(), max_seconds)
        self._give_way(max_seconds)

    def _wait_until_ready(self, key: str, stack: Stack) -> None:
        """Wait until an adapter is attached, or raise why it is not. The caller holds the lock."""
        request = PinRequest(key, stack)
        self._scheduler.pin_requests.append(request)
        self._notify()
        try:
            self._changed.wait_for(
                lambda: self._scheduler.adapters.is_ready(key) or request.error or self._ended
            )
        finally:
            if request in self._scheduler.pin_requests:
                self._scheduler.pin_requests.remove(request)
        if error := self._ended or request.error:
            raise error

    def _start(self) -> None:
        if self._ended is not None:
            raise self._ended
        if not self._started:
            self._started = True
            try:
                self._loader.start()
                self._thread.start()
            except BaseException:
                # Ctrl-C. A later caller would wait for threads that may not run.
                self._ended = ServingFailed("Serving was stopped while it started.", hint=REOPEN)
                self._notify()
                raise

    def _queue_full(self, limit: QueueLimit, num_requests: int) -> QueueFull:
        wait = self._metrics.estimate_wait(limit.excess, self.backend.rows)
        possible = num_requests <= limit.limit
        return QueueFull(
            f"{limit.limit} requests {'of one user ' if limit.per_user else ''}may wait, and "
            f"{limit.excess} more would.",
            hint=f"Try again in {wait} s." if possible else "Ask for fewer at once.",
            retry_after=float(wait) if possible else None,
            limit=limit.limit,
        )

    def _key(self, stack: Stack) -> str | None:
        """Return the key that the stack is attached under; None for the bare base."""
        if stack.is_bare:
            return None
        if stack.base != self.backend.base.digest:
            raise BaseMismatch(
                "This stack was built on another base than the open one.", hint="Open that base."
            )
        return stack.digest
