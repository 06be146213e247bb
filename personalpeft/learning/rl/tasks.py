"""Which tasks are worth trying next. Pure, and chance is passed in.

What is known of a task is a Beta posterior of its pass rate, from a flat beginning. A task of which it is more likely
than not that nearly all replies pass is solved, one of which nearly none do is hopeless; both have nothing to teach. What
was seen fades with every step, since the model that was seen is no longer there: so a task that was skipped is tried
again in time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from personalpeft.plugins import Task

State: TypeAlias = Literal["open", "solved", "hopeless"]

HOPELESS = 0.1
SOLVED = 0.9
FADING = 0.95

_GRID = (np.arange(1000) + 0.5) / 1000


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of one task: how many replies passed and how many did not, less what has faded."""

    passed: float = 0.0
    failed: float = 0.0

    def after(self, passed: int, failed: int) -> Standing:
        """With the replies of one more group."""
        return Standing(self.passed + passed, self.failed + failed)

    def faded(self) -> Standing:
        """A step of training later."""
        return replace(self, passed=self.passed * FADING, failed=self.failed * FADING)

    def draw(self, chance: random.Random) -> float:
        """A pass rate that may well be this task's."""
        return chance.betavariate(1 + self.passed, 1 + self.failed)

    @property
    def state(self) -> State:
        """Solved or hopeless where that is more likely than not."""
        density = _GRID**self.passed * (1 - _GRID) ** self.failed
        total = density.sum()
        if density[_GRID > SOLVED].sum() > total / 2:
            return "solved"
        return "hopeless" if density[_GRID < HOPELESS].sum() > total / 2 else "open"


UNSEEN = Standing()


def choose(
    tasks: Sequence[Task],
    standings: Mapping[str, Standing],
    count: int,
    chance: random.Random,
    *,
    solved_too: bool = False,
) -> tuple[Task, ...]:
    """Up to ``count`` tasks, first those whose replies may differ most: for each a pass rate p is drawn from its
    posterior, and p (1 - p) is the variance of a reply's success. None where all are solved or hopeless.
    """
    wanted = ("open", "solved") if solved_too else ("open",)
    worth = {}
    for task in tasks:
        # Drawn for every task, so that one task's fate does not change another's luck.
        rate = standings.get(task.id, UNSEEN).draw(chance)
        if standings.get(task.id, UNSEEN).state in wanted:
            worth[task.id] = rate * (1 - rate)
    ranked = sorted((task for task in tasks if task.id in worth), key=lambda task: -worth[task.id])
    return tuple(ranked[:count])
