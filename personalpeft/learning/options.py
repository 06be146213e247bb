"""The options of a learn: budgets, callbacks, and how the build starts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeAlias, TypeVar

from personalpeft.arguments import check_choice, check_flags, check_functions, check_number
from personalpeft.deprecation import warn_renamed
from personalpeft.errors import Cancelled, InvalidInput, PersonalPeftError
from personalpeft.former_names import START
from personalpeft.learning.train.config import Start
from personalpeft.plugins import CheckedVerifier
from personalpeft.types import Progress

Condition: TypeAlias = Callable[[], bool]

P = ParamSpec("P")
T = TypeVar("T")

MAX_YIELD_SECONDS = 5.0
"""The longest wait for users who chat before a step or a score: they may never stop."""
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
        if start := START.get(str(self.start)):
            warn_renamed(f"start={self.start!r}", f"start={start!r}")
            object.__setattr__(self, "start", start)
        check_choice("start", self.start, Start)
        check_flags(dry_run=self.dry_run, accept=self.accept)
        check_functions(progress=self.progress, cancelled=self.cancelled, paused=self.paused)
        if self.recipe is not None and not isinstance(self.recipe, Mapping):
            kind = type(self.recipe).__name__
            raise InvalidInput(
                f"recipe must be a mapping, got {kind}.", hint="Give fields and their values."
            )
        for name in ("seconds", "steps", "max_memory_mb"):
            if (budget := getattr(self, name)) is not None:
                check_number(name, budget, 0, above=True, whole=name == "steps")

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
