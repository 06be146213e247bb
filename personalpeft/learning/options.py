"""What a caller sets of a learn, and the status that others see while it runs.

Invariants: the status exists only while the lease is held, so a learner that was killed leaves
none. Publishing it commits nothing, changes nothing of a build, and fails no learn.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import ParamSpec, TypeAlias, TypeVar, get_args

from personalpeft.errors import InvalidInput, PersonalPeftError
from personalpeft.learning.train.config import Start
from personalpeft.store.store import Store
from personalpeft.types import Progress

Condition: TypeAlias = Callable[[], bool]

P = ParamSpec("P")
T = TypeVar("T")

_PAUSE_POLL_SECONDS = 0.05


def no_progress(stage: str, done: float) -> None:
    """Ignore progress."""


def not_cancelled() -> bool:
    """Return False: the caller neither stops nor pauses."""
    return False


def wait_while(paused: Condition, cancelled: Condition) -> None:
    """Wait until the caller no longer pauses, or stops."""
    idle = threading.Event()
    while paused() and not cancelled():
        idle.wait(_PAUSE_POLL_SECONDS)


def check_budget(budget: object, unit: str, *, whole: bool = False) -> None:
    """Raise ``InvalidInput`` for a budget that is neither None nor a number above 0."""
    number = isinstance(budget, int if whole else int | float) and not isinstance(budget, bool)
    if budget is not None and not (number and budget > 0):  # type: ignore[operator]  # a number
        kind = "a whole number" if whole else "a number"
        raise InvalidInput(
            f"A budget must be {kind} of {unit} above 0, got {budget!a}.",
            hint=f"Give {kind} above 0, or None for no budget.",
        )


@dataclass(frozen=True, slots=True)
class LearnOptions:
    """The options of ``User.learn``. Raises ``InvalidInput`` for a wrong start or budget."""

    start: Start = "auto"
    seconds: float | None = None
    steps: int | None = None
    memory: float | None = None
    dry_run: bool = False
    accept: bool = False
    progress: Progress = no_progress
    cancelled: Condition = not_cancelled
    paused: Condition = not_cancelled

    def __post_init__(self) -> None:
        if self.start not in get_args(Start):
            raise InvalidInput(
                f"The start of a build must be 'auto' or 'nothing', got {self.start!a}.",
                hint="Give 'auto' or 'nothing'.",
            )
        check_budget(self.seconds, "seconds")
        check_budget(self.steps, "steps", whole=True)
        check_budget(self.memory, "MB")

    def capturing_errors(self, raised: list[Exception]) -> LearnOptions:
        """Return the same options, whose callbacks add unexpected errors to ``raised``."""

        def capture(callback: Callable[P, T]) -> Callable[P, T]:
            def call(*args: P.args, **kwargs: P.kwargs) -> T:
                try:
                    return callback(*args, **kwargs)
                except PersonalPeftError:
                    raise
                except Exception as error:
                    raised.append(error)
                    raise

            return call

        return replace(
            self,
            progress=capture(self.progress),
            cancelled=capture(self.cancelled),
            paused=capture(self.paused),
        )


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
