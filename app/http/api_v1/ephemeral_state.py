"""What our own API keeps between two requests beside its jobs: streams that can be stopped, and comparisons to choose from.

Invariants: each belongs to a user, and nobody else finds it; at most so many comparisons are kept of a user and in all, and the
oldest go first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from personalpeft.chat.compare import Comparison
from personalpeft.clock import Clock
from personalpeft.errors import NotFound
from personalpeft.ids import new_id

MOST_COMPARISONS = 1024
MOST_OF_ONE = 32


class EphemeralState:
    """The streams and comparisons of one server."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turn = threading.Lock()
        self._streams: dict[tuple[str, str], threading.Event] = {}
        self._comparisons: dict[tuple[str, str], Comparison] = {}

    @contextmanager
    def stream(self, user: str) -> Iterator[tuple[str, threading.Event]]:
        """A name for a stream while it runs, and what is set when somebody stops it."""
        key, stop = (user, self._id("r")), threading.Event()
        with self._turn:
            self._streams[key] = stop
        try:
            yield key[1], stop
        finally:
            with self._turn:
                self._streams.pop(key, None)

    def stop(self, user: str, stream: str) -> bool:
        """Stops a stream of a user; whether there is one."""
        with self._turn:
            stop = self._streams.get((user, stream))
        if stop is not None:
            stop.set()
        return stop is not None

    def add_comparison(self, user: str, comparison: Comparison) -> str:
        """Keeps a comparison of a user; its id."""
        name = self._id("c")
        with self._turn:
            own = [key for key in self._comparisons if key[0] == user]
            for key in own[: max(0, len(own) - MOST_OF_ONE + 1)]:
                del self._comparisons[key]
            if len(self._comparisons) >= MOST_COMPARISONS:
                del self._comparisons[next(iter(self._comparisons))]
            self._comparisons[user, name] = comparison
        return name

    def take_comparison(self, user: str, name: str) -> Comparison:
        """One of a user. Raises ``NotFound``."""
        with self._turn:
            found = self._comparisons.get((user, name))
        if found is None:
            raise NotFound(
                f"There is no comparison {name} of {user}.",
                hint="A server remembers the last ones; compare again.",
            )
        return found

    def forget(self, user: str) -> None:
        """Lets go of all comparisons of a user: they repeat what was said."""
        with self._turn:
            for key in [key for key in self._comparisons if key[0] == user]:
                del self._comparisons[key]

    def _id(self, prefix: str) -> str:
        return new_id(prefix, self._clock.now(), self._clock.entropy)
