"""Tries tasks through the engine that serves people, behind everybody who waits, and has each reply judged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from personalpeft.backends.base import Continuation
from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import Cancelled
from personalpeft.learning.options import Asking
from personalpeft.plugins import RIGHT, Attempt, Task, Verifying
from personalpeft.types import Message, Sampling, Stack

# A reply that is as right as this has passed.
PASSED = 0.99
STOPPED = "The next practice of these tasks goes on from what was done."


@dataclass(frozen=True, slots=True)
class Rollout:
    """One reply: its text, its very tokens after the prompt, its length as a share of the longest, and its rewards."""

    text: str
    said: Continuation
    length: float
    rewards: Mapping[str, float]

    @property
    def attempt(self) -> Attempt:
        """As a shaping sees it."""
        return Attempt(self.rewards[RIGHT], self.rewards[RIGHT] >= PASSED, self.length)


@dataclass(frozen=True, slots=True)
class Group:
    """All replies to one task."""

    task: Task
    rollouts: tuple[Rollout, ...]

    @property
    def passed(self) -> int:
        """How many are right."""
        return sum(rollout.attempt.passed for rollout in self.rollouts)

    @property
    def pass_rate(self) -> float:
        """The share of them that is right."""
        return self.passed / len(self.rollouts)


def attempt(
    engine: Engine,
    user: str,
    stack: Stack,
    tasks: Sequence[Task],
    verifier: Verifying,
    how: Sampling,
    *,
    each: int = 1,
    cancelled: Asking,
    paused: Asking,
) -> tuple[Group, ...]:
    """``each`` replies to each task. Every reply has a seed of its own, made from that of ``how``, its task and its
    number, so that it depends on nothing beside it. Raises ``Cancelled``, ``PluginError``, ``PromptTooLong``.
    """
    # The first reply of every task before any second one: what was read of its prompt by then need not be read again.
    asked = [(task, number) for number in range(each) for task in tasks]
    requests = [
        Request(
            user,
            (Message("user", task.prompt),),
            stack,
            replace(how, seed=seed_from(how.seed, task.id, number)),
            background=True,
        )
        for task, number in asked
    ]
    texts = [""] * len(asked)
    tokens: list[tuple[int, ...]] = [()] * len(asked)
    ended = [False] * len(asked)
    replies = engine.replies(requests, cancelled=cancelled, paused=paused)
    try:
        for piece in replies if requests else ():
            if piece.finish == "cancelled":
                raise Cancelled("Stopped while it tried; nothing has changed.", hint=STOPPED)
            texts[piece.row] += piece.text
            tokens[piece.row] += piece.tokens
            ended[piece.row] = piece.finish == "stop"
    finally:
        replies.close()

    rollouts = []
    for (task, _), request, text, said, whole in zip(
        asked, requests, texts, tokens, ended, strict=True
    ):
        # The end is a token that was picked too, but no piece carries it.
        completion = (*said, *(engine.backend.end_of_turn if whole else ()))
        item = Continuation(engine.tokens(request), completion)
        rollouts.append(
            Rollout(text, item, len(said) / how.max_tokens, verifier.verify(task, text))
        )
    return tuple(Group(task, tuple(rollouts[i :: len(tasks)])) for i, task in enumerate(tasks))


def seed_from(*parts: object) -> int:
    """A seed that is named by its parts: the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1
