"""Limits of concurrent requests, which keep a thread free for ``/healthz``."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from werkzeug.exceptions import TooManyRequests

from personalpeft import Runtime

# Seconds after which a client may ask for a refused stream again.
_AGAIN = 5


class ConcurrencyLimiter:
    """A limit of concurrent requests. No request starts once ``stopping`` is set."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.stopping = threading.Event()
        self._taken = 0
        self._lock = threading.Lock()

    @property
    def in_use(self) -> int:
        """The number of running requests."""
        return self._taken

    def acquire(self) -> bool:
        """Start a request. Returns False at the limit."""
        with self._lock:
            if self._taken >= self.count:
                return False
            self._taken += 1
            return True

    def release(self) -> None:
        """End a request."""
        with self._lock:
            self._taken -= 1


class StreamLimiter:
    """A limit of open streams, in all and per token. Thread-safe."""

    def __init__(self, total: int, of_one: int) -> None:
        self._total, self._of_one = total, of_one
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()

    @contextmanager
    def stream(self, token: str) -> Iterator[None]:
        """Count a stream of a token while it is open. Raises ``TooManyRequests`` at the limit."""
        with self._lock:
            if self._open.total() >= self._total or self._open[token] >= self._of_one:
                raise TooManyRequests("Too many streams of events are open.", retry_after=_AGAIN)
            self._open[token] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[token] -= 1
                # A counter keeps zeros: it would grow with every token.
                if not self._open[token]:
                    del self._open[token]


def stream_limiter_of(runtime: Runtime) -> StreamLimiter:
    """Return the limit of streams of jobs: half of all requests, an eighth per token."""
    total = max(1, _count(runtime) // 2)
    return StreamLimiter(total, max(1, total // 4))


def limiter_of(runtime: Runtime) -> ConcurrencyLimiter:
    """Return a limit as high as the engine's: batch and queue together."""
    return ConcurrencyLimiter(_count(runtime))


def _count(runtime: Runtime) -> int:
    return runtime.serving.max_batch + runtime.serving.max_queue
