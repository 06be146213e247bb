"""State between requests beside jobs: streams to stop, and comparisons to choose from.

Invariants: each belongs to one user, and no other user finds it. The number of comparisons is
bounded per user and in all, and the oldest are dropped first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from personalpeft.chat.compare import Comparison, LabeledComparison
from personalpeft.clock import SYSTEM
from personalpeft.errors import Forgotten, NotFound, PersonalPeftError
from personalpeft.ids import new_id

MAX_COMPARISONS = 1024
MAX_PER_USER = 32


class EphemeralState:
    """The streams and comparisons of one server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[tuple[str, str], threading.Event] = {}
        self._comparisons: dict[tuple[str, str], Comparison] = {}

    @contextmanager
    def stream(self, user: str) -> Iterator[tuple[str, threading.Event]]:
        """Yield a name for a stream, and the event that stopping it sets."""
        key, stop = (user, _new_id("r")), threading.Event()
        with self._lock:
            self._streams[key] = stop
        try:
            yield key[1], stop
        finally:
            with self._lock:
                self._streams.pop(key, None)

    def stop(self, user: str, stream: str) -> bool:
        """Stop a stream of a user. Returns whether it exists."""
        with self._lock:
            stop = self._streams.get((user, stream))
        if stop is not None:
            stop.set()
        return stop is not None

    def add_comparison(self, user: str, comparison: Comparison) -> str:
        """Store a comparison of a user and return its id."""
        name = _new_id("c")
        with self._lock:
            own = [key for key in self._comparisons if key[0] == user]
            for key in own[: max(0, len(own) - MAX_PER_USER + 1)]:
                del self._comparisons[key]
            if len(self._comparisons) >= MAX_COMPARISONS:
                del self._comparisons[next(iter(self._comparisons))]
            self._comparisons[user, name] = comparison
        return name

    def choose(self, user: str, name: str, which: int | str) -> LabeledComparison:
        """Record which answer of a comparison is better, once, and drop the comparison.

        Raises ``NotFound``, and as ``Comparison.choose``. After an error it can be chosen again, but
        not after ``Forgotten``: it quotes replies.
        """
        with self._lock:
            found = self._comparisons.pop((user, name), None)
        if found is None:
            raise NotFound(
                f"There is no comparison {name} of {user}.",
                hint="Each is chosen once, and the server keeps the newest ones. Compare again.",
            )
        try:
            return found.choose(which)
        except Forgotten:
            raise
        except PersonalPeftError:
            with self._lock:
                self._comparisons[user, name] = found
            raise

    def forget(self, user: str) -> None:
        """Drop the comparisons of a user: they quote replies."""
        with self._lock:
            for key in [key for key in self._comparisons if key[0] == user]:
                del self._comparisons[key]


def _new_id(prefix: str) -> str:
    return new_id(prefix, SYSTEM.now(), SYSTEM.entropy)
