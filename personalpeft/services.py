"""What the methods of a user work with: the opened parts of one runtime, wired by it and shared by all its users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

from personalpeft.base_models.types import Base
from personalpeft.chat.reply import Stream
from personalpeft.chat.routing import Scopes
from personalpeft.clock import Clock
from personalpeft.engine.engine import Engine
from personalpeft.learning.learner import Learner
from personalpeft.learning.rl.trainer import Coach
from personalpeft.memory.items import Memory
from personalpeft.plugins import Plugins
from personalpeft.settings import Observing
from personalpeft.store.base import Store
from personalpeft.types import Stack


@dataclass(frozen=True, slots=True)
class Parts:
    """Base, engine and learner are made when first asked for, since a model takes a while to load; ``warm`` brings a
    stack into its slot where one is loaded, and ``forget`` lets go of all that is kept in memory for a user. ``streams`` are
    those that somebody still holds.
    """

    store: Store
    memory: Memory
    scopes: Scopes
    clock: Clock
    base: Callable[[], Base]
    engine: Callable[[], Engine]
    warm: Callable[[Stack], None]
    learner: Callable[[], Learner]
    coach: Callable[[], Coach]
    plugins: Plugins
    forget: Callable[[str], None]
    streams: WeakSet[Stream] = field(default_factory=WeakSet)
    observing: Observing = "off"
