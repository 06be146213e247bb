"""Asks a candidate and the live stack the same questions, through the same engine that serves people, and gathers the
gate's evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from personalpeft.backends.base import Continuation
from personalpeft.learning.curriculum import continuation
from personalpeft.learning.gate import Asked, Evidence
from personalpeft.learning.generic import generic_questions, is_broken
from personalpeft.learning.lessons import Lesson
from personalpeft.learning.report import Example
from personalpeft.learning.training import stopped
from personalpeft.serving.engine import Engine, Request
from personalpeft.types import Message, Sampling, Stack

_CANARY = Sampling(max_tokens=24)
_EXAMPLE = Sampling(max_tokens=40)
_SHOWN = 3
_LONGEST = 256


@dataclass(frozen=True, slots=True)
class Paper:
    """What is asked: ``target`` are the questions pinned by this build, ``retention`` all that were pinned before,
    ``trained`` stands in where nothing is pinned, ``anchors`` are what the base said to generic questions.
    """

    target: tuple[Lesson, ...]
    retention: tuple[Lesson, ...]
    trained: tuple[Lesson, ...]
    anchors: tuple[Continuation, ...]


def examine(
    engine: Engine, user: str, live: Stack, candidate: Stack, paper: Paper, *, cancelled: Callable[[], bool]
) -> tuple[Evidence, tuple[Example, ...]]:
    """The evidence, and a few examples to show. Greedy throughout, so the same stacks give the same evidence. It waits
    while people chat. Raises ``Cancelled``.
    """
    canaries = generic_questions().canaries
    shown = (*paper.target, *paper.trained, *paper.retention)[:_SHOWN]
    # One batch for everything that is written: rows of both stacks run together.
    asked: list[tuple[tuple[Message, ...], Sampling]] = [
        ((Message("user", canary.question),), _CANARY) for canary in canaries
    ]
    asked += [(lesson.messages, _EXAMPLE) for lesson in shown]
    requests = [
        Request(user, messages, stack, how, background=True) for stack in (live, candidate) for messages, how in asked
    ]
    replies = engine.texts(requests, cancelled=cancelled)
    if cancelled():
        raise stopped("before the verdict")
    before, after = replies[: len(asked)], replies[len(asked) :]

    right = [canary.is_right(reply) for canary, reply in zip(canaries, before, strict=False)]
    still = [canary.is_right(reply) for canary, reply in zip(canaries, after, strict=False)]
    divergence = engine.score(paper.anchors, candidate, kl=True)
    evidence = Evidence(
        target=_compare(engine, live, candidate, paper.target),
        retention=_compare(engine, live, candidate, paper.retention),
        trained=_compare(engine, live, candidate, paper.trained),
        canaries=len(canaries),
        right_before=sum(right),
        still_right=sum(a and b for a, b in zip(right, still, strict=True)),
        broken=sum(is_broken(reply) for reply in after[: len(canaries)]),
        broken_before=sum(is_broken(reply) for reply in before[: len(canaries)]),
        kl=sum(s.kl or 0.0 for s in divergence) / max(1, len(divergence)),
    )
    first = len(canaries)
    examples = tuple(
        Example(lesson.messages[-1].content, before[first + i], after[first + i]) for i, lesson in enumerate(shown)
    )
    return evidence, examples


def _compare(engine: Engine, live: Stack, candidate: Stack, lessons: Sequence[Lesson]) -> tuple[Asked, ...]:
    items = [continuation(engine.backend, lesson.messages, lesson.wanted, _LONGEST) for lesson in lessons]
    before, after = engine.score(items, live), engine.score(items, candidate)
    return tuple(Asked(lesson.signal, b.logp, a.logp) for lesson, b, a in zip(lessons, before, after, strict=True))
