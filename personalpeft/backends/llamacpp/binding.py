"""The little of llama.cpp that is used here, with its pointers and return codes kept inside.

Invariants: nothing above this file sees ctypes; what failed is a ``RuntimeError`` that names the call; a model outlives its
contexts and adapters, each of which is closed once, by its owner; an adapter is closed when no context answers with it (the
library compares addresses, and takes a new adapter at an old one's address for the same).

A context has one set of adapters for all that it computes, and its keys and values know nothing of that set (llama.cpp's
own prompt cache compares tokens alone). So whoever changes the set drops what the context holds: here a set is given when
a context is made, or replaced in one that holds nothing.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from personalpeft.errors import WeightsError

log = logging.getLogger(__name__)

Logits = npt.NDArray[np.float32]

# Of what GGML calls its levels, those worth a line; it warns of what is meant here, such as a context for many rows.
_LEVELS = {2: logging.DEBUG, 3: logging.DEBUG, 4: logging.ERROR}

# GGML's number for the type, and the library's for attention step by step, whose sums are in float32.
_FLOAT32, _NO_FLASH = 0, 0

# The only sequence in a context.
_SEQUENCE = 0

# A model keeps a list of its adapters, which the library does not lock.
_ADAPTERS = threading.Lock()


@dataclass(frozen=True, slots=True)
class Place:
    """One token to compute: where it stands in the text, and whether what comes after it is asked for."""

    token: int
    position: int
    asked: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a context is: ``places`` for keys and values; at most ``batch`` tokens and ``asked`` distributions in one
    call. ``full`` keeps and computes attention in float32, else in float16.
    """

    places: int
    batch: int
    asked: int
    threads: int
    full: bool = False


class Lora:
    """An adapter that is loaded. Close it when no context uses it."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer

    def close(self) -> None:
        """Frees its memory. Closing twice is fine."""
        pointer, self.pointer = self.pointer, None
        if pointer is not None:
            with _ADAPTERS:
                _lib().llama_adapter_lora_free(pointer)


class Model:
    """A GGUF file, mapped into memory. ``extra`` lets llama.cpp keep weights in the processor's own order (``probe.py``).
    Raises ``WeightsError`` for a file that the library cannot load.
    """

    def __init__(self, path: Path, *, extra: bool) -> None:
        lib = _lib()
        params = lib.llama_model_default_params()
        params.use_extra_bufts = extra
        self._model = _loaded(path, params)
        self.vocabulary = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))

    def lora(self, path: Path) -> Lora:
        """Loads a GGUF LoRA; the file is not needed any more then. Raises ``RuntimeError`` for one that does not fit the model."""
        with _ADAPTERS:
            pointer = _lib().llama_adapter_lora_init(self._model, os.fsencode(path))
        if not pointer:
            raise RuntimeError("llama.cpp cannot load the adapter")
        return Lora(pointer)

    def context(self, shape: Shape, lora: Lora | None) -> Context:
        """A context of that shape that answers with the adapter. Raises ``RuntimeError`` where there is no memory for it."""
        return Context(self._model, self.vocabulary, shape, lora)

    def close(self) -> None:
        """Frees the model. Closing twice is fine."""
        model, self._model = self._model, None
        if model is not None:
            _lib().llama_model_free(model)


class Vocabulary:
    """The tokenizer in a GGUF file, which need hold no weights. Raises ``WeightsError`` for a file that the library cannot load."""

    def __init__(self, path: Path) -> None:
        params = _lib().llama_model_default_params()
        params.vocab_only = True
        self._model = _loaded(path, params)

    def tokens(self, text: str, *, control: bool) -> tuple[int, ...]:
        """A text as llama.cpp splits it, with nothing before it; ``control`` says whether it may spell control tokens."""
        lib, data = _lib(), text.encode()
        # No token is shorter than a byte.
        found = (lib.llama_token * max(1, len(data)))()
        vocabulary = lib.llama_model_get_vocab(self._model)
        count = lib.llama_tokenize(vocabulary, data, len(data), found, len(found), False, control)
        if count < 0:
            raise RuntimeError("llama.cpp cannot split a text")
        return tuple(found[:count])

    def close(self) -> None:
        """Frees its memory. Closing twice is fine."""
        model, self._model = self._model, None
        if model is not None:
            _lib().llama_model_free(model)


class Context:
    """The keys and values of one text, computed with one set of adapters. Not thread-safe."""

    def __init__(self, model: Any, vocabulary: int, shape: Shape, lora: Lora | None) -> None:
        lib = _lib()
        self.shape = shape
        self._vocabulary = vocabulary
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = shape.places, 1
        params.n_batch = params.n_ubatch = min(shape.batch, shape.places)
        params.n_outputs_max = params.n_outputs_max_per_seq = shape.asked
        params.n_threads = params.n_threads_batch = shape.threads
        params.no_perf = True
        if shape.full:
            params.type_k = params.type_v = _FLOAT32
            params.flash_attn_type = _NO_FLASH
        self._context = lib.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp is out of memory for {shape.places} tokens")
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(shape.batch, 0, 1)
        try:
            self._set(lora)
        except RuntimeError:
            self.close()
            raise

    def answer_with(self, lora: Lora | None) -> None:
        """Answers with another adapter from now on; what was computed with the one before is dropped."""
        self.clear()
        self._set(lora)

    def compute(self, places: Sequence[Place]) -> Logits:
        """Reads the tokens; gives the logits ``[asked for, vocabulary]`` after those that ask, in their order. Raises
        ``RuntimeError``; ``ValueError`` for more than the context's shape allows.
        """
        if self._context is None:
            raise RuntimeError("the context is closed")
        asked = [index for index, place in enumerate(places) if place.asked]
        if len(places) > self.shape.batch or len(asked) > self.shape.asked:
            raise ValueError(
                f"{len(places)} tokens, {len(asked)} of them asked for, are too many for one call"
            )
        batch = self._batch
        batch.n_tokens = len(places)
        for index, place in enumerate(places):
            batch.token[index] = place.token
            batch.pos[index] = place.position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = _SEQUENCE
            batch.logits[index] = place.asked
        code = _lib().llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode failed ({code})")
        logits = np.empty((len(asked), self._vocabulary), np.float32)
        for row, index in enumerate(asked):
            found = _lib().llama_get_logits_ith(self._context, index)
            logits[row] = np.ctypeslib.as_array(found, (self._vocabulary,))
        return logits

    def cut(self, length: int) -> bool:
        """Drops all but the first tokens; False where this model cannot, and then all of them are dropped."""
        if _lib().llama_memory_seq_rm(self._memory, _SEQUENCE, length, -1):
            return True
        _lib().llama_memory_seq_rm(self._memory, _SEQUENCE, -1, -1)
        return False

    def state(self) -> bytes:
        """Its keys and values, for ``restore`` in a context of the same model and adapter."""
        lib = _lib()
        size = lib.llama_state_seq_get_size(self._context, _SEQUENCE)
        buffer = (ctypes.c_uint8 * size)()
        if lib.llama_state_seq_get_data(self._context, buffer, size, _SEQUENCE) != size:
            raise RuntimeError("llama.cpp cannot copy keys and values out")
        return bytes(buffer)

    def restore(self, state: bytes) -> None:
        """Takes over what ``state`` gave. Raises ``RuntimeError`` where it does not fit."""
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if not _lib().llama_state_seq_set_data(self._context, buffer, len(state), _SEQUENCE):
            raise RuntimeError("llama.cpp cannot take keys and values over")

    def clear(self) -> None:
        """Drops all keys and values and overwrites them."""
        _lib().llama_memory_clear(self._memory, True)

    def close(self) -> None:
        """Frees its memory. Closing twice is fine."""
        context, self._context = self._context, None
        if context is not None:
            _lib().llama_batch_free(self._batch)
            _lib().llama_free(context)

    def _set(self, lora: Lora | None) -> None:
        lib = _lib()
        loras = [] if lora is None else [lora.pointer]
        pointers = (lib.llama_adapter_lora_p_ctypes * 1)(*loras)
        scales = (ctypes.c_float * 1)(1.0)
        if lib.llama_set_adapters_lora(self._context, pointers, len(loras), scales):
            raise RuntimeError("llama.cpp cannot answer with the adapter")


def _loaded(path: Path, params: Any) -> Any:
    """The library's pointer to a file that it has read. Raises ``WeightsError``."""
    model = _lib().llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise WeightsError(
            f"llama.cpp cannot load {path}.",
            hint="The log has its reason. Its version may not know this kind of model; torch may.",
        )
    return model


@cache
def _lib() -> Any:
    """The library, its log led into ours. Imported here, so that whoever does not serve with it need not load it."""
    from llama_cpp import llama_cpp

    llama_cpp.llama_log_set(_log_callback(llama_cpp), ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


@cache
def _log_callback(lib: Any) -> Any:
    """Kept for good: the library calls it as long as the process lives."""

    def said(level: int, text: bytes, _: object) -> None:
        if level in _LEVELS:
            log.log(_LEVELS[level], "%s", text.decode(errors="replace").rstrip())

    return lib.llama_log_callback(said)
