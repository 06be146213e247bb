"""Which stacks are in a device's slots: a bounded set with pins, least recently used out first. Pure; knows keys, not
tensors.
"""

from __future__ import annotations

from collections import OrderedDict


class Residency:
    """Decides who goes when a slot is needed. Not thread-safe: its owner holds a lock."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._pins: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._pins

    def make_room(self) -> str | None:
        """Which key has to leave before one more can come: None while there is room. Raises ``LookupError`` when all
        are pinned.
        """
        if len(self._pins) < self._slots:
            return None
        for key, pins in self._pins.items():
            if pins == 0:
                return key
        raise LookupError(f"all {self._slots} slots are in use")

    def pin(self, key: str) -> None:
        """Notes a use, and that the key must stay until it is let go as often as it was pinned."""
        self._pins[key] = self._pins.get(key, 0) + 1
        self._pins.move_to_end(key)

    def let_go(self, key: str) -> None:
        """Ends one use; the key stays resident until its slot is needed."""
        self._pins[key] -= 1

    def forget(self, key: str) -> None:
        """Notes that the key has left."""
        del self._pins[key]
