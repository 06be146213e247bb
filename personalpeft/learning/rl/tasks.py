"""Selects the tasks of the next round. Pure; the random generator is passed in.

The pass rate of a task has a Beta posterior with a flat prior. A task is solved when a pass rate
above ``SOLVED_RATE`` is more likely than not, and hopeless when one below ``HOPELESS_RATE`` is;
both teach nothing. Counts decay with every step, because the model that made them is gone, so a
skipped task is tried again in time.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from personalpeft.plugins import Task

State: TypeAlias = Literal["open", "solved", "hopeless"]

HOPELESS_RATE = 0.1
SOLVED_RATE = 0.9
DECAY = 0.95

_GRID = (np.arange(1000) + 0.5) / 1000


@dataclass(frozen=True, slots=True)
class TaskPosterior:
    """Decayed counts of the replies to one task that passed and that failed."""

    passed: float = 0.0
    failed: float = 0.0

    def update(self, passed: int, failed: int) -> TaskPosterior:
        """Return it with the replies of one more group."""
        return TaskPosterior(self.passed + passed, self.failed + failed)

    def decay(self) -> TaskPosterior:
        """Return it after one more training step."""
        return TaskPosterior(self.passed * DECAY, self.failed * DECAY)

    def sample(self, rng: random.Random) -> float:
        """Return a pass rate drawn from the posterior."""
        return rng.betavariate(1 + self.passed, 1 + self.failed)

    @property
    def state(self) -> State:
        density = _GRID**self.passed * (1 - _GRID) ** self.failed
        total = density.sum()
        if density[_GRID > SOLVED_RATE].sum() > total / 2:
            return "solved"
        return "hopeless" if density[_GRID < HOPELESS_RATE].sum() > total / 2 else "open"


UNSEEN = TaskPosterior()


def select_tasks(
    tasks: Sequence[Task],
    posteriors: Mapping[str, TaskPosterior],
    count: int,
    rng: random.Random,
    *,
    train_on_solved: bool = False,
) -> tuple[Task, ...]:
    """Return up to ``count`` tasks, those with the largest expected spread of rewards first.

    For each task a pass rate p is sampled (Thompson sampling); p (1 - p) is the variance of a
    reply's success. Hopeless tasks are left out, and solved ones unless ``train_on_solved``.
    """
    wanted = ("open", "solved") if train_on_solved else ("open",)
    spread = {}
    for task in tasks:
        posterior = posteriors.get(task.id, UNSEEN)
        # Sampled for every task, so that the state of one does not change the draw of another.
        rate = posterior.sample(rng)
        if posterior.state in wanted:
            spread[task.id] = rate * (1 - rate)
    open_tasks = (task for task in tasks if task.id in spread)
    return tuple(sorted(open_tasks, key=lambda task: -spread[task.id])[:count])


def is_eval_task(task: Task) -> bool:
    """Return whether a task is held out for the gate: a quarter of all are, by their prompt."""
    return derive_seed("judged by", task.prompt) % 4 == 0


def derive_seed(*parts: object) -> int:
    """Return a seed that depends on the parts alone, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1
