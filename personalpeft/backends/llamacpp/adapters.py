"""Attached stacks as llama.cpp has them: each written as one GGUF LoRA and loaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from personalpeft.adapters.types import AdapterStack
from personalpeft.backends.attached_stacks import AttachedStacks
from personalpeft.backends.llamacpp.binding import LoraAdapter

# A folder in memory on Linux.
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A loaded adapter, and the stack that it is made of."""

    lora: LoraAdapter
    stack: AdapterStack


class LoadedAdapters(AttachedStacks[LoadedAdapter]):
    """``write`` writes a stack's GGUF file, ``load`` loads it. The batch waits for neither."""

    def __init__(
        self,
        slots: int,
        write: Callable[[AdapterStack, Path], None],
        load: Callable[[Path], LoraAdapter],
    ) -> None:
        super().__init__(slots)
        self._write, self._load_file = write, load

    def attach(self, key: str, stack: AdapterStack) -> None:
        """See ``Backend.attach``."""
        self.put(key, lambda: LoadedAdapter(self._load(stack), stack))

    def _load(self, stack: AdapterStack) -> LoraAdapter:
        # The library reads from a path only. In shared memory the file need not go to a disk.
        if os.access(_SHARED_MEMORY, os.W_OK):
            with suppress(OSError):
                return self._load_through(stack, _SHARED_MEMORY)
        return self._load_through(stack, None)

    def _load_through(self, stack: AdapterStack, parent: Path | None) -> LoraAdapter:
        with tempfile.TemporaryDirectory(prefix="personalpeft-", dir=parent) as folder:
            file = Path(folder, "stack.gguf")
            self._write(stack, file)
            return self._load_file(file)
