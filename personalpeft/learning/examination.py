"""Asks a candidate, the live stack and the bare base the same questions, through the same engine that serves people, and
gathers the gate's evidence. What the base said is kept with a revision's scores, so that it is asked once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from personalpeft.backends.base import Continuation
from personalpeft.learning.curriculum import continuation
from personalpeft.learning.gate import Asked, Canaries, Evidence, OfBase
from personalpeft.learning.generic import Canary, generic_questions, is_broken
from personalpeft.learning.lessons import Lesson
from personalpeft.learning.lineage import Lineage
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
    """What is asked: ``target`` are the layer's pins that have not counted in the lineage, ``retention`` all that was
    pinned before this build, in all layers, ``trained`` stands in where there is no target, ``anchors`` are what the
    base said to generic questions.
    """

    target: tuple[Lesson, ...]
    retention: tuple[Lesson, ...]
    trained: tuple[Lesson, ...]
    anchors: tuple[Continuation, ...]
    lineage: Lineage = field(default_factory=Lineage)


def examine(
    engine: Engine, user: str, live: Stack, candidate: Stack, paper: Paper, *, cancelled: Callable[[], bool]
) -> tuple[Evidence, tuple[Example, ...]]:
    """The evidence, and a few examples to show. Greedy throughout, so the same stacks give the same evidence. It waits
    while people chat. Raises ``Cancelled``.
    """
    generic, bare, of_base = generic_questions(), Stack(live.base), paper.lineage.of_base
    canaries = generic.canaries
    shown = tuple({lesson.signal: lesson for lesson in (*paper.target, *paper.trained, *paper.retention)}.values())[
        :_SHOWN
    ]
    # One batch for everything that is written: rows of all stacks run together.
    asked: list[tuple[tuple[Message, ...], Sampling]] = [
        ((Message("user", canary.question),), _CANARY) for canary in canaries
    ]
    asked += [(lesson.messages, _EXAMPLE) for lesson in shown]
    questions = [(stack, messages, how) for stack in (live, candidate) for messages, how in asked]
    ask_base = of_base.questions != generic.digest and live != bare
    if ask_base:
        questions += [(bare, messages, how) for messages, how in asked[: len(canaries)]]
    requests = [Request(user, messages, stack, how, background=True) for stack, messages, how in questions]
    replies = engine.texts(requests, cancelled=cancelled)
    if cancelled():
        raise stopped("before the verdict")
    before, after = replies[: len(asked)], replies[len(asked) : 2 * len(asked)]

    right, still = _right(canaries, before), _right(canaries, after)
    broken_before = sum(is_broken(reply) for reply in before[: len(canaries)])
    if live == bare:
        of_base = OfBase(generic.digest, tuple(sorted(right)), broken_before)
    elif ask_base:
        said = replies[2 * len(asked) :]
        of_base = OfBase(generic.digest, tuple(sorted(_right(canaries, said))), sum(map(is_broken, said)))
    compare = _Comparison(engine, live, candidate, paper.lineage)
    pins = {lesson.signal: lesson for lesson in (*paper.target, *paper.retention)}
    scored = {asked.signal: asked for asked in compare(tuple(pins.values()), against_base=True)}
    divergence = engine.score(paper.anchors, candidate, kl=True)
    evidence = Evidence(
        target=tuple(scored[lesson.signal] for lesson in paper.target),
        retention=tuple(scored[lesson.signal] for lesson in paper.retention),
        trained=compare(paper.trained, against_base=False),
        canaries=Canaries(
            asked=len(canaries),
            right_before=len(right),
            still_right=len(right & still),
            base=of_base,
            kept_of_base=tuple(sorted(still & set(of_base.right))),
            broken_before=broken_before,
            broken=sum(is_broken(reply) for reply in after[: len(canaries)]),
        ),
        kl=sum(s.kl or 0.0 for s in divergence) / max(1, len(divergence)),
        stake=paper.lineage.stake,
        counted=paper.lineage.counted,
    )
    first = len(canaries)
    examples = tuple(
        Example(lesson.messages[-1].content, before[first + i], after[first + i]) for i, lesson in enumerate(shown)
    )
    return evidence, examples


def _right(canaries: Sequence[Canary], replies: Sequence[str]) -> set[int]:
    """Which of the canaries the first replies answer."""
    return {i for i, (canary, reply) in enumerate(zip(canaries, replies, strict=False)) if canary.is_right(reply)}


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Scores lessons under the live stack and the candidate, and under the base where it is not known what that says."""

    engine: Engine
    live: Stack
    candidate: Stack
    lineage: Lineage

    def __call__(self, lessons: Sequence[Lesson], *, against_base: bool) -> tuple[Asked, ...]:
        before, after = self._score(lessons, self.live), self._score(lessons, self.candidate)
        base, best = dict(self.lineage.base), self.lineage.best
        if against_base:
            bare = Stack(self.live.base)
            new = [lesson for lesson in lessons if lesson.signal not in base]
            base |= {s: before[s] for s in before if s not in base} if self.live == bare else self._score(new, bare)
        return tuple(
            Asked(s, before[s], after[s], base.get(s), best.get(s)) for s in (lesson.signal for lesson in lessons)
        )

    def _score(self, lessons: Sequence[Lesson], stack: Stack) -> dict[str, float]:
        items = [continuation(self.engine.backend, lesson.messages, lesson.wanted, _LONGEST) for lesson in lessons]
        scores = self.engine.score(items, stack)
        return {lesson.signal: score.logp for lesson, score in zip(lessons, scores, strict=True)}
