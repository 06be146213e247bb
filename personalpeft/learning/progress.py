"""What is being learned at this moment, in whatever program on the home: who learns says so beside their lease, and everybody
may ask.

Invariants: it is there only while the lease is held, so a learner that was killed leaves nothing that looks like a learn;
saying it commits nothing, changes nothing of what is built, and fails no learn.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime

from personalpeft.store.base import Store


@dataclass(frozen=True, slots=True)
class Learning:
    """What a learn, a practice or a forgetting of a user does now. ``stage`` is "Reading", "Learning", "Practising" or "Judging",
    and ``layer`` what it is about: empty and None before it has come to one. ``step`` of ``steps`` are done (rounds, where it
    practises); 0 of 0 before there are any. ``since`` is when it began.
    """

    layer: str | None
    stage: str
    step: int
    steps: int
    since: datetime

    @property
    def done(self) -> float:
        """How much of the steps is done, 0 to 1."""
        return self.step / self.steps if self.steps else 0.0


def say(store: Store, user: str, layer: str, stage: str, step: int = 0, steps: int = 0) -> None:
    """Says it for a user whose lease this process holds."""
    store.say(_lease(user), json.dumps([layer, stage, step, steps]))


def underway(store: Store, user: str) -> Learning | None:
    """As ``User.learning``."""
    holder = store.holder(_lease(user))
    if holder is None:
        return None
    layer, stage, step, steps = json.loads(holder.doing) if holder.doing else (None, "", 0, 0)
    return Learning(layer, stage, step, steps, datetime.fromisoformat(holder.since))


def _lease(user: str) -> str:
    return f"learn-{user}"
