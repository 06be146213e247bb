"""What a caller asks of a learn beside its layer: where to start, how much it may take, and how to talk to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeAlias, TypeVar, get_args

from personalpeft.errors import InvalidInput, PersonalPeftError
from personalpeft.learning.train.config import Start
from personalpeft.types import Progress

Asking: TypeAlias = Callable[[], bool]

P = ParamSpec("P")
T = TypeVar("T")

# Seconds between two looks at a caller that has paused.
_LOOK = 0.05


def silent(stage: str, done: float) -> None:
    """Progress that nobody hears."""


def never() -> bool:
    """Of who does not stop and does not pause."""
    return False


def wait_while(paused: Asking, cancelled: Asking) -> None:
    """Until nobody pauses it; a caller who wants to stop does not wait."""
    idle = threading.Event()
    while paused() and not cancelled():
        idle.wait(_LOOK)


def check_budget(budget: object, unit: str, *, whole: bool = False) -> None:
    """Raises ``InvalidInput`` for what is no number above 0; None is no budget, which is fine."""
    number = isinstance(budget, int if whole else int | float) and not isinstance(budget, bool)
    if budget is not None and not (number and budget > 0):  # type: ignore[operator]  # a number
        like = "a whole number" if whole else "a number"
        raise InvalidInput(
            f"A budget of {budget!a} {unit} is no budget.", hint=f"Give {like} above 0."
        )


@dataclass(frozen=True, slots=True)
class Order:
    """See ``User.learn`` for what each means. Raises ``InvalidInput`` for a start or a budget that is none."""

    start: Start = "auto"
    seconds: float | None = None
    steps: int | None = None
    memory: float | None = None
    dry_run: bool = False
    accept: bool = False
    progress: Progress = silent
    cancelled: Asking = never
    paused: Asking = never

    def __post_init__(self) -> None:
        if self.start not in get_args(Start):
            raise InvalidInput(
                f"A build cannot start from {self.start!a}.", hint="Give 'auto' or 'nothing'."
            )
        check_budget(self.seconds, "seconds")
        check_budget(self.steps, "steps", whole=True)
        check_budget(self.memory, "MB")

    def noting(self, raised: list[Exception]) -> Order:
        """Return the same order, whose functions add to ``raised`` the unexpected errors that they raise."""

        def noted(function: Callable[P, T]) -> Callable[P, T]:
            def call(*given: P.args, **named: P.kwargs) -> T:
                try:
                    return function(*given, **named)
                except PersonalPeftError:
                    raise
                except Exception as error:
                    raised.append(error)
                    raise

            return call

        return replace(
            self,
            progress=noted(self.progress),
            cancelled=noted(self.cancelled),
            paused=noted(self.paused),
        )
