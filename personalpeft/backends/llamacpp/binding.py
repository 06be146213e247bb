"""Bind the functions of llama.cpp that this package uses.

Invariants: no other module sees ctypes. A failed call raises ``RuntimeError`` with the call's name.
Owners close contexts and adapters, each once, before their model. An adapter is closed when no
context uses it. The library compares addresses, so it could confuse a new adapter with an old one.

A context has one set of adapters for all that it computes. llama.cpp does not record which set its
keys and values were computed with. So the set is given when a context is made, or replaced in an
empty context.

All is computed on the processor, also by a build of the library that could use a GPU.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from personalpeft.errors import MissingPackage, WeightsError
from personalpeft.extras import extra_required

log = logging.getLogger(__name__)

Logits = npt.NDArray[np.float32]

# GGML's levels that are logged. Its warnings are about intended settings, such as short contexts.
_LOG_LEVELS = {2: logging.DEBUG, 3: logging.DEBUG, 4: logging.ERROR}

# GGML_TYPE_F32, and LLAMA_FLASH_ATTN_TYPE_DISABLED. Flash attention divides the positions of one
# token among the threads from 512 on, so its sums differ with the number of threads.
_TYPE_F32, _FLASH_ATTN_DISABLED = 0, 0

# The only sequence in a context.
_SEQ_ID = 0

# A model keeps a list of its adapters. The library does not lock it.
_adapters_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class ContextParams:
    """The size of a context.

    Attributes:
        n_ctx: Tokens that it has room for.
        n_batch: Most tokens in one call.
        n_outputs: Most distributions in one call.
        float32: Whether keys and values are kept in float32, else in float16.
    """

    n_ctx: int
    n_batch: int
    n_outputs: int
    float32: bool = False


class LoraAdapter:
    """A loaded adapter. Close it when no context uses it."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer

    def close(self) -> None:
        """Free its memory. Closing twice is allowed."""
        pointer, self.pointer = self.pointer, None
        if pointer is not None:
            with _adapters_lock:
                load_library().llama_adapter_lora_free(pointer)


class _ModelHandle:
    """A GGUF file that the library has loaded. Raises ``WeightsError`` if it cannot load it."""

    def __init__(self, path: Path, **params: bool) -> None:
        lib = load_library()
        options = lib.llama_model_default_params()
        options.n_gpu_layers = 0
        for name, value in params.items():
            setattr(options, name, value)
        self.pointer = lib.llama_model_load_from_file(os.fsencode(path), options)
        if not self.pointer:
            raise WeightsError(
                f"llama.cpp cannot load {path}.",
                hint="See the log. This version may not know the architecture; use torch.",
            )
        self._vocab = lib.llama_model_get_vocab(self.pointer)

    def close(self) -> None:
        """Free its memory. Closing twice is allowed."""
        pointer, self.pointer = self.pointer, None
        if pointer is not None:
            load_library().llama_model_free(pointer)


class Model(_ModelHandle):
    """A GGUF model, mapped into memory.

    Args:
        path: The file.
        repack: Whether to keep weights in the processor's own order (see ``cpu_probe``).
        threads: Returns how many threads compute the next call. Results do not depend on it.

    Raises:
        WeightsError: The library cannot load the file.
    """

    def __init__(self, path: Path, *, repack: bool, threads: Callable[[], int]) -> None:
        super().__init__(path, use_extra_bufts=repack)
        self.threads = threads
        self.vocab_size = int(load_library().llama_vocab_n_tokens(self._vocab))

    def load_adapter(self, path: Path) -> LoraAdapter:
        """Load a GGUF LoRA; the file may be deleted afterwards. Raises ``RuntimeError``."""
        with _adapters_lock:
            pointer = load_library().llama_adapter_lora_init(self.pointer, os.fsencode(path))
        if not pointer:
            raise RuntimeError("llama.cpp cannot load the adapter")
        return LoraAdapter(pointer)

    def new_context(self, params: ContextParams, adapter: LoraAdapter | None) -> Context:
        """Return a context with an adapter. Raises ``RuntimeError`` without memory for it."""
        return Context(self, params, adapter)


class GgufTokenizer(_ModelHandle):
    """The tokenizer in a GGUF file, which may have no weights."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, vocab_only=True)

    def tokenize(self, text: str, *, control: bool) -> tuple[int, ...]:
        """Return the tokens of a text without BOS; ``control`` allows control tokens in it."""
        lib, data = load_library(), text.encode()
        # No token is shorter than a byte.
        tokens = (lib.llama_token * max(1, len(data)))()
        count = lib.llama_tokenize(
            self._vocab, data, len(data), tokens, len(tokens), False, control
        )
        if count < 0:
            raise RuntimeError("llama_tokenize failed")
        return tuple(tokens[:count])


class Context:
    """The keys and values of one text, computed with one set of adapters. Not thread-safe."""

    def __init__(self, model: Model, params: ContextParams, adapter: LoraAdapter | None) -> None:
        lib = load_library()
        self.params = params
        self._vocab_size, self._threads = model.vocab_size, model.threads
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_seq_max = params.n_ctx, 1
        options.n_batch = options.n_ubatch = min(params.n_batch, params.n_ctx)
        options.n_outputs_max = options.n_outputs_max_per_seq = params.n_outputs
        options.no_perf = True
        options.flash_attn_type = _FLASH_ATTN_DISABLED
        options.offload_kqv = options.op_offload = False
        if params.float32:
            options.type_k = options.type_v = _TYPE_F32
        self._context = lib.llama_init_from_model(model.pointer, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp is out of memory for {params.n_ctx} tokens")
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(params.n_batch, 0, 1)
        try:
            self._set_lora(adapter)
        except RuntimeError:
            self.close()
            raise

    def set_adapter(self, adapter: LoraAdapter | None) -> None:
        """Replace the adapter and drop what was computed with the previous one."""
        self.clear()
        self._set_lora(adapter)

    def decode(self, tokens: Sequence[int], start: int, n_outputs: int) -> Logits:
        """Return the logits ``[n_outputs, vocabulary]`` after the last of these tokens.

        Args:
            tokens: Tokens that follow each other.
            start: The position of the first.
            n_outputs: After how many of the last tokens logits are needed.

        Raises:
            RuntimeError: The context is closed, or the library failed.
            ValueError: There are more tokens or outputs than ``params`` allows.
        """
        if self._context is None:
            raise RuntimeError("the context is closed")
        if len(tokens) > self.params.n_batch or n_outputs > self.params.n_outputs:
            raise ValueError(f"{len(tokens)} tokens, {n_outputs} outputs: too many for one call")
        first_output = len(tokens) - n_outputs
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = start + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = _SEQ_ID
            batch.logits[index] = index >= first_output
        threads = self._threads()
        load_library().llama_set_n_threads(self._context, threads, threads)
        if code := load_library().llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed ({code})")
        logits = np.empty((n_outputs, self._vocab_size), np.float32)
        for row in range(n_outputs):
            values = load_library().llama_get_logits_ith(self._context, first_output + row)
            logits[row] = np.ctypeslib.as_array(values, (self._vocab_size,))
        return logits

    def truncate(self, length: int) -> bool:
        """Keep the first tokens only. Return False if this model cannot, and drop all then."""
        if load_library().llama_memory_seq_rm(self._memory, _SEQ_ID, length, -1):
            return True
        load_library().llama_memory_seq_rm(self._memory, _SEQ_ID, -1, -1)
        return False

    def copy_state(self, source: Context) -> None:
        """Copy the keys and values of a context of the same model and adapter.

        Raises ``RuntimeError`` if they do not fit.
        """
        lib = load_library()
        size = lib.llama_state_seq_get_size(source._context, _SEQ_ID)
        state = (ctypes.c_uint8 * size)()
        if lib.llama_state_seq_get_data(source._context, state, size, _SEQ_ID) != size:
            raise RuntimeError("llama_state_seq_get_data failed")
        if not lib.llama_state_seq_set_data(self._context, state, size, _SEQ_ID):
            raise RuntimeError("llama_state_seq_set_data failed")

    def clear(self) -> None:
        """Drop all keys and values and overwrite them."""
        load_library().llama_memory_clear(self._memory, True)

    def close(self) -> None:
        """Free its memory. Closing twice is allowed."""
        context, self._context = self._context, None
        if context is not None:
            load_library().llama_batch_free(self._batch)
            load_library().llama_free(context)

    def _set_lora(self, adapter: LoraAdapter | None) -> None:
        lib = load_library()
        adapters = [] if adapter is None else [adapter.pointer]
        pointers = (lib.llama_adapter_lora_p_ctypes * 1)(*adapters)
        scales = (ctypes.c_float * 1)(1.0)
        if lib.llama_set_adapters_lora(self._context, pointers, len(adapters), scales):
            raise RuntimeError("llama_set_adapters_lora failed")
        self.adapter = adapter


@cache
def load_library() -> Any:
    """Import the library, with its log sent to ours.

    Raises ``MissingPackage`` if it is not installed, or cannot be loaded.
    """
    try:
        with extra_required():
            from llama_cpp import llama_cpp
    # Its package turns what the system says into a RuntimeError.
    except (OSError, RuntimeError) as error:
        raise MissingPackage(
            f"The library of llama-cpp-python cannot be loaded: {error}",
            hint="Install it again: pip install --force-reinstall --no-cache-dir llama-cpp-python."
            " Until then use the backend torch.",
        ) from error

    llama_cpp.llama_log_set(_log_callback(llama_cpp), ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


# Cached, so that it is never freed: the library calls it until the process ends.
@cache
def _log_callback(lib: Any) -> Any:
    def write(level: int, text: bytes, _: object) -> None:
        if level in _LOG_LEVELS:
            log.log(_LOG_LEVELS[level], "%s", text.decode(errors="replace").rstrip())

    return lib.llama_log_callback(write)
