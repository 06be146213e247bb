"""Track which adapters have a device slot, and how often each is in use.

Keys and sizes only, no tensors and no threads. The pins counted here are the only count of adapters
in use: backends attach and detach what this cache decides. A key with a slot is loading or ready.

Invariants: there are never more keys than slots. A key that is loading or pinned keeps its slot. A
reserved key never loses its slot to a request further back in the queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from personalpeft.types import Stack


@dataclass(slots=True)
class _Slot:
    ready: bool = False
    pins: int = 0


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """A stack to load into a slot. ``evicted`` is to be detached first; None for a free slot."""

    key: str
    stack: Stack
    evicted: str | None


class AdapterCache:
    """Slots by key; the least recently used leave. Not thread-safe: its owner holds a lock."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots: OrderedDict[str, _Slot] = OrderedDict()

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys with a slot, least recently used first."""
        return tuple(self._slots)

    def is_ready(self, key: str) -> bool:
        """Return whether the adapter is attached."""
        slot = self._slots.get(key)
        return slot is not None and slot.ready

    def reserve(self, wanted: Iterable[tuple[str, Stack]]) -> dict[str, Stack]:
        """Return the first different keys of ``wanted`` with their stacks, one for each slot.

        Only requests for these keys may start. Otherwise requests further back could keep their
        adapters in the slots for ever, and the first request would never start.
        """
        reserved: dict[str, Stack] = {}
        for key, stack in wanted:
            if len(reserved) == self._num_slots:
                break
            reserved[key] = stack
        return reserved

    def allocate(self, reserved: Mapping[str, Stack]) -> list[AdapterLoad]:
        """Give slots to reserved keys that have none, while a slot is free or can be evicted.

        Each of these keys is loading until ``mark_ready`` or ``remove``.
        """
        loads = []
        for key, stack in reserved.items():
            if key in self._slots:
                continue
            evicted = None
            if len(self._slots) == self._num_slots:
                evicted = next((k for k in self.unpinned() if k not in reserved), None)
                if evicted is None:
                    break
                del self._slots[evicted]
            self._slots[key] = _Slot()
            loads.append(AdapterLoad(key, stack, evicted))
        return loads

    def mark_ready(self, key: str) -> None:
        """Record that the adapter is attached."""
        self._slots[key].ready = True
        self._slots.move_to_end(key)

    def unpinned(self) -> tuple[str, ...]:
        """Return the ready keys that are not in use, least recently used first."""
        return tuple(key for key, slot in self._slots.items() if slot.ready and not slot.pins)

    def remove(self, key: str) -> None:
        """Free the slot of a key that is unpinned or whose load failed."""
        del self._slots[key]

    def pin(self, key: str) -> None:
        """Count one use of a ready key. The key keeps its slot until as many ``unpin`` calls."""
        self._slots[key].pins += 1
        self._slots.move_to_end(key)

    def unpin(self, key: str) -> None:
        """End one use."""
        self._slots[key].pins -= 1
        self._slots.move_to_end(key)

    def check_integrity(self, uses: Mapping[str, int]) -> None:
        """Raise ``RuntimeError`` unless the pins are exactly ``uses``, and the slots suffice."""
        if len(self._slots) > self._num_slots:
            raise RuntimeError(f"{len(self._slots)} adapters in {self._num_slots} slots")
        pins = {key: slot.pins for key, slot in self._slots.items() if slot.pins}
        if pins != {key: count for key, count in uses.items() if count}:
            raise RuntimeError(f"adapters are pinned {pins}, but used {dict(uses)}")
        if any(not self._slots[key].ready for key in pins):
            raise RuntimeError("an adapter is pinned while it is loading")
