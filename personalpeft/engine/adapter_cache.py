"""Where stacks are, and who gives way: a bounded number of slots on the device, a bounded number of bytes in host memory.
Pure: it knows keys and sizes, not tensors and threads.

A key is in a slot in one of two ways: it is coming (the slot was given to it, its load is on the way), or it is ready.
Invariants: never more keys than slots; what is coming or pinned keeps its slot; what somebody waits for and may have is
never given away for somebody further back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

V = TypeVar("V")


@dataclass(slots=True)
class _Slot:
    ready: bool = False
    pins: int = 0


@dataclass(frozen=True, slots=True)
class Given:
    """A slot for a key, and who has to leave it first (None: it was free)."""

    key: str
    leaving: str | None


class Slots:
    """Which keys have a slot; the least recently used gives way. Not thread-safe: its owner holds a lock."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: OrderedDict[str, _Slot] = OrderedDict()

    @property
    def taken(self) -> tuple[str, ...]:
        """The keys that have a slot, least recently used first."""
        return tuple(self._taken)

    def ready(self, key: str) -> bool:
        """Whether the key can be used now."""
        return key in self._taken and self._taken[key].ready

    def claims(self, wanted: Iterable[str]) -> tuple[str, ...]:
        """Which of the keys that are waited for, in the order of the queue, may have a slot: as many as there are slots.

        Only these may be begun with. A key further back must not be, even where it is ready: whoever comes for it again
        and again would keep its slot for ever from the one who waits in front.
        """
        claims: dict[str, None] = {}
        for key in wanted:
            if len(claims) == self._count:
                break
            claims[key] = None
        return tuple(claims)

    def give(self, claims: tuple[str, ...]) -> list[Given]:
        """Gives slots to those claims that have none, in their order, as long as a slot is free or its key is neither
        pinned, coming nor claimed itself. The keys are then coming: ``arrived`` or ``failed`` is to follow.
        """
        given = []
        for key in claims:
            if key in self._taken:
                continue
            leaving = None
            if len(self._taken) == self._count:
                idle = (
                    k
                    for k, slot in self._taken.items()
                    if slot.ready and not slot.pins and k not in claims
                )
                leaving = next(idle, None)
                if leaving is None:
                    break
                del self._taken[leaving]
            self._taken[key] = _Slot()
            given.append(Given(key, leaving))
        return given

    def arrived(self, key: str) -> None:
        """Its load is done; the key is ready."""
        self._taken[key].ready = True
        self._taken.move_to_end(key)

    def failed(self, key: str) -> None:
        """Its load came to nothing; the slot is free."""
        del self._taken[key]

    def idle(self) -> tuple[str, ...]:
        """The keys that are ready and that nobody uses."""
        return tuple(key for key, slot in self._taken.items() if slot.ready and not slot.pins)

    def leave(self, key: str) -> None:
        """Takes the slot of an idle key away."""
        del self._taken[key]

    def pin(self, key: str) -> None:
        """Notes a use of a ready key, which stays until it is let go as often as it was pinned."""
        self._taken[key].pins += 1
        self._taken.move_to_end(key)

    def let_go(self, key: str) -> None:
        """Ends one use; the key stays until its slot is needed."""
        self._taken[key].pins -= 1
        self._taken.move_to_end(key)


class HostCache(Generic[V]):
    """Values up to so many bytes together; the least recently used leave. Not thread-safe: one thread owns it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self.nbytes = 0

    def get(self, key: str) -> V | None:
        """The value, which counts as used now; None where it is not."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def clear(self) -> None:
        """Keeps nothing any more."""
        self._kept.clear()
        self.nbytes = 0

    def put(self, key: str, value: V, nbytes: int) -> int:
        """Keeps a value, unless it alone is over the limit; returns how many others left for it."""
        if nbytes > self._limit or key in self._kept:
            return 0
        left = 0
        while self.nbytes + nbytes > self._limit:
            _, (_, freed) = self._kept.popitem(last=False)
            self.nbytes -= freed
            left += 1
        self._kept[key] = (value, nbytes)
        self.nbytes += nbytes
        return left
