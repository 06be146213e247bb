"""The wired parts of one runtime, shared by chat, feedback, erasure and learning.

Invariant: ``Services`` is frozen. Only ``LazyModel`` changes, when it loads the model.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from weakref import WeakSet

from personalpeft import host
from personalpeft.backends.base import TrainingBackend
from personalpeft.backends.choice import TORCH, BackendChoice
from personalpeft.base_models.types import Base
from personalpeft.chat.examples import ExampleSelector
from personalpeft.chat.reply import Stream
from personalpeft.chat.routing import AdapterRouter
from personalpeft.clock import Clock
from personalpeft.engine.completion_cache import CompletionCache
from personalpeft.engine.core import closed_error
from personalpeft.engine.engine import Engine
from personalpeft.memory.items import Memory
from personalpeft.plugins import Plugins
from personalpeft.settings import ImplicitFeedback
from personalpeft.store.maintenance import Maintenance
from personalpeft.store.store import Store
from personalpeft.types import Stack


class LazyModel:
    """Loads the base, the engines and the completion cache on first use. Thread-safe.

    Args:
        load_base: Returns the base.
        choose: Returns the backend that serves a base. It is asked once, so that both engines fit.
        open_engine: Returns an engine on a backend. Its last argument gives way to another engine,
            and is None for the one that serves.
        open_completions: Returns the cache of completions of the engine that learns.
    """

    def __init__(
        self,
        load_base: Callable[[], Base],
        choose: Callable[[Base], BackendChoice],
        open_engine: Callable[[Base, BackendChoice, Callable[[float], None] | None], Engine],
        open_completions: Callable[[Engine], CompletionCache],
    ) -> None:
        self._load_base = load_base
        self._choose = choose
        self._open_engine = open_engine
        self._open_completions = open_completions
        # Guards the base, the choice and the engine that serves.
        self._lock = threading.RLock()
        # Guards the rest, so that a chat does not wait while an engine is loaded for a learn.
        self._learning_lock = threading.RLock()
        self._base: Base | None = None
        self._choice: BackendChoice | None = None
        self._engine: Engine | None = None
        # None while nothing learns, and where the engine that serves learns too.
        self._learning_engine: Engine | None = None
        self._completions: CompletionCache | None = None
        self._num_learning = 0
        self._is_closed = False

    def base(self) -> Base:
        """Return the base, its files found and hashed. Raises ``WeightsError``, ``CardError``."""
        with self._lock:
            if self._base is None:
                self._base = self._load_base()
            return self._base

    def choice(self) -> BackendChoice:
        """Return the backend that serves, and why. Raises as ``base``."""
        with self._lock:
            if self._choice is None:
                self._choice = self._choose(self.base())
            return self._choice

    def engine(self) -> Engine:
        """Return the engine that serves, with the base loaded."""
        with self._lock:
            if self._engine is None:
                self._check_not_closed()
                self._engine = self._open_engine(self.base(), self.choice(), None)
            return self._engine

    def learning_engine(self) -> Engine:
        """Return the engine that learns, with the base loaded. Use it inside ``learning``."""
        with self._learning_lock:
            if self.choice().trains:
                return self.engine()
            if self._learning_engine is None:
                self._check_not_closed()
                # The prepared files may have been collected since the base was opened.
                self._load_base()
                self._learning_engine = self._open_engine(self.base(), TORCH, self._give_way)
            return self._learning_engine

    def completions(self) -> CompletionCache:
        """Return the cache of completions of general prompts."""
        with self._learning_lock:
            if self._completions is None:
                self._completions = self._open_completions(self.learning_engine())
            return self._completions

    def keep_learning_engine(self) -> None:
        """Keep the engine that learns until ``close``, as in a block that never ends."""
        with self._learning_lock:
            self._num_learning += 1

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Keep the engine that learns inside the block. After the last block its memory is free."""
        engine = self._engine
        backend = None if engine is None else engine.backend
        if isinstance(backend, TrainingBackend) and backend.maps_weights:
            # Weights that were overwritten in their file are served at once. They must not be
            # trained on under the base's digest.
            self._load_base()
        with self._learning_lock:
            self._num_learning += 1
        try:
            yield
        finally:
            engine = None
            with self._learning_lock:
                self._num_learning -= 1
                if not self._num_learning and self._learning_engine is not None:
                    engine, self._learning_engine = self._learning_engine, None
                    self._completions = None
            if engine is not None:
                _close(engine)
                # The model's modules reference each other in cycles.
                del engine
                gc.collect()
                host.return_free_memory()

    def free_learning_cache(self) -> None:
        """Free what an engine that only learns has cached of replies: training needs the memory."""
        with self._learning_lock:
            engine = self._learning_engine
        if engine is not None:
            engine.clear_caches()
            host.return_free_memory()

    def _give_way(self, max_seconds: float) -> None:
        """Wait while users are answered, at most ``max_seconds``."""
        engine = self._engine
        if engine is not None:
            engine.yield_to_foreground(max_seconds)

    @contextmanager
    def preloaded(self, stack: Stack) -> Iterator[None]:
        """Keep a stack in a slot inside the block, if the engine that serves is loaded.

        Raises as ``Engine.pin``.
        """
        with self._lock:
            engine = self._engine
        with nullcontext() if engine is None else engine.pin(stack):
            yield

    def drop_user_caches(self, user: str) -> None:
        """Drop what is cached in memory for a user."""
        with self._learning_lock, self._lock:
            engines, completions = (self._engine, self._learning_engine), self._completions
        if completions is not None:
            completions.evict_user(user)
        for engine in engines:
            if engine is not None:
                engine.clear_caches()

    def _check_not_closed(self) -> None:
        """Raise ``ServingFailed`` after ``close``: nothing would close an engine opened then."""
        if self._is_closed:
            raise closed_error()

    def close(self) -> None:
        """Release the model. Closing twice is allowed."""
        with self._learning_lock, self._lock:
            self._is_closed = True
            engines = self._learning_engine, self._engine
            self._engine = self._learning_engine = None
            self._completions = None
        # Outside the locks: a load that is under way needs one before an engine can end.
        for engine in engines:
            _close(engine)


class OpenStreams:
    """The streams that callers still use. Thread-safe."""

    def __init__(self) -> None:
        self._streams: WeakSet[Stream] = WeakSet()
        self._lock = threading.RLock()

    def add(self, stream: Stream) -> None:
        """Add a stream. It leaves by itself when its caller drops it."""
        with self._lock:
            self._streams.add(stream)

    def snapshot(self) -> tuple[Stream, ...]:
        """Return the streams of this moment."""
        with self._lock:
            return tuple(self._streams)


def _close(engine: Engine | None) -> None:
    if engine is not None:
        engine.close()
        engine.backend.close()


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one home on one base. ``streams`` holds the streams that callers still use.

    ``train``: whether new signals may be trained on, where the caller does not say.
    """

    store: Store
    memory: Memory
    router: AdapterRouter
    examples: ExampleSelector
    clock: Clock
    plugins: Plugins
    model: LazyModel
    implicit_feedback: ImplicitFeedback = "off"
    train: bool = True
    streams: OpenStreams = field(default_factory=OpenStreams)

    @property
    def base(self) -> Base:
        """The open base, prepared on first use."""
        return self.model.base()

    @property
    def engine(self) -> Engine:
        """The engine that serves, loaded on first use."""
        return self.model.engine()

    @property
    def learning_engine(self) -> Engine:
        """The engine that learns and judges, loaded on first use."""
        return self.model.learning_engine()

    @property
    def training_backend(self) -> TrainingBackend:
        """The backend that trains."""
        backend = self.learning_engine.backend
        if not isinstance(backend, TrainingBackend):
            raise TypeError(f"the backend {backend.name} does not train")
        return backend

    @property
    def completions(self) -> CompletionCache:
        """The cache of completions of general prompts."""
        return self.model.completions()

    @property
    def maintenance(self) -> Maintenance:
        """The maintenance of the home."""
        return Maintenance(self.store)

    def allows_training(self, user: str) -> bool:
        """Return whether both the runtime and the user allow training on new signals."""
        return self.train and self.store.catalog.allows_training(user)

    def drop_user_caches(self, user: str) -> None:
        """Drop what is cached in memory for a user."""
        self.memory.evict_user(user)
        self.router.evict_user(user)
        self.examples.evict_user(user)
        self.model.drop_user_caches(user)
