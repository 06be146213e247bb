"""Select the tasks of a round, sample replies to them in the background and have them verified.

The pass rate of a task has a Beta posterior with a flat prior. A task is solved when a pass rate
above ``SOLVED_RATE`` is more likely than not, and hopeless when one below ``HOPELESS_RATE`` is;
both teach nothing. Counts decay with every step, because the model that made them is gone, so a
skipped task is tried again in time.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from personalpeft.backends.base import Continuation
from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import Cancelled
from personalpeft.learning.options import Condition
from personalpeft.plugins import RIGHT, Attempt, CheckedVerifier, Task
from personalpeft.types import Message, Sampling, Stack

State: TypeAlias = Literal["open", "solved", "hopeless"]

HOPELESS_RATE = 0.1
SOLVED_RATE = 0.9
DECAY = 0.95

_GRID = (np.arange(1000) + 0.5) / 1000

PASS_THRESHOLD = 0.99
"""A reply passes from this reward "right" on."""

RESUME_HINT = "The next practice of these tasks goes on from what was done."


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


@dataclass(frozen=True, slots=True)
class Rollout:
    """One reply to a task. ``length`` is a share of the limit."""

    text: str
    reply: Continuation
    length: float
    rewards: Mapping[str, float]

    @property
    def attempt(self) -> Attempt:
        """The reply as a reward shaper sees it."""
        return Attempt(self.rewards[RIGHT], self.rewards[RIGHT] >= PASS_THRESHOLD, self.length)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All replies to one task in a round."""

    task: Task
    rollouts: tuple[Rollout, ...]

    @property
    def passed(self) -> int:
        """The number of replies that passed."""
        return sum(rollout.attempt.passed for rollout in self.rollouts)

    @property
    def pass_rate(self) -> float:
        return self.passed / len(self.rollouts)


def sample_rollouts(
    engine: Engine,
    user: str,
    stack: Stack,
    tasks: Sequence[Task],
    verifier: CheckedVerifier,
    sampling: Sampling,
    *,
    num_generations: int = 1,
    cancelled: Condition,
    paused: Condition,
) -> tuple[RolloutGroup, ...]:
    """Return the replies to each task, each with a seed of its own, so that none depends on others.

    Chats of users go first. Raises ``Cancelled``, ``PluginError`` or ``PromptTooLong``.
    """
    # The first reply to every task before any second one, whose prompt is then cached.
    order = [(task, number) for number in range(num_generations) for task in tasks]
    if not order:
        return ()
    requests = [
        Request(
            user,
            (Message("user", task.prompt),),
            stack,
            replace(sampling, seed=derive_seed(sampling.seed, task.id, number)),
            background=True,
        )
        for task, number in order
    ]
    texts = [""] * len(order)
    tokens: list[tuple[int, ...]] = [()] * len(order)
    ended = [False] * len(order)
    replies = engine.stream(requests, cancelled=cancelled, paused=paused)
    try:
        for piece in replies:
            if piece.finish == "cancelled":
                raise Cancelled("Stopped while sampling; nothing has changed.", hint=RESUME_HINT)
            texts[piece.index] += piece.text
            tokens[piece.index] += piece.tokens
            ended[piece.index] = piece.finish == "stop"
    finally:
        replies.close()
    rollouts = []
    for index, (task, _) in enumerate(order):
        # The model picked the end of turn too, but no piece carries it.
        ending = engine.backend.end_of_turn if ended[index] else ()
        reply = Continuation(replies.prompts[index], (*tokens[index], *ending))
        length = len(tokens[index]) / sampling.max_tokens
        rewards = verifier.verify(task, texts[index])
        rollouts.append(Rollout(texts[index], reply, length, rewards))
    count = len(tasks)
    return tuple(RolloutGroup(task, tuple(rollouts[i::count])) for i, task in enumerate(tasks))
