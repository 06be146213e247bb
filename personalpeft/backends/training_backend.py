"""Where layers are learned for a base that another backend serves: the torch backend, there only while something learns.

Invariants: torch is loaded with the first session, or the first scores, and its weights are let go with the last session or a
while after the last scores, since who asked for some soon asks for more; the layer below a session is the stack that the session
was opened with, whatever is attached or detached meanwhile.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from personalpeft.adapters.types import Composed, Pair
from personalpeft.backends.base import Continuation, Score, Session, SessionSpec, Loss
from personalpeft.base_models.types import Base

if TYPE_CHECKING:
    from personalpeft.backends.torch.backend import TorchBackend

# For all that learn at once and what is scored beside them; one that nobody uses takes no memory.
_SLOTS = 32
# A gate scores some twenty times in a minute or two, and torch takes seconds to load.
_WHILE = 30.0


class LearningSide:
    """Safe from any thread. ``linger`` is for how long, in seconds, torch stays after the last scores."""

    def __init__(self, base: Base, *, cache: Path | None, linger: float = _WHILE) -> None:
        self._base, self._cache, self._linger = base, cache, linger
        self._turn = threading.Lock()
        self._backend: TorchBackend | None = None
        # What each open session stands on.
        self._open: list[str | None] = []
        # How many are scoring now, and the end of the while after the last of them.
        self._scoring = 0
        self._names = itertools.count()
        self._leaving: threading.Timer | None = None
        self._closed = False

    def session(self, spec: SessionSpec, below: Composed | None) -> Session:
        """See ``Backend.session``; ``below`` is the stack that ``spec.below`` names."""
        key = None if below is None else f"below {spec.below}"
        with self._turn:
            if self._closed:
                raise RuntimeError("the backend is closed")
            try:
                backend = self._loaded()
                if key is not None and below is not None:
                    backend.attach(key, backend.stage(below))
                inner = backend.session(replace(spec, below=key))
            except BaseException:
                self._detached(key)
                self._leave()
                raise
            self._open.append(key)
        return _Lent(inner, self, key)

    def score(
        self, items: Sequence[Continuation], stack: Composed | None, *, kl: bool = False
    ) -> tuple[Score, ...]:
        """As ``Backend.score``, in torch's numbers."""
        key = None if stack is None else f"scored {next(self._names)}"
        with self._turn:
            if self._closed:
                raise RuntimeError("the backend is closed")
            backend = self._loaded()
            self._scoring += 1
        try:
            if key is not None and stack is not None:
                backend.attach(key, backend.stage(stack))
            return backend.score(items, key, kl=kl)
        finally:
            with self._turn:
                self._scoring -= 1
                self._detached(key)
                self._leave(self._linger)

    def advance(
        self, sessions: Sequence[Session], terms: Sequence[Sequence[Loss]], rates: Sequence[float]
    ) -> tuple[float, ...]:
        """See ``Backend.advance``."""
        own = [
            session.inner
            for session in sessions
            if isinstance(session, _Lent) and session.owner is self
        ]
        if len(own) < len(sessions) or self._backend is None:
            raise ValueError("these are not sessions of this backend")
        return self._backend.advance(own, terms, rates)

    def given_back(self, key: str | None) -> None:
        """A session above this stack was closed."""
        with self._turn:
            self._open.remove(key)
            self._detached(key)
            # What was scored meanwhile has its while yet.
            if self._leaving is None:
                self._leave()

    def close(self) -> None:
        """Lets go of the weights. Closing twice is fine."""
        with self._turn:
            self._closed = True
            self._leave()

    def _detached(self, key: str | None) -> None:
        """Frees the slot of a stack that nobody needs any more."""
        if key is not None and key not in self._open and self._backend is not None:
            self._backend.detach(key)

    def _leave(self, after: float = 0.0) -> None:
        """Lets go of the weights, now or after so many seconds, where nobody needs them then."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        if self._open or self._scoring:
            return
        if after and not self._closed:
            self._leaving = threading.Timer(after, self._left)
            self._leaving.name = "personalpeft-torch-leaves"
            self._leaving.daemon = True
            self._leaving.start()
        else:
            self._let_go()

    def _left(self) -> None:
        """The while after some scores is over, unless others came meanwhile."""
        with self._turn:
            if threading.current_thread() is self._leaving:
                self._leave()

    def _loaded(self) -> TorchBackend:
        if self._backend is None:
            from personalpeft.backends.torch.backend import TorchBackend

            self._backend = TorchBackend(self._base, slots=_SLOTS, rows=1, cache=self._cache)
        return self._backend

    def _let_go(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()
            # The model's modules point to each other in circles.
            gc.collect()


class _Lent:
    """A session of the torch backend, which goes when all of them are closed."""

    def __init__(self, inner: Session, owner: LearningSide, key: str | None) -> None:
        self.inner = inner
        self.owner: LearningSide | None = owner
        self._key = key

    def precompute_ref_log_probs(self, terms: Sequence[Loss]) -> None:
        self.inner.precompute_ref_log_probs(terms)

    def step(self, terms: Sequence[Loss], learning_rate: float) -> float:
        return self.inner.step(terms, learning_rate)

    def pairs(self) -> Mapping[str, Pair]:
        return self.inner.pairs()

    def state(self) -> Mapping[str, npt.NDArray[np.float32]]:
        return self.inner.state()

    def restore(self, state: Mapping[str, npt.NDArray[np.float32]]) -> None:
        self.inner.restore(state)

    def close(self) -> None:
        owner, self.owner = self.owner, None
        if owner is not None:
            self.inner.close()
            owner.given_back(self._key)
