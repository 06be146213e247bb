"""How much is worked on at once: the bound that keeps a thread free for ``/healthz``."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from werkzeug.exceptions import TooManyRequests

from personalpeft import Runtime

# Seconds after which a stream that was refused is worth asking for again.
_AGAIN = 5


class ConcurrencyLimiter:
    """How many requests may be worked on at once, and how many are. Once ``stopping`` is set there are none left."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.stopping = threading.Event()
        self._taken = 0
        self._turn = threading.Lock()

    @property
    def in_use(self) -> int:
        """How many are taken now."""
        return self._taken

    def acquire(self) -> bool:
        """Takes one; False where none is left."""
        with self._turn:
            if self._taken >= self.count:
                return False
            self._taken += 1
            return True

    def release(self) -> None:
        """Ends a ``take``."""
        with self._turn:
            self._taken -= 1


class StreamLimiter:
    """How many streams of one kind may be open, in all and of one token. Safe to use from several threads."""

    def __init__(self, total: int, of_one: int) -> None:
        self._total, self._of_one = total, of_one
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()

    @contextmanager
    def stream(self, token: str) -> Iterator[None]:
        """Count a stream of a token while it is open. Raises ``TooManyRequests`` where no more may be."""
        with self._lock:
            if self._open.total() >= self._total or self._open[token] >= self._of_one:
                raise TooManyRequests("Too many streams of events are open.", retry_after=_AGAIN)
            self._open[token] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[token] -= 1
                # Without it every token that ever came would be kept.
                if not self._open[token]:
                    del self._open[token]


def stream_limiter_of(runtime: Runtime) -> StreamLimiter:
    """Return the limit of streams of jobs: half of the places in all, an eighth for one token, one at least."""
    total = max(1, _count(runtime) // 2)
    return StreamLimiter(total, max(1, total // 4))


def limiter_of(runtime: Runtime) -> ConcurrencyLimiter:
    """As many as may be answered or wait at once: what is beyond that the engine would refuse too."""
    return ConcurrencyLimiter(_count(runtime))


def _count(runtime: Runtime) -> int:
    return runtime.serving.max_batch + runtime.serving.max_queue
