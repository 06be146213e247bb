"""Score continuations under a stack, one after another in a context of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from personalpeft.backends.base import Continuation, Score
from personalpeft.backends.llamacpp.binding import Context, ContextParams, Logits, LoraAdapter
from personalpeft.backends.sampler import log_softmax, top_logprobs

_MIN_CTX = 512


class Scorer:
    """Score from several threads, which take turns by the item.

    Each library call holds ``lock`` alone, so the batch waits for one call at most. Between items
    the context has no adapter, so that any adapter may be freed then. The context is made as large
    as an item needs, up to ``params.n_ctx``, and kept until a longer item comes.
    """

    def __init__(
        self,
        params: ContextParams,
        new_context: Callable[[ContextParams, LoraAdapter | None], Context],
        lock: threading.Lock,
    ) -> None:
        self._params, self._new_context, self._lock = params, new_context, lock
        self._item_lock = threading.Lock()
        self._context: Context | None = None
        self._closed = False

    def score(
        self, items: Sequence[Continuation], adapter: LoraAdapter | None, *, kl: bool, top: int
    ) -> tuple[Score, ...]:
        """See ``Backend.score``. The caller keeps the adapter loaded meanwhile.

        Raises ``RuntimeError`` when closed, also between two items: the model is freed then.
        """
        return tuple(self._score(item, adapter, kl=kl, top=top) for item in items)

    def clear(self) -> None:
        """Free the memory after the current item, until the next item."""
        with self._item_lock:
            self._close_context()

    def close(self) -> None:
        """Free the memory after the current item. Closing twice is allowed."""
        with self._item_lock:
            self._closed = True
            self._close_context()

    def _score(
        self, item: Continuation, adapter: LoraAdapter | None, *, kl: bool, top: int
    ) -> Score:
        if not item.prompt or not item.completion:
            raise ValueError("a continuation must have a prompt and a completion")
        with self._item_lock:
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
        context = self._context_for(len(tokens))
        with self._lock:
            context.set_adapter(adapter)
        logp = []
        start, first = 0, len(item.prompt) - 1
        try:
            while start < len(tokens):
                # As many tokens as a call takes, and as many outputs.
                end = min(
                    start + self._params.n_batch,
                    max(start, first) + self._params.n_outputs,
                    len(tokens),
                )
                n_outputs = max(0, end - max(start, first))
                with self._lock:
                    logp.append(log_softmax(context.decode(tokens[start:end], start, n_outputs)))
                start = end
        finally:
            # The library compares addresses, and would take a new adapter there for this one.
            with self._lock:
                context.set_adapter(None)
        return np.concatenate(logp)

    def _context_for(self, length: int) -> Context:
        if length > self._params.n_ctx:
            raise ValueError(f"{length} tokens do not fit in memory: {self._params.n_ctx} do")
        if self._context is None or self._context.params.n_ctx < length:
            self._close_context()
            n_ctx = min(self._params.n_ctx, max(_MIN_CTX, 1 << (length - 1).bit_length()))
            self._context = self._new_context(replace(self._params, n_ctx=n_ctx), None)
        return self._context

    def _close_context(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.close()
