"""Limit concurrent requests and the objects that they hold. ``/healthz`` keeps a free thread."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from werkzeug.exceptions import TooManyRequests

from personalpeft import Runtime

RETRY_AFTER = 1
"""Seconds after which a client may repeat a refused request."""


class Quota:
    """A limit of open objects, in all and per holder, which is a user or an API key. Thread-safe."""

    def __init__(self, total: int, per_holder: int, refusal: str) -> None:
        self._total, self._per_holder, self._refusal = total, per_holder, refusal
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()
        # Appended to without the lock: the collector may end an abandoned context in any thread,
        # also in one that holds the lock.
        self._ended: deque[tuple[str, int]] = deque()

    @property
    def in_use(self) -> int:
        """What is counted now, of all holders."""
        with self._lock:
            self._subtract_ended()
            return self._open.total()

    @contextmanager
    def hold(self, holder: str, amount: int = 1, *, whole: bool = False) -> Iterator[None]:
        """Count ``amount`` for a holder inside the context. Raises ``TooManyRequests``.

        With ``whole`` the holder may take as much as all together.
        """
        with self._lock:
            self._subtract_ended()
            own = self._open[holder] + amount
            most = self._total if whole else self._per_holder
            if own > most or self._open.total() + amount > self._total:
                raise TooManyRequests(self._refusal, retry_after=RETRY_AFTER)
            self._open[holder] = own
        try:
            yield
        finally:
            self._ended.append((holder, amount))

    def _subtract_ended(self) -> None:
        while self._ended:
            holder, amount = self._ended.popleft()
            self._open[holder] -= amount
            if not self._open[holder]:  # Zeros would make it grow with every holder.
                del self._open[holder]


class ConcurrencyLimiter(Quota):
    """A limit of concurrent requests: three quarters for a user.

    No request starts once ``stopping`` is set.
    """

    def __init__(self, count: int) -> None:
        super().__init__(
            count, share_of_a_user(count), "The server has as many requests as it takes."
        )
        self.count = count
        self.stopping = threading.Event()


def share_of_a_user(count: int) -> int:
    """Return how many of ``count`` places one user may take, so that others have the rest."""
    return max(1, count * 3 // 4)


def stream_quota_of(runtime: Runtime) -> Quota:
    """Return the limit of streams of jobs: half of all requests, an eighth per API key."""
    total = max(1, runtime.max_requests // 2)
    return Quota(total, max(1, total // 4), "Too many streams of events are open.")


def limiter_of(runtime: Runtime) -> ConcurrencyLimiter:
    """Return a limit as high as the engine's: batch and queue together."""
    return ConcurrencyLimiter(runtime.max_requests)
