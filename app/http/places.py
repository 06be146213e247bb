"""How much is worked on at once: the bound that keeps a thread free for ``/healthz``."""

from __future__ import annotations

import threading

from personalpeft import Runtime


class Places:
    """How many requests may be worked on at once, and how many are. Once ``stopping`` is set there are none left."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.stopping = threading.Event()
        self._taken = 0
        self._turn = threading.Lock()

    @property
    def taken(self) -> int:
        """How many are taken now."""
        return self._taken

    def take(self) -> bool:
        """Takes one; False where none is left."""
        with self._turn:
            if self._taken >= self.count:
                return False
            self._taken += 1
            return True

    def give_back(self) -> None:
        """Ends a ``take``."""
        with self._turn:
            self._taken -= 1


def places_for(runtime: Runtime) -> Places:
    """As many as may be answered or wait at once: what is beyond that the engine would refuse too."""
    return Places(runtime.serving.rows + runtime.serving.waiting)
