"""A cache that drops its least recently used values."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """Values up to a limit; the least recently used leave. Thread-safe.

    Args:
        limit: The most that all values together may weigh.
        weigh: Returns the weight of a value. By default each weighs 1.
    """

    def __init__(self, limit: int, weigh: Callable[[V], int] = lambda value: 1) -> None:
        self._limit, self._weigh = limit, weigh
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()
        self.weight = 0
        """What all values together weigh."""

    def get(self, key: K) -> V | None:
        """Return the value and count it as used now; None if it is not cached."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: K, value: V) -> int:
        """Cache a value unless it alone exceeds the limit. Return how many others left."""
        weight, left = self._weigh(value), 0
        with self._lock:
            self._drop(key)
            if weight <= self._limit:
                while self.weight + weight > self._limit:
                    self._drop(next(iter(self._values)))
                    left += 1
                self._values[key] = value
                self.weight += weight
        return left

    def drop(self, fits: Callable[[K], bool]) -> None:
        """Drop the values whose keys fit."""
        with self._lock:
            for key in [key for key in self._values if fits(key)]:
                self._drop(key)

    def _drop(self, key: K) -> None:
        if key in self._values:
            self.weight -= self._weigh(self._values.pop(key))
