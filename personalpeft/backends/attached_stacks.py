"""Attached stacks by key, up to a number of slots. The engine alone counts their uses.

Safe to use from any thread: stacks are loaded beside the batch, and beside each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class AttachedStacks(Generic[T]):
    """Attached stacks by key. A stack that is being loaded takes a slot."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        # Held for a moment at a time, never during a load.
        self._changed = threading.Condition(threading.Lock())
        self._stacks: dict[str, T] = {}
        self._loading: set[str] = set()

    def put(self, key: str, load: Callable[[], T]) -> None:
        """Attach what ``load`` returns, unless the key is attached. Wait for another load of the
        key.

        Raises ``RuntimeError`` if all slots are taken, and what ``load`` raises.
        """
        with self._changed:
            self._changed.wait_for(lambda: key not in self._loading)
            if key in self._stacks:
                return
            if len(self._stacks) + len(self._loading) >= self._slots:
                raise RuntimeError(f"all {self._slots} slots are taken")
            self._loading.add(key)
        loaded: list[T] = []
        try:
            loaded.append(load())
        finally:
            with self._changed:
                self._loading.remove(key)
                if loaded:
                    self._stacks[key] = loaded[0]
                self._changed.notify_all()

    def get(self, key: str) -> T:
        """Return the attached stack. Raises ``KeyError``."""
        with self._changed:
            return self._stacks[key]

    def drop(self, key: str) -> T | None:
        """Free the slot of a key and return its stack, or None."""
        with self._changed:
            return self._stacks.pop(key, None)

    def clear(self) -> list[T]:
        """Free all slots and return what was attached."""
        with self._changed:
            stacks = list(self._stacks.values())
            self._stacks.clear()
            return stacks
