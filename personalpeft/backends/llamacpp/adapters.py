"""Stacks as llama.cpp has them: each written as one GGUF LoRA and loaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from personalpeft.adapters.types import Composed
from personalpeft.backends.llamacpp.binding import Lora
from personalpeft.backends.attached_stacks import AttachedStacks

# Linux has this folder in memory.
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A stack that is loaded, and what it is made of."""

    lora: Lora
    stack: Composed


class Loras(AttachedStacks[Loaded]):
    """``write`` makes a stack's file, ``load`` loads it; neither is waited for by rows."""

    def __init__(
        self, slots: int, write: Callable[[Composed, Path], None], load: Callable[[Path], Lora]
    ) -> None:
        super().__init__(slots)
        self._write, self._load = write, load

    def attach(self, key: str, stack: Composed) -> None:
        """See ``Backend.attach``."""
        self.put(key, lambda: Loaded(self._loaded(stack), stack))

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
