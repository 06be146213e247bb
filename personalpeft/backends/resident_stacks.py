"""Which stacks are resident by key, and how many rows point to each.

Invariants: never more than ``slots``, those included that are being loaded; what rows point to stays until the last of them has
left, also when its key was dropped or given to another one meanwhile. Safe from several threads: stacks are loaded beside the
batch, and beside each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


# eq=False: the same stack resident twice is two.
@dataclass(eq=False, slots=True)
class Resident(Generic[T]):
    """What a key means, and how many rows point to it. ``named`` as long as the key means it."""

    held: T
    rows: int = 0
    named: bool = True


class Residents(Generic[T]):
    """Keys, each with what was loaded for it. What ``let_go`` and ``drop`` give is nobody's any more: their caller closes it."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        # Held for a moment at a time, never while one is loaded.
        self._turn = threading.Condition(threading.Lock())
        self._named: dict[str, Resident[T]] = {}
        # Dropped, but rows still point to them.
        self._leaving: list[Resident[T]] = []
        # Being loaded.
        self._coming: set[str] = set()

    def put(self, key: str, load: Callable[[], T]) -> None:
        """Has a key stand for what ``load`` gives; one that is there already stays, and one that is being loaded is waited for.
        Raises ``RuntimeError`` where all slots are taken, and what ``load`` raises, which leaves its slot free.
        """
        with self._turn:
            self._turn.wait_for(lambda: key not in self._coming)
            if key in self._named:
                return
            if len(self._named) + len(self._leaving) + len(self._coming) >= self._slots:
                raise RuntimeError(f"all {self._slots} slots are taken")
            self._coming.add(key)
        resident = None
        try:
            resident = Resident(load())
        finally:
            with self._turn:
                self._coming.remove(key)
                if resident is not None:
                    self._named[key] = resident
                self._turn.notify_all()

    def held(self, key: str) -> T:
        """What a key stands for. Raises ``KeyError``."""
        with self._turn:
            return self._named[key].held

    def point(self, key: str | None) -> Resident[T] | None:
        """What a row that names the key points to from now on; None for the bare base. Raises ``KeyError``."""
        if key is None:
            return None
        with self._turn:
            found = self._named[key]
            found.rows += 1
            return found

    def let_go(self, resident: Resident[T] | None) -> T | None:
        """Ends one row's use; gives what it was where that was the last of one that was dropped."""
        if resident is None:
            return None
        with self._turn:
            resident.rows -= 1
            # Of what ``clear`` gave away nothing is left to give.
            if resident.named or resident.rows or resident not in self._leaving:
                return None
            self._leaving.remove(resident)
            return resident.held

    def drop(self, key: str) -> T | None:
        """Forgets a key, which need not be there; gives what it stood for where nobody points to it."""
        with self._turn:
            resident = self._named.pop(key, None)
            if resident is None:
                return None
            resident.named = False
            if resident.rows:
                self._leaving.append(resident)
                return None
            return resident.held

    def clear(self) -> list[T]:
        """Forgets everything, whoever points to it, and gives it."""
        with self._turn:
            gone = [resident.held for resident in (*self._named.values(), *self._leaving)]
            self._named.clear()
            self._leaving.clear()
            return gone
