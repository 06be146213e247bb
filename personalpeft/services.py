"""The wired parts of one runtime, shared by chat, feedback, erasure and learning.

Invariant: ``Services`` is frozen. Only ``LazyModel`` changes, when it loads the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

from personalpeft.base_models.types import Base
from personalpeft.chat.reply import Stream
from personalpeft.chat.routing import AdapterRouter
from personalpeft.clock import Clock
from personalpeft.engine.completion_cache import CompletionCache
from personalpeft.engine.engine import Engine
from personalpeft.memory.items import Memory
from personalpeft.plugins import Plugins
from personalpeft.settings import Observing
from personalpeft.store.store import Store
from personalpeft.types import Message, Stack


class LazyModel:
    """Loads the base, the engine and the completion cache on first use. Thread-safe."""

    def __init__(
        self,
        load_base: Callable[[], Base],
        load_engine: Callable[[Base], Engine],
        load_completions: Callable[[Engine], CompletionCache],
    ) -> None:
        self._load_base = load_base
        self._load_engine = load_engine
        self._load_completions = load_completions
        self._lock = threading.RLock()
        self._base: Base | None = None
        self._engine: Engine | None = None
        self._completions: CompletionCache | None = None

    def base(self) -> Base:
        """Return the base, its files found and hashed. Raises ``WeightsError``, ``CardError``."""
        with self._lock:
            if self._base is None:
                self._base = self._load_base()
            return self._base

    def engine(self) -> Engine:
        """Return the engine, with the base loaded."""
        with self._lock:
            if self._engine is None:
                self._engine = self._load_engine(self.base())
            return self._engine

    def completions(self) -> CompletionCache:
        """Return the cache of completions of general prompts."""
        with self._lock:
            if self._completions is None:
                self._completions = self._load_completions(self.engine())
            return self._completions

    def preload(self, stack: Stack) -> None:
        """Bring a stack into a device slot if the engine is loaded. Raises as the engine does."""
        with self._lock:
            engine = self._engine
        if engine is not None:
            engine.preload(stack)

    def drop_user_caches(self, user: str) -> None:
        """Drop what is cached in memory for a user."""
        with self._lock:
            engine, completions = self._engine, self._completions
        if completions is not None:
            completions.evict_user(user)
        if engine is not None:
            engine.clear_caches()

    def close(self) -> None:
        """Release the model. Closing twice is allowed."""
        with self._lock:
            engine, self._engine = self._engine, None
            self._completions = None
        # Outside the lock: a load that is under way needs it before the engine can end.
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
    clock: Clock
    plugins: Plugins
    model: LazyModel
    observing: Observing = "off"
    train: bool = True
    streams: WeakSet[Stream] = field(default_factory=WeakSet)

    @property
    def base(self) -> Base:
        """The open base, prepared on first use."""
        return self.model.base()

    @property
    def engine(self) -> Engine:
        """The serving engine, loaded on first use."""
        return self.model.engine()

    @property
    def completions(self) -> CompletionCache:
        """The cache of completions of general prompts."""
        return self.model.completions()

    def allows_training(self, user: str) -> bool:
        """Return whether both the runtime and the user allow training on new signals."""
        return self.train and self.store.catalog.allows_training(user)

    def render_with_item(
        self, user: str, item: str, messages: Sequence[Message]
    ) -> tuple[Message, ...]:
        """Return the messages as the base reads them with one rule or fact in the prompt.

        Args:
            user: The owner.
            item: The id of the rule or fact.
            messages: The prompt.
        """
        return self.memory.render_with_item(user, item, messages, system=self.base.card.system)

    def drop_user_caches(self, user: str) -> None:
        """Drop what is cached in memory for a user."""
        self.router.evict_user(user)
        self.model.drop_user_caches(user)
