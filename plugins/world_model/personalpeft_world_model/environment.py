"""What an environment is to a world model: a task, a first state, and what follows each action."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Outcome(StrEnum):
    """Whether a task goes on, is solved, or cannot be solved any more.

    ``UNKNOWN`` is only predicted: the state was longer than a prediction, so its flag was cut off.
    """

    RUNNING = "running"
    WON = "won"
    LOST = "lost"
    UNKNOWN = "unknown"


_FLAGS = {Outcome.WON: " [SUCCESS]", Outcome.LOST: " [FAILURE]"}


@dataclass(frozen=True, slots=True)
class State:
    """What an environment shows after an action.

    Attributes:
        text: The observation. Space around it is dropped, as where it is read from a file.
        outcome: Whether the task goes on.
        actions: The actions that it accepts now, where it says so.
        advice: The next action of a solution, where the environment knows one.
    """

    text: str
    outcome: Outcome = Outcome.RUNNING
    actions: tuple[str, ...] = ()
    advice: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text.strip())

    @property
    def written(self) -> str:
        """The text with a flag for the outcome, as the model reads and writes it."""
        return self.text + _FLAGS.get(self.outcome, "")

    @staticmethod
    def read(written: str) -> State:
        """Return the state that ``written`` gave, without actions and advice."""
        text = written.strip()
        for outcome, flag in _FLAGS.items():
            if text.endswith(flag.strip()):
                return State(text.removesuffix(flag.strip()), outcome)
        return State(text)


class Environment(Protocol):
    """One game. ``task`` says what is to be done, and what does not change or is hidden."""

    @property
    def name(self) -> str: ...
    @property
    def task(self) -> str: ...
    def reset(self) -> State: ...
    def step(self, action: str) -> State: ...
