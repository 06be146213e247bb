"""The status of a user's running learn, which other processes read.

Invariants: the status exists only while the lease is held, so a learner that was killed leaves
none. Publishing it commits nothing, changes nothing of a build, and fails no learn.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime

from personalpeft.store.store import Store


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """What a learn, a practice or an erasure of a user does now.

    ``layer`` is None and ``stage`` empty before it has come to one. The stage is "Reading",
    "Learning", "Practising" or "Judging". ``step`` of ``steps`` are done, or rounds of a practice;
    0 of 0 before there are any. ``since`` is when it began.
    """

    layer: str | None
    stage: str
    step: int
    steps: int
    since: datetime

    @property
    def done(self) -> float:
        """The share of the steps that is done."""
        return self.step / self.steps if self.steps else 0.0


def publish_status(
    store: Store, user: str, layer: str, stage: str, step: int = 0, steps: int = 0
) -> None:
    """Publish the status for a user whose lease this process holds."""
    store.leases.set_status(f"learn-{user}", json.dumps([layer, stage, step, steps]))


def training_status(store: Store, user: str) -> TrainingStatus | None:
    """Return the status of a user, or None. See ``User.training_status``."""
    holder = store.leases.holder(f"learn-{user}")
    if holder is None:
        return None
    layer, stage, step, steps = json.loads(holder.status) if holder.status else (None, "", 0, 0)
    return TrainingStatus(layer, stage, step, steps, datetime.fromisoformat(holder.since))
