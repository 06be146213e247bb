"""What all who build layers work with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from personalpeft.engine.engine import Engine
from personalpeft.learning.evaluate.completion_cache import Voices
from personalpeft.learning.evaluate.evaluation import Scoping
from personalpeft.learning.gate.gate import Margins
from personalpeft.learning.options import Order
from personalpeft.learning.train.loop import Manners
from personalpeft.store.base import Store
from personalpeft.types import Message

# How long people may keep a build waiting, in seconds for each step: a server that is never idle still learns in the end.
_PATIENCE = 5.0

Heard: TypeAlias = Callable[[str, str, Sequence[Message]], tuple[Message, ...]]


@dataclass(frozen=True, slots=True)
class Means:
    """One home and one base. ``now`` gives aware datetimes, ``timer`` seconds that never go back; ``voices`` outlives a
    learn; ``heard`` says how a user's messages are heard with one of their rules or facts in the prompt.
    """

    store: Store
    engine: Engine
    voices: Voices
    scoping: Scoping
    margins: Margins
    now: Callable[[], datetime]
    timer: Callable[[], float]
    heard: Heard

    def manners(self, order: Order, began: float, progress: Callable[[float], None]) -> Manners:
        """How a build that was ordered so, and ``began`` then on the timer, behaves between two steps."""
        return Manners(
            progress=progress,
            cancelled=order.cancelled,
            paused=order.paused,
            out_of_time=lambda: order.seconds is not None and self.timer() - began > order.seconds,
            give_way=lambda: self.engine.give_way(_PATIENCE),
            steps=order.steps,
        )
