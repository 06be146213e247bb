"""Train and score for a base that a vLLM server serves, on a torch backend that exists on demand.

Invariants: torch is loaded for the first session or scores. It is freed with the last session, or
some seconds after the last scores, since a gate scores many times. A session keeps the stack below
that it was opened with. Attaching and detaching stacks does not change it.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from personalpeft.adapters.types import AdapterStack
from personalpeft.backends.base import (
    Continuation,
    ForwardResult,
    Loss,
    Score,
    Session,
    SessionSpec,
)
from personalpeft.base_models.types import Base
from personalpeft.settings import LearningDevice, WeightsMode

if TYPE_CHECKING:
    from personalpeft.backends.torch.backend import TorchBackend

# For all sessions and scores at once. An unused slot takes no memory.
_SLOTS = 32
# A gate scores some twenty times in a minute or two, and torch takes seconds to load.
_LINGER_SECONDS = 30.0


class OnDemandTorch:
    """Safe to use from any thread. Torch stays for ``linger`` seconds after the last scores."""

    def __init__(
        self,
        base: Base,
        *,
        cache: Path | None,
        linger: float = _LINGER_SECONDS,
        weights: WeightsMode = "auto",
        learning_device: LearningDevice = "auto",
    ) -> None:
        self._base, self._cache, self._linger, self._weights = base, cache, linger, weights
        self._learning_device = learning_device
        self._lock = threading.Lock()
        self._backend: TorchBackend | None = None
        # Open sessions by the key of the stack below.
        self._sessions: Counter[str | None] = Counter()
        self._num_scoring = 0
        self._key_numbers = itertools.count()
        self._unload_timer: threading.Timer | None = None
        self._closed = False

    def session(self, spec: SessionSpec, frozen: AdapterStack | None) -> Session:
        """See ``Backend.session``; ``frozen`` is the stack of ``spec.base_key``."""
        key = None if frozen is None else f"below {spec.base_key}"
        with self._lock:
            backend = self._load()
            try:
                if key is not None and frozen is not None:
                    backend.attach(key, backend.stage(frozen))
                session = backend.session(
                    replace(spec, base_key=key), on_close=lambda: self._release_session(key)
                )
            except BaseException:
                self._detach_unused(key)
                self._unload_if_idle()
                raise
            self._sessions[key] += 1
        return session

    def score(
        self,
        items: Sequence[Continuation],
        stack: AdapterStack | None,
        *,
        kl: bool = False,
        top: int = 0,
    ) -> tuple[Score, ...]:
        """See ``Backend.score``; the numbers are torch's."""
        key = None if stack is None else f"scored {next(self._key_numbers)}"
        with self._lock:
            backend = self._load()
            self._num_scoring += 1
        try:
            if key is not None and stack is not None:
                backend.attach(key, backend.stage(stack))
            return backend.score(items, key, kl=kl, top=top)
        finally:
            with self._lock:
                self._num_scoring -= 1
                self._detach_unused(key)
                self._unload_if_idle(self._linger)

    def advance(
        self, sessions: Sequence[Session], terms: Sequence[Sequence[Loss]], rates: Sequence[float]
    ) -> tuple[float, ...]:
        """See ``Backend.advance``."""
        return self._loaded().advance(sessions, terms, rates)

    def forward_backward(
        self,
        sessions: Sequence[Session],
        terms: Sequence[Sequence[Loss]],
        *,
        backward: bool = True,
        logprobs: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> tuple[tuple[ForwardResult, ...], ...]:
        """See ``Backend.forward_backward``."""
        return self._loaded().forward_backward(
            sessions, terms, backward=backward, logprobs=logprobs, between=between
        )

    def close(self) -> None:
        """Free the weights when the last session and scores end. Closing twice is allowed."""
        with self._lock:
            self._closed = True
            self._unload_if_idle()

    def _release_session(self, key: str | None) -> None:
        """Record that a session above the stack of this key was closed."""
        with self._lock:
            self._sessions[key] -= 1
            self._detach_unused(key)
            # A running timer belongs to scores that came meanwhile.
            if self._unload_timer is None:
                self._unload_if_idle()

    def _loaded(self) -> TorchBackend:
        """Return the backend that open sessions are on. Raises ``ValueError``."""
        backend = self._backend
        if backend is None:
            raise ValueError("sessions must be open sessions of this backend")
        return backend

    def _load(self) -> TorchBackend:
        if self._closed:
            raise RuntimeError("the backend is closed")
        if self._backend is None:
            from personalpeft.backends.torch.backend import TorchBackend
            from personalpeft.backends.torch.device import choose_learning_device

            where = choose_learning_device(self._base, self._learning_device, self._weights)
            self._backend = TorchBackend(
                self._base,
                slots=_SLOTS,
                rows=1,
                where=where,
                cache=self._cache,
                weights=self._weights,
            )
        return self._backend

    def _detach_unused(self, key: str | None) -> None:
        if key is not None and not self._sessions[key] and self._backend is not None:
            self._backend.detach(key)

    def _unload_if_idle(self, delay: float = 0.0) -> None:
        """Free the weights unless they are in use, now or after some seconds."""
        if self._unload_timer is not None:
            self._unload_timer.cancel()
            self._unload_timer = None
        if self._sessions.total() or self._num_scoring:
            return
        if delay and not self._closed:
            self._unload_timer = threading.Timer(delay, self._on_timer)
            self._unload_timer.name = "personalpeft-torch-unload"
            self._unload_timer.daemon = True
            self._unload_timer.start()
            return
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()
            # The model's modules reference each other in cycles.
            gc.collect()
            from personalpeft.backends.torch.device import release_memory

            release_memory()

    def _on_timer(self) -> None:
        with self._lock:
            # A later use may have replaced this timer.
            if threading.current_thread() is self._unload_timer:
                self._unload_if_idle()
