"""Samples replies to tasks through the serving engine, in the background, and has them verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from personalpeft.backends.base import Continuation
from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import Cancelled
from personalpeft.learning.options import Condition
from personalpeft.learning.rl.tasks import derive_seed
from personalpeft.plugins import RIGHT, Attempt, CheckedVerifier, Task
from personalpeft.types import Message, Sampling, Stack

PASS_THRESHOLD = 0.99
"""A reply passes from this reward "right" on."""

RESUME_HINT = "The next practice of these tasks goes on from what was done."


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

    Args:
        engine: the serving engine; chats go first.
        user: owner of the replies.
        stack: what replies.
        tasks: the prompts.
        verifier: gives the rewards.
        sampling: temperature, length, and the seed that those of the replies derive from.
        num_generations: replies to each task.
        cancelled: asked between steps of the engine.
        paused: likewise.

    Raises:
        Cancelled, PluginError, PromptTooLong.
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
