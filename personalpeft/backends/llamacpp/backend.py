"""The llama.cpp backend: llama.cpp serves the base's own GGUF file. It does not train."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from personalpeft import file_system, host
from personalpeft.adapters.formats.gguf import write_gguf_lora
from personalpeft.adapters.types import AdapterStack
from personalpeft.backends.base import Continuation, Score, StagedStack
from personalpeft.backends.batch_backend import BatchBackend
from personalpeft.backends.llamacpp.batch import Batch
from personalpeft.backends.llamacpp.binding import ContextParams, Logits, LoraAdapter, Model
from personalpeft.backends.llamacpp.context_pool import CHUNK, ContextPool, MemoryBudget
from personalpeft.backends.llamacpp.cpu_probe import probe_cpu
from personalpeft.backends.openmp import release_threads
from personalpeft.backends.sampler import log_softmax, top_logprobs
from personalpeft.backends.thread_governor import ThreadGovernor, thread_counts
from personalpeft.base_models.gguf.tensor_names import GgufNames, gguf_names
from personalpeft.base_models.gguf.writer import resolve_gguf_file
from personalpeft.base_models.types import Base

# Activations are rounded to 8 bits in blocks, so numbers may change with how many tokens one call
# computes. A score reads as a prompt what the reply computed token by token.
_LOGPROB_TOLERANCE = 0.1
# The part of the machine's memory that all contexts may take.
_MEMORY_SHARE = 1 / 8
# Tokens of a usual sequence, and the size of the only context where memory is short.
_USUAL_LENGTH, _MIN_CTX = 512, 256
# Tokens and distributions in one call of scoring; each distribution has the size of the vocabulary.
_SCORE_BATCH, _SCORE_OUTPUTS = 256, 32
# The smallest context of an item to score.
_MIN_SCORE_CTX = 512


class LlamaCppBackend(BatchBackend):
    """See ``personalpeft.backends.base.Backend``. Supports the architectures of ``gguf_names``.

    Several threads may score, and take turns by the item. An item has a context of its own. Each call
    of the library holds the lock alone, so the batch waits for one call at most.
    """

    name = "llamacpp"
    _batch: Batch
    logprob_tolerance = _LOGPROB_TOLERANCE
    batch_invariant = True

    def __init__(
        self, base: Base, *, slots: int = 8, rows: int = 16, cache: Path, threads: int | None = None
    ) -> None:
        self._lock = threading.Lock()
        super().__init__(base, lock=self._lock)
        self.slots, self.rows = slots, rows
        self._names = names = gguf_names(base)
        self._file = resolve_gguf_file(base, names)
        probe = probe_cpu(self._file, cache)
        threads = threads or host.usable_cores()
        # The lock guards it, as it guards the batch and the scorer.
        governor = ThreadGovernor(thread_counts(threads), host.usable_cores())
        self._model = Model(self._file, repack=probe.repack, threads=governor.threads)
        params = ContextParams(_MIN_CTX, CHUNK, 1, names.full)
        wanted = base.card.context + rows * _USUAL_LENGTH
        budget = memory_budget(names, self._model.vocab_size, params, wanted=wanted)
        self.max_length = min(budget.n_ctx, base.card.context)
        self.description = f"llama.cpp on the processor, up to {threads} threads; {probe.reason}"
        self._adapters: dict[str, LoraAdapter] = {}
        self._pool = ContextPool(budget, params, self._model.new_context, max_free=slots)
        self._batch = Batch(
            self._pool, self._adapters, self._tokenizer, rows=rows, max_length=self.max_length
        )
        self._score_lock = threading.Lock()
        self._closed = False

    def stage(self, adapter: AdapterStack) -> StagedStack:
        return adapter

    def attach(self, key: str, staged: StagedStack) -> None:
        if not isinstance(staged, AdapterStack):
            raise TypeError("the stack was staged for another backend")
        # The batch waits neither for writing nor for loading.
        self._adapters[key] = load_stack(self._model, self._names, staged)

    def detach(self, key: str) -> None:
        with self._lock:
            if adapter := self._adapters.pop(key, None):
                # It is removed from all contexts before it is freed.
                self._pool.remove_adapter(adapter)
                adapter.close()

    def clear_cache(self) -> None:
        with self._lock:
            self._batch.clear_cache()

    def check_integrity(self) -> None:
        with self._lock:
            self._batch.check_integrity()

    def score(
        self, items: Sequence[Continuation], stack: str | None, *, kl: bool = False, top: int = 0
    ) -> tuple[Score, ...]:
        adapter = None if stack is None else self._adapters[stack]
        try:
            return tuple(self._score(item, adapter, kl=kl, top=top) for item in items)
        finally:
            release_threads()

    def close(self) -> None:
        """Free the model and all contexts after the item that is being scored."""
        with self._score_lock, self._lock:
            self._closed = True
            self._batch.close()
            while self._adapters:
                self._adapters.popitem()[1].close()
            self._model.close()

    def _score(
        self, item: Continuation, adapter: LoraAdapter | None, *, kl: bool, top: int
    ) -> Score:
        if not item.prompt or not item.completion:
            raise ValueError("a continuation must have a prompt and a completion")
        with self._score_lock:
            if self._closed:
                raise RuntimeError("the backend is closed")
            logp = self._read(item, adapter)
            base_logp = self._read(item, None) if kl else None
        tokens = logp[np.arange(len(item.completion)), list(item.scored)]
        divergence = None
        if base_logp is not None:
            divergence = float((np.exp(base_logp) * (base_logp - logp)).sum(-1).mean())
        return Score(
            float(tokens.mean()), divergence, tuple(tokens.tolist()), top_logprobs(logp, top)
        )

    def _read(self, item: Continuation, adapter: LoraAdapter | None) -> Logits:
        """Return ``[completion, vocabulary]`` log-probs at each token of the completion."""
        tokens = (*item.prompt, *item.completion[:-1])
        if len(tokens) > self.max_length:
            raise ValueError(f"{len(tokens)} tokens do not fit in memory: {self.max_length} do")
        n_ctx = min(self.max_length, max(_MIN_SCORE_CTX, len(tokens)))
        params = ContextParams(n_ctx, _SCORE_BATCH, _SCORE_OUTPUTS, self._names.full)
        logp = []
        start, first = 0, len(item.prompt) - 1
        with closing(self._model.new_context(params, adapter)) as context:
            while start < len(tokens):
                # As many tokens as a call takes, and as many outputs.
                end = min(start + _SCORE_BATCH, max(start, first) + _SCORE_OUTPUTS, len(tokens))
                n_outputs = max(0, end - max(start, first))
                with self._lock:
                    logp.append(log_softmax(context.decode(tokens[start:end], start, n_outputs)))
                start = end
        return np.concatenate(logp)


def load_stack(model: Model, names: GgufNames, stack: AdapterStack) -> LoraAdapter:
    """Write a stack as one GGUF LoRA and load it. The library reads from a path only."""
    with file_system.temporary_file("stack.gguf") as file:
        write_gguf_lora(names, stack, file)
        return model.load_adapter(file)


def memory_budget(
    names: GgufNames, vocab_size: int, params: ContextParams, *, wanted: int
) -> MemoryBudget:
    """Return what all contexts may take: one short context at least.

    Args:
        names: The base's tensor names in GGUF files.
        vocab_size: Tokens of the vocabulary.
        params: The size of a context.
        wanted: Tokens of all contexts, if there is memory for them.
    """
    per_token, per_context = context_bytes(names, vocab_size, params)
    memory = max(int(host.total_memory() * _MEMORY_SHARE), per_context + _MIN_CTX * per_token)
    n_ctx = MemoryBudget(wanted, memory, per_token, per_context).remaining([])
    return MemoryBudget(n_ctx, memory, per_token, per_context)


def context_bytes(names: GgufNames, vocab_size: int, params: ContextParams) -> tuple[int, int]:
    """Return upper bounds of a context's bytes: for each token, and in addition to these.

    The library has no function for it, and logs a little less.

    Args:
        names: The base's tensor names in GGUF files.
        vocab_size: Tokens of the vocabulary.
        params: The size of a context.
    """
    # Distributions are in memory twice, where they are computed and where they are read.
    distributions = 2 * params.n_outputs * vocab_size
    hidden, feed_forward = int(names.config["hidden_size"]), int(names.config["intermediate_size"])
    activations = params.n_batch * (3 * hidden + 4 * feed_forward)
    # For each token of a call and each position: a mask and the attention scores.
    heads = int(names.config["num_attention_heads"])
    attention = params.n_batch * (3 + heads)
    return names.bytes_per_token + 4 * attention, 4 * (distributions + activations)
