"""The options of a learn: budgets, callbacks, and how the build starts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeAlias, TypeVar

from personalpeft.errors import Cancelled, InvalidInput, PersonalPeftError
from personalpeft.learning.train.config import Start
from personalpeft.plugins import CheckedVerifier
from personalpeft.settings import check_choice
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


def cancelled_error(where: str) -> Cancelled:
    """Return the error for a learn that the caller cancelled."""
    return Cancelled(
        f"Stopped {where}; nothing has changed.", hint="The next learn goes on from there."
    )


def check_budget(budget: object, unit: str, *, whole: bool = False) -> None:
    """Check a budget of a learn.

    Args:
        budget: The budget; None for no limit.
        unit: What it counts, in the plural, for the error.
        whole: Whether it must be a whole number.

    Raises:
        InvalidInput: It is neither None nor a number above 0.
    """
    number = isinstance(budget, int if whole else int | float) and not isinstance(budget, bool)
    if budget is not None and not (number and budget > 0):  # type: ignore[operator]  # a number
        kind = "a whole number" if whole else "a number"
        raise InvalidInput(
            f"A budget must be {kind} of {unit} above 0, got {budget!a}.",
            hint=f"Give {kind} above 0, or None for no budget.",
        )


@dataclass(frozen=True, slots=True)
class LearnOptions:
    """The options of ``User.learn``. Raises ``InvalidInput`` for a wrong start or budget.

    ``recipe`` and ``verifier`` concern the one layer that is requested.
    """

    start: Start = "auto"
    seconds: float | None = None
    steps: int | None = None
    max_memory_mb: float | None = None
    dry_run: bool = False
    accept: bool = False
    recipe: Mapping[str, Any] | None = None
    verifier: CheckedVerifier | None = None
    progress: Progress = no_progress
    cancelled: Condition = not_cancelled
    paused: Condition = not_cancelled

    def __post_init__(self) -> None:
        check_choice("start", self.start, Start)
        check_budget(self.seconds, "seconds")
        check_budget(self.steps, "steps", whole=True)
        check_budget(self.max_memory_mb, "MB")

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
