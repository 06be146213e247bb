"""Asks a candidate, the live stack and the bare base the same questions, through the same engine that serves people, and
gathers the gate's evidence. What the base said is kept with a revision's scores, so that it is asked once.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from personalpeft.backends.base import Backend, Continuation, Score
from personalpeft.errors import PersonalPeftError
from personalpeft.learning.anchors import LONGEST
from personalpeft.learning.gate import Asked, Canaries, Evidence, OfBase
from personalpeft.learning.generic import Canary, generic_questions, is_broken
from personalpeft.learning.lessons import Lesson
from personalpeft.learning.lineage import Lineage
from personalpeft.learning.manner import Shown
from personalpeft.learning.objectives import around, continuation
from personalpeft.learning.order import Asking, never, wait_while
from personalpeft.learning.report import Example
from personalpeft.learning.rules import Explained, explained
from personalpeft.learning.sense import Sense, sense_of
from personalpeft.learning.training import stopped
from personalpeft.learning.voices import AT_LENGTH, SHORTLY, Said, Voices
from personalpeft.serving.engine import Engine, Request
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
        self, user: str, stack: Stack, questions: Sequence[str], built_from: Mapping[str, Collection[str]]
    ) -> tuple[Stack, ...]:
        """The part of a stack that each question would be answered with. ``built_from`` has, by layer, the signals of a
        revision in the stack that is in no catalog yet.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sitting:
    """One candidate to be examined against what is live. What the layer was built for is asked with all of a stack;
    everything else as a person would have it answered, since a layer that is for one subject alone is not there for
    another: ``live_for`` and ``candidate_for`` have what answers each of these questions.
    """

    user: str
    live: Stack
    candidate: Stack
    paper: Paper
    live_for: Mapping[str, Stack]
    candidate_for: Mapping[str, Stack]

    @property
    def shown(self) -> tuple[Lesson, ...]:
        """The lessons whose answers are written out, to be read."""
        paper = self.paper
        return tuple({lesson.key: lesson for lesson in (*paper.target, *paper.trained, *paper.retention)}.values())[
            :_SHOWN
        ]

    def requests(self) -> list[Request]:
        """All that is asked in words, of what is live and of the candidate."""
        canaries = [canary.question for canary in generic_questions().canaries]
        asked: list[tuple[Stack, tuple[Message, ...], Sampling]] = []
        for stack, answering in ((self.live, self.live_for), (self.candidate, self.candidate_for)):
            for question in canaries:
                how = SHORTLY if answering[question].is_bare else AT_LENGTH
                asked.append((answering[question], (Message("user", question),), how))
            asked += [(stack, lesson.messages, _EXAMPLE) for lesson in self.shown]
        return [Request(self.user, messages, stack, how, background=True) for stack, messages, how in asked]


def sitting(
    scoping: Scoping, user: str, live: Stack, candidate: Stack, paper: Paper, built_from: Mapping[str, Collection[str]]
) -> Sitting:
    """The sitting of a candidate; ``built_from`` as for ``Scoping``."""
    questions = [
        *(canary.question for canary in generic_questions().canaries),
        *(lesson.messages[-1].content for lesson in paper.others),
    ]
    live_for = scoping.answering(user, live, questions, {})
    candidate_for = scoping.answering(user, candidate, questions, built_from)
    return Sitting(
        user,
        live,
        candidate,
        paper,
        dict(zip(questions, live_for, strict=True)),
        dict(zip(questions, candidate_for, strict=True)),
    )


Examined: TypeAlias = tuple[Evidence, tuple[Example, ...]]
"""The evidence, and a few examples to show."""


class Scoring(Protocol):
    """What answers are weighed with: an ``Engine``, as far as that is needed."""

    @property
    def backend(self) -> Backend:
        """What the texts are made tokens by."""

    def score(self, items: Sequence[Continuation], stack: Stack, *, kl: bool = False) -> tuple[Score, ...]:
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

    def score(self, items: Sequence[Continuation], stack: Stack, *, kl: bool = False) -> tuple[Score, ...]:
        wait_while(self.paused, self.cancelled)
        self.engine.give_way(_PATIENCE)
        return self.engine.score(items, stack, kl=kl)


def examine(
    engine: Engine, voices: Voices, sittings: Mapping[str, Sitting], *, cancelled: Asking, paused: Asking = never
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
            examined[user] = said if isinstance(said, PersonalPeftError) else _weighed(patiently, sitting, said)
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


def likelihoods(engine: Scoring, lessons: Sequence[Lesson], stack: Stack) -> dict[str, float]:
    """How likely the words of what each lesson wants are, by its key."""
    return {key: of.words for key, of in likelihoods_in_parts(engine, lessons, stack).items()}


def likelihoods_in_parts(engine: Scoring, lessons: Sequence[Lesson], stack: Stack) -> dict[str, Likelihood]:
    """How likely what each lesson wants is, by its key, apart from the manner in which it is said."""
    items = [continuation(engine.backend, lesson.messages, lesson.wanted, _LONGEST) for lesson in lessons]
    scores = engine.score(items, stack)
    return {lesson.key: _in_parts(engine.backend, lesson, score) for lesson, score in zip(lessons, scores, strict=True)}


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
        of_base = OfBase(generic.digest, tuple(sorted(_right(canaries, said))), sum(map(is_broken, said)))
    compare = _Comparison(engine, sitting)
    pins = {lesson.key: lesson for lesson in (*paper.target, *paper.retention)}
    scored = {asked.signal: asked for asked in compare(tuple(pins.values()), against_base=True)}
    divergence = list(_divergence(engine, sitting))
    evidence = Evidence(
        target=tuple(scored[lesson.key] for lesson in paper.target),
        retention=(
            *(scored[lesson.key] for lesson in paper.retention),
            *compare(paper.others, against_base=True, as_answered=True),
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
            groups.setdefault(sitting.candidate_for[messages[-1].content], []).append(said)
    for stack, said_on in groups.items():
        yield from (score.kl or 0.0 for score in engine.score(said_on, stack, kl=True))


def _sense(engine: Scoring, sitting: Sitting) -> Sense:
    """Whether what is new means something, as the bare base sees it."""

    def likelihoods(said: Sequence[Shown]) -> Sequence[float]:
        items = [continuation(engine.backend, [Message("user", each.request)], each.answer, _LOOK) for each in said]
        return [score.logp for score in engine.score(items, Stack(sitting.live.base))]

    written = [lesson.shown for lesson in sitting.paper.new if lesson.kind not in _NOT_WRITTEN]
    return sense_of(written, likelihoods)


def _rules(engine: Scoring, sitting: Sitting) -> dict[str, Explained]:
    """What each rule explains of some answers, to the bare base and to the candidate."""
    rules, asked = sitting.paper.rules, sitting.paper.unruled
    if not rules:
        return {}

    def to(stack: Stack) -> dict[str, float]:
        plain = likelihoods(engine, asked, stack)
        return {rule: explained(plain, likelihoods(engine, heard, stack)) for rule, heard in rules.items()}

    to_base, to_layer = to(Stack(sitting.live.base)), to(sitting.candidate)
    return {rule: Explained(to_base[rule], to_layer[rule]) for rule in rules}


def _right(canaries: Sequence[Canary], replies: Sequence[str]) -> set[int]:
    """Which of the canaries the first replies answer."""
    return {i for i, (canary, reply) in enumerate(zip(canaries, replies, strict=False)) if canary.is_right(reply)}


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Scores lessons under the live stack and the candidate, and under the base where it is not known what that says."""

    engine: Scoring
    sitting: Sitting

    def __call__(
        self, lessons: Sequence[Lesson], *, against_base: bool, as_answered: bool = False
    ) -> tuple[Asked, ...]:
        """``as_answered`` asks as a person would be answered, rather than with all of a stack."""
        sitting, lineage = self.sitting, self.sitting.paper.lineage
        before = self._under(sitting.live, sitting.live_for if as_answered else {}, lessons)
        after = self._under(sitting.candidate, sitting.candidate_for if as_answered else {}, lessons)
        base = dict(lineage.base)
        if against_base:
            bare = Stack(sitting.live.base)
            new = [lesson for lesson in lessons if lesson.key not in base]
            found = before if sitting.live == bare else self._under(bare, {}, new)
            base |= {key: likelihood for key, likelihood in found.items() if key not in base}
        return tuple(
            Asked(s, before[s], after[s], base.get(s), lineage.best.get(s)) for s in (each.key for each in lessons)
        )

    def _under(self, stack: Stack, answering: Mapping[str, Stack], lessons: Sequence[Lesson]) -> dict[str, float]:
        groups: dict[Stack, list[Lesson]] = {}
        for lesson in lessons:
            groups.setdefault(answering.get(lesson.messages[-1].content, stack), []).append(lesson)
        return {
            key: found for each, some in groups.items() for key, found in likelihoods(self.engine, some, each).items()
        }
