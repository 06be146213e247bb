"""Asks a candidate, the live stack and the bare base the same questions, through the same engine that serves people, and
gathers the gate's evidence. What the base said is kept with a revision's scores, so that it is asked once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from personalpeft.backends.base import Backend, Continuation, Score
from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import PersonalPeftError
from personalpeft.learning.data.assignment import Lesson
from personalpeft.learning.data.response_template import Shown
from personalpeft.learning.evaluate.completion_cache import AT_LENGTH, SHORTLY, Said, Voices
from personalpeft.learning.evaluate.probes import Canary, generic_questions, is_broken
from personalpeft.learning.evaluate.rule_gain import Explained, explained
from personalpeft.learning.evaluate.text_quality import Sense, sense_of
from personalpeft.learning.gate.eval_history import Lineage
from personalpeft.learning.gate.gate import Asked, Canaries, Evidence, OfBase
from personalpeft.learning.options import Asking, never, wait_while
from personalpeft.learning.report import Example
from personalpeft.learning.train.loop import stopped
from personalpeft.learning.train.losses import around, continuation
from personalpeft.learning.train.regularizer import LONGEST
from personalpeft.types import Message, Sampling, SignalKind, Stack

_EXAMPLE = Sampling(max_tokens=40)
_SHOWN = 3
_LONGEST = 256
_LOOK = 32
# A fact's answer is a word or two, and what was liked is the model's own.
_NOT_WRITTEN = (SignalKind.FACT, SignalKind.RATING)
# So long, in seconds, one look waits for people who chat: they may never stop.
_PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class Paper:
    """What is asked: ``target`` are the layer's pins that have not counted in the lineage, ``retention`` those that were
    pinned before this build, ``others`` those of all other layers, ``trained`` stands in where there is no target,
    ``of_base`` is what the bare base said to the canaries. ``new`` are the lessons that came since the last learn,
    ``unruled`` some questions of the layer, and ``rules`` the same as they are heard with each rule.
    """

    target: tuple[Lesson, ...]
    retention: tuple[Lesson, ...]
    others: tuple[Lesson, ...]
    trained: tuple[Lesson, ...]
    of_base: Said
    new: tuple[Lesson, ...] = ()
    unruled: tuple[Lesson, ...] = ()
    rules: Mapping[str, tuple[Lesson, ...]] = field(default_factory=dict)
    lineage: Lineage = field(default_factory=Lineage)


class Scoping(Protocol):
    """Says which layers a question is answered with."""

    def answering(
        self,
        user: str,
        stack: Stack,
        questions: Sequence[str],
        built_from: Mapping[str, Collection[str]],
    ) -> tuple[Stack, ...]:
        """The part of a stack that each question would be answered with. ``built_from`` has, by layer, the signals of a
        revision in the stack that is in no catalog yet.
        """
        ...


@dataclass(frozen=True, slots=True)
class Answering:
    """A stack as a person would have it answer, since a layer that is for one subject alone is not there for another: ``parts``
    has what answers each question. What ``layer`` was built for is asked of that layer in any case.
    """

    layer: str
    stack: Stack
    parts: Mapping[str, Stack]

    def to(self, question: str) -> Stack:
        """What answers a question about anything."""
        return self.parts[question]

    def own(self, lesson: Lesson) -> Stack:
        """What answers a question that is the layer's own."""
        part = self.parts[lesson.messages[-1].content].entries
        kept = (entry for entry in self.stack.entries if entry in part or entry.layer == self.layer)
        return replace(self.stack, entries=tuple(kept))

    def other(self, lesson: Lesson) -> Stack:
        """What answers a question of another layer."""
        return self.to(lesson.messages[-1].content)


def answering(
    scoping: Scoping,
    user: str,
    layer: str,
    stack: Stack,
    questions: Sequence[str],
    built_from: Mapping[str, Collection[str]],
) -> Answering:
    """How a stack answers some questions; ``built_from`` as for ``Scoping``."""
    questions = list(dict.fromkeys(questions))
    parts = scoping.answering(user, stack, questions, built_from)
    return Answering(layer, stack, dict(zip(questions, parts, strict=True)))


@dataclass(frozen=True, slots=True)
class Sitting:
    """One candidate to be examined against what is live."""

    user: str
    live: Answering
    candidate: Answering
    paper: Paper

    @property
    def shown(self) -> tuple[Lesson, ...]:
        """The lessons whose answers are written out, to be read."""
        paper = self.paper
        return tuple(
            {
                lesson.key: lesson for lesson in (*paper.target, *paper.trained, *paper.retention)
            }.values()
        )[:_SHOWN]

    def requests(self) -> list[Request]:
        """All that is asked in words, of what is live and of the candidate."""
        canaries = [canary.question for canary in generic_questions().canaries]
        asked: list[tuple[Stack, tuple[Message, ...], Sampling]] = []
        for side in (self.live, self.candidate):
            for question in canaries:
                stack = side.to(question)
                asked.append(
                    (stack, (Message("user", question),), SHORTLY if stack.is_bare else AT_LENGTH)
                )
            asked += [(side.own(lesson), lesson.messages, _EXAMPLE) for lesson in self.shown]
        return [
            Request(self.user, messages, stack, how, background=True)
            for stack, messages, how in asked
        ]


def sitting(
    scoping: Scoping,
    user: str,
    layer: str,
    live: Stack,
    candidate: Stack,
    paper: Paper,
    built_from: Mapping[str, Collection[str]],
) -> Sitting:
    """The sitting of a candidate for a layer; ``built_from`` as for ``Scoping``."""
    lessons = (*paper.target, *paper.retention, *paper.others, *paper.trained, *paper.unruled)
    asked = [
        *(canary.question for canary in generic_questions().canaries),
        *(each.messages[-1].content for each in lessons),
    ]
    return Sitting(
        user,
        answering(scoping, user, layer, live, asked, {}),
        answering(scoping, user, layer, candidate, asked, built_from),
        paper,
    )


Examined: TypeAlias = tuple[Evidence, tuple[Example, ...]]
"""The evidence, and a few examples to show."""


class Scoring(Protocol):
    """What answers are weighed with: an ``Engine``, as far as that is needed."""

    @property
    def backend(self) -> Backend:
        """What the texts are made tokens by."""

    def score(
        self, items: Sequence[Continuation], stack: Stack, *, kl: bool = False
    ) -> tuple[Score, ...]:
        """As ``Engine.score``."""


@dataclass(frozen=True, slots=True)
class _Patiently:
    """Scores while nobody pauses it, and lets people who chat beside it go first. The model does one thing at a time, and whoever
    scores one thing after another would hardly let go of it.
    """

    engine: Engine
    paused: Asking
    cancelled: Asking

    @property
    def backend(self) -> Backend:
        return self.engine.backend

    def score(
        self, items: Sequence[Continuation], stack: Stack, *, kl: bool = False
    ) -> tuple[Score, ...]:
        wait_while(self.paused, self.cancelled)
        self.engine.give_way(_PATIENCE)
        return self.engine.score(items, stack, kl=kl)


def examine(
    engine: Engine,
    voices: Voices,
    sittings: Mapping[str, Sitting],
    *,
    cancelled: Asking,
    paused: Asking = never,
) -> dict[str, Examined | PersonalPeftError]:
    """Examines candidates of different users: all that they write is one batch, and rows of all stacks run together.
    Greedy throughout, so the same stacks give the same evidence. It waits while people chat, and while ``paused``.
    What cannot be asked of one user's stacks is that user's alone. Raises ``Cancelled``.
    """
    requests = {user: sitting.requests() for user, sitting in sittings.items()}
    replies = voices.ask_all(requests, cancelled=cancelled, paused=paused)
    patiently = _Patiently(engine, paused, cancelled)
    examined: dict[str, Examined | PersonalPeftError] = {}
    for user, sitting in sittings.items():
        said = replies[user]
        if cancelled():
            raise stopped("before the verdict")
        try:
            examined[user] = (
                said if isinstance(said, PersonalPeftError) else _weighed(patiently, sitting, said)
            )
        except PersonalPeftError as error:
            examined[user] = error
    return examined


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Mean log-probs a token of one wanted answer: of its ``words`` and that it ends there, and of the ``manner`` in which a short
    answer is said, where it is said in any.
    """

    words: float
    manner: float | None = None


AnsweredBy: TypeAlias = Callable[[Lesson], Stack]
"""What answers a lesson."""


def of_all(stack: Stack) -> AnsweredBy:
    """The same stack, whatever is asked."""
    return lambda lesson: stack


def likelihoods(engine: Scoring, lessons: Sequence[Lesson], by: AnsweredBy) -> dict[str, float]:
    """How likely the words of what each lesson wants are, by its key."""
    return {key: of.words for key, of in likelihoods_in_parts(engine, lessons, by).items()}


def likelihoods_in_parts(
    engine: Scoring, lessons: Sequence[Lesson], by: AnsweredBy
) -> dict[str, Likelihood]:
    """How likely what each lesson wants is, by its key, apart from the manner in which it is said."""
    groups: dict[Stack, list[Lesson]] = {}
    for lesson in lessons:
        groups.setdefault(by(lesson), []).append(lesson)
    found: dict[str, Likelihood] = {}
    for stack, asked in groups.items():
        items = [
            continuation(engine.backend, a.messages, a.wanted, _LONGEST, ended=a.ended)
            for a in asked
        ]
        for lesson, score in zip(asked, engine.score(items, stack), strict=True):
            found[lesson.key] = _in_parts(engine.backend, lesson, score)
    return found


def _in_parts(backend: Backend, lesson: Lesson, score: Score) -> Likelihood:
    # A manner that repeats the question has ten words to an answer's one, and they are known from what lies below. With
    # them a fact would pass for known by heart that is not, and for lost where only the manner moved.
    opening, closing = around(backend, lesson.manner, lesson.shown.request)
    last = len(score.tokens) - len(backend.end_of_turn)
    if opening + closing == 0 or opening + closing >= last:
        return Likelihood(score.logp)
    words = (*score.tokens[opening : last - closing], *score.tokens[last:])
    manner = (*score.tokens[:opening], *score.tokens[last - closing : last])
    return Likelihood(statistics.fmean(words), statistics.fmean(manner))


def _weighed(engine: Scoring, sitting: Sitting, replies: Sequence[str]) -> Examined:
    generic, paper = generic_questions(), sitting.paper
    canaries, of_base = generic.canaries, paper.lineage.of_base
    asked = len(canaries) + len(sitting.shown)
    before, after = replies[:asked], replies[asked:]
    right, still = _right(canaries, before), _right(canaries, after)
    broken_before = sum(is_broken(reply) for reply in before[: len(canaries)])
    if of_base.questions != generic.digest:
        said = [reply for _, reply in paper.of_base]
        of_base = OfBase(
            generic.digest, tuple(sorted(_right(canaries, said))), sum(map(is_broken, said))
        )
    compare = _Comparison(engine, sitting)
    pins = {lesson.key: lesson for lesson in (*paper.target, *paper.retention)}
    scored = {asked.signal: asked for asked in compare(tuple(pins.values()), against_base=True)}
    divergence = list(_divergence(engine, sitting))
    evidence = Evidence(
        target=tuple(scored[lesson.key] for lesson in paper.target),
        retention=(
            *(scored[lesson.key] for lesson in paper.retention),
            *compare(paper.others, against_base=True, own=False),
        ),
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
        kl=sum(divergence) / max(1, len(divergence)),
        sense=_sense(engine, sitting),
        rules=_rules(engine, sitting),
        stake=paper.lineage.stake,
        counted=paper.lineage.counted,
    )
    first = len(canaries)
    examples = tuple(
        Example(lesson.messages[-1].content, before[first + i], after[first + i])
        for i, lesson in enumerate(sitting.shown)
    )
    return evidence, examples


def _divergence(engine: Scoring, sitting: Sitting) -> Iterator[float]:
    """How far the candidate is from the base on what that says to each canary, in nats a token: its own words, since those
    of a style below are far from it by themselves, and to questions that nothing was held to.
    """
    groups: dict[Stack, list[Continuation]] = {}
    for messages, reply in sitting.paper.of_base:
        if reply:
            said = continuation(engine.backend, messages, reply, LONGEST)
            groups.setdefault(sitting.candidate.to(messages[-1].content), []).append(said)
    for stack, said_on in groups.items():
        yield from (score.kl or 0.0 for score in engine.score(said_on, stack, kl=True))


def _sense(engine: Scoring, sitting: Sitting) -> Sense:
    """Whether what is new means something, as the bare base sees it."""

    def likelihoods(said: Sequence[Shown]) -> Sequence[float]:
        items = [
            continuation(engine.backend, [Message("user", each.request)], each.answer, _LOOK)
            for each in said
        ]
        return [score.logp for score in engine.score(items, Stack(sitting.live.stack.base))]

    written = [lesson.shown for lesson in sitting.paper.new if lesson.kind not in _NOT_WRITTEN]
    return sense_of(written, likelihoods)


def _rules(engine: Scoring, sitting: Sitting) -> dict[str, Explained]:
    """What each rule explains of some answers, to the bare base and to the candidate."""
    rules, asked = sitting.paper.rules, sitting.paper.unruled
    if not rules:
        return {}

    def to(by: AnsweredBy) -> dict[str, float]:
        plain = likelihoods(engine, asked, by)
        return {
            rule: explained(plain, likelihoods(engine, heard, by)) for rule, heard in rules.items()
        }

    to_base, to_layer = to(of_all(Stack(sitting.live.stack.base))), to(sitting.candidate.own)
    return {rule: Explained(to_base[rule], to_layer[rule]) for rule in rules}


def _right(canaries: Sequence[Canary], replies: Sequence[str]) -> set[int]:
    """Which of the canaries the first replies answer."""
    return {
        i
        for i, (canary, reply) in enumerate(zip(canaries, replies, strict=False))
        if canary.is_right(reply)
    }


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Scores lessons under the live stack and the candidate, and under the base where it is not known what that says."""

    engine: Scoring
    sitting: Sitting

    def __call__(
        self, lessons: Sequence[Lesson], *, against_base: bool, own: bool = True
    ) -> tuple[Asked, ...]:
        """``own``: whether the lessons are the layer's own."""
        live, candidate, lineage = (
            self.sitting.live,
            self.sitting.candidate,
            self.sitting.paper.lineage,
        )
        before = likelihoods(self.engine, lessons, live.own if own else live.other)
        after = likelihoods(self.engine, lessons, candidate.own if own else candidate.other)
        base = dict(lineage.base)
        if against_base:
            bare = Stack(live.stack.base)
            new = [lesson for lesson in lessons if lesson.key not in base]
            found = before if live.stack == bare else likelihoods(self.engine, new, of_all(bare))
            base |= {key: likelihood for key, likelihood in found.items() if key not in base}
        return tuple(
            Asked(s, before[s], after[s], base.get(s), lineage.held_to(s, before[s]))
            for s in (each.key for each in lessons)
        )
