"""Which stacks are loaded, each as one adapter.

Invariants: never more than ``slots``; a stack that rows point to stays loaded until the last of them has left, also when its
key was dropped or given to another one meanwhile. Safe from several threads: stacks are loaded beside the batch.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from personalpeft.adapters.base import Composed
from personalpeft.backends.llamacpp.library import Lora

# Linux has this folder in memory.
_MEMORY = Path("/dev/shm")


# eq=False: the same stack loaded twice is two.
@dataclass(eq=False, slots=True)
class Resident:
    """A stack that is loaded, and how many rows point to it. ``named`` as long as its key means it."""

    lora: Lora
    stack: Composed
    rows: int = 0
    named: bool = True


class Loras:
    """``write`` makes a stack's file, ``load`` loads it; neither is waited for by rows."""

    def __init__(self, slots: int, write: Callable[[Composed, Path], None], load: Callable[[Path], Lora]) -> None:
        self._slots, self._write, self._load = slots, write, load
        self._turn = threading.Lock()
        # Held while one is loaded, so that there is never one more than there are slots.
        self._filling = threading.Lock()
        self._named: dict[str, Resident] = {}
        # Dropped, but rows still point to them.
        self._leaving: list[Resident] = []

    def put(self, key: str, stack: Composed) -> None:
        """See ``Backend.attach``."""
        with self._filling:
            with self._turn:
                if key in self._named:
                    return
                if len(self._named) + len(self._leaving) >= self._slots:
                    raise RuntimeError(f"all {self._slots} slots are taken")
            resident = Resident(self._loaded(stack), stack)
            with self._turn:
                self._named[key] = resident

    def stack(self, key: str) -> Resident:
        """What is loaded under a key. Raises ``KeyError``."""
        with self._turn:
            return self._named[key]

    def point(self, key: str | None) -> Resident | None:
        """What a row that names the key points to from now on; None for the bare base. Raises ``KeyError``."""
        if key is None:
            return None
        with self._turn:
            found = self._named[key]
            found.rows += 1
            return found

    def let_go(self, stack: Resident) -> bool:
        """Ends one row's use; True where it was the last of a stack that was dropped, which is then to be closed."""
        with self._turn:
            stack.rows -= 1
            if stack.named or stack.rows:
                return False
            self._leaving.remove(stack)
            return True

    def drop(self, key: str) -> Resident | None:
        """Forgets a key; gives its stack where nobody points to it, which is then to be closed."""
        with self._turn:
            stack = self._named.pop(key, None)
            if stack is None:
                return None
            stack.named = False
            if stack.rows:
                self._leaving.append(stack)
                return None
            return stack

    def close(self) -> None:
        """Frees all of them."""
        with self._turn:
            for stack in (*self._named.values(), *self._leaving):
                stack.lora.close()
            self._named.clear()
            self._leaving.clear()

    def _loaded(self, stack: Composed) -> Lora:
        """The library reads from a path alone. What is loaded lies in memory, so the file goes at once; it need not even come
        to a disk where the system has a folder that is memory, and room in it.
        """
        if os.access(_MEMORY, os.W_OK):
            with suppress(OSError):
                return self._loaded_by(stack, _MEMORY)
        return self._loaded_by(stack, None)

    def _loaded_by(self, stack: Composed, place: Path | None) -> Lora:
        with tempfile.TemporaryDirectory(prefix="personalpeft-", dir=place) as folder:
            file = Path(folder, "stack.gguf")
            self._write(stack, file)
            return self._load(file)
