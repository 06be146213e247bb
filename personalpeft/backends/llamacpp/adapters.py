"""Attached stacks as llama.cpp has them: each written as one GGUF LoRA and loaded."""

from __future__ import annotations

from personalpeft import host
from personalpeft.adapters.formats.gguf import write_gguf_lora
from personalpeft.adapters.types import AdapterStack
from personalpeft.backends.attached_stacks import AttachedStacks
from personalpeft.backends.llamacpp.binding import LoraAdapter, Model
from personalpeft.base_models.gguf.tensor_names import GgufNames


class LoadedAdapters(AttachedStacks[LoraAdapter]):
    """The attached stacks of one model. The batch waits neither for writing nor for loading."""

    def __init__(self, slots: int, names: GgufNames, model: Model) -> None:
        super().__init__(slots)
        self._names, self._model = names, model

    def attach(self, key: str, stack: AdapterStack) -> None:
        """See ``Backend.attach``."""
        self.put(key, lambda: self._load(stack))

    def _load(self, stack: AdapterStack) -> LoraAdapter:
        # The library reads from a path only.
        with host.temporary_file("stack.gguf") as file:
            write_gguf_lora(self._names, stack, file)
            return self._model.load_adapter(file)
