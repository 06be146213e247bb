"""Asks a candidate, the live stack and the bare base the same questions, through the same engine that serves people, and
gathers the gate's evidence. What the base said is kept with a revision's scores, so that it is asked once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from personalpeft.backends.base import Backend, Continuation, Score
from personalpeft.chat.routing import AdapterRouter
from personalpeft.engine.completion_cache import CompletionCache, Completions
from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import PersonalPeftError
from personalpeft.learning.data.assignment import Lesson
from personalpeft.learning.data.response_template import PromptResponse
from personalpeft.learning.evaluate.completion_cache import BASE_SAMPLING, PROBE_SAMPLING
from personalpeft.learning.evaluate.probes import (
    RegressionProbe,
    is_degenerate,
    load_general_prompts,
)
from personalpeft.learning.evaluate.rule_gain import RuleGain, logprob_gain
from personalpeft.learning.evaluate.text_quality import TextQuality, measure_text_quality
from personalpeft.learning.gate.eval_history import EvalHistory
from personalpeft.learning.gate.gate import BaseProbeResults, EvalItem, Evidence, ProbeResults
from personalpeft.learning.options import Condition, not_cancelled, wait_while
from personalpeft.learning.report import Example
from personalpeft.learning.train.loop import cancelled_error
from personalpeft.learning.train.losses import template_span, encode_continuation
from personalpeft.learning.train.regularizer import MAX_REPLY_TOKENS
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
class EvalSet:
    """What is asked: ``target`` are the layer's pins that have not counted in the lineage, ``retention`` those that were
    pinned before this build, ``others`` those of all other layers, ``trained`` stands in where there is no target,
    ``of_base`` is what the bare base said to the canaries. ``new`` are the lessons that came since the last learn,
    ``unruled`` some questions of the layer, and ``rules`` the same as they are heard with each rule.
    """

    target: tuple[Lesson, ...]
    retention: tuple[Lesson, ...]
    other_layers: tuple[Lesson, ...]
    trained_examples: tuple[Lesson, ...]
    base_completions: Completions
    new_examples: tuple[Lesson, ...] = ()
    rule_lessons: tuple[Lesson, ...] = ()
    lessons_by_rule: Mapping[str, tuple[Lesson, ...]] = field(default_factory=dict)
    history: EvalHistory = field(default_factory=EvalHistory)


@dataclass(frozen=True, slots=True)
class EffectiveStack:
    """A stack as a person would have it answer, since a layer that is for one subject alone is not there for another: ``parts``
    has what answers each question. What ``layer`` was built for is asked of that layer in any case.
    """

    layer: str
    stack: Stack
    parts: Mapping[str, Stack]

    def for_prompt(self, question: str) -> Stack:
        """What answers a question about anything."""
        return self.parts[question]

    def for_layer(self, lesson: Lesson) -> Stack:
        """What answers a question that is the layer's own."""
        part = self.parts[lesson.messages[-1].content].entries
        kept = (entry for entry in self.stack.entries if entry in part or entry.layer == self.layer)
        return replace(self.stack, entries=tuple(kept))

    def for_other_layer(self, lesson: Lesson) -> Stack:
        """What answers a question of another layer."""
        return self.for_prompt(lesson.messages[-1].content)


def effective_stack(
    router: AdapterRouter,
    user: str,
    layer: str,
    stack: Stack,
    questions: Sequence[str],
    built_from: Mapping[str, Collection[str]],
) -> EffectiveStack:
    """How a stack answers some questions; ``built_from`` as for ``AdapterRouter.select_each``."""
    questions = list(dict.fromkeys(questions))
    parts = router.select_each(user, stack, questions, built_from)
    return EffectiveStack(layer, stack, dict(zip(questions, parts, strict=True)))


@dataclass(frozen=True, slots=True)
class EvalJob:
    """One candidate to be examined against what is live."""

    user: str
    live: EffectiveStack
    candidate: EffectiveStack
    eval_set: EvalSet

    @property
    def displayed_lessons(self) -> tuple[Lesson, ...]:
        """The lessons whose answers are written out, to be read."""
        paper = self.eval_set
        return tuple(
            {
                lesson.key: lesson
                for lesson in (*paper.target, *paper.trained_examples, *paper.retention)
            }.values()
        )[:_SHOWN]

    def requests(self) -> list[Request]:
        """All that is asked in words, of what is live and of the candidate."""
        canaries = [canary.question for canary in load_general_prompts().probes]
        asked: list[tuple[Stack, tuple[Message, ...], Sampling]] = []
        for side in (self.live, self.candidate):
            for question in canaries:
                stack = side.for_prompt(question)
                asked.append(
                    (
                        stack,
                        (Message("user", question),),
                        BASE_SAMPLING if stack.is_bare else PROBE_SAMPLING,
                    )
                )
            asked += [
                (side.for_layer(lesson), lesson.messages, _EXAMPLE)
                for lesson in self.displayed_lessons
            ]
        return [
            Request(self.user, messages, stack, how, background=True)
            for stack, messages, how in asked
        ]


def make_eval_job(
    router: AdapterRouter,
    user: str,
    layer: str,
    live: Stack,
    candidate: Stack,
    paper: EvalSet,
    built_from: Mapping[str, Collection[str]],
) -> EvalJob:
    """The sitting of a candidate for a layer; ``built_from`` as for ``AdapterRouter.select_each``."""
    lessons = (
        *paper.target,
        *paper.retention,
        *paper.other_layers,
        *paper.trained_examples,
        *paper.rule_lessons,
    )
    asked = [
        *(canary.question for canary in load_general_prompts().probes),
        *(each.messages[-1].content for each in lessons),
    ]
    return EvalJob(
        user,
        effective_stack(router, user, layer, live, asked, {}),
        effective_stack(router, user, layer, candidate, asked, built_from),
        paper,
    )


EvalResult: TypeAlias = tuple[Evidence, tuple[Example, ...]]
"""The evidence, and a few examples to show."""


class Scorer(Protocol):
    """What answers are weighed with: an ``Engine``, as far as that is needed."""

    @property
    def backend(self) -> Backend:
        """What the texts are made tokens by."""

    def score(
        self, items: Sequence[Continuation], stack: Stack, *, kl: bool = False
    ) -> tuple[Score, ...]:
        """As ``Engine.score``."""


@dataclass(frozen=True, slots=True)
class ThrottledScorer:
    """Scores while nobody pauses it, and lets people who chat beside it go first. The model does one thing at a time, and whoever
    scores one thing after another would hardly let go of it.
    """

    engine: Engine
    paused: Condition
    cancelled: Condition

    @property
    def backend(self) -> Backend:
        return self.engine.backend

    def score(
        self, items: Sequence[Continuation], stack: Stack, *, kl: bool = False
    ) -> tuple[Score, ...]:
        wait_while(self.paused, self.cancelled)
        self.engine.yield_to_foreground(_PATIENCE)
        return self.engine.score(items, stack, kl=kl)


def evaluate(
    engine: Engine,
    completions: CompletionCache,
    sittings: Mapping[str, EvalJob],
    *,
    cancelled: Condition,
    paused: Condition = not_cancelled,
) -> dict[str, EvalResult | PersonalPeftError]:
    """Examines candidates of different users: all that they write is one batch, and rows of all stacks run together.
    Greedy throughout, so the same stacks give the same evidence. It waits while people chat, and while ``paused``.
    What cannot be asked of one user's stacks is that user's alone. Raises ``Cancelled``.
    """
    requests = {user: sitting.requests() for user, sitting in sittings.items()}
    replies = completions.complete_for_users(requests, cancelled=cancelled, paused=paused)
    patiently = ThrottledScorer(engine, paused, cancelled)
    examined: dict[str, EvalResult | PersonalPeftError] = {}
    for user, sitting in sittings.items():
        said = replies[user]
        if cancelled():
            raise cancelled_error("before the verdict")
        try:
            examined[user] = (
                said if isinstance(said, PersonalPeftError) else _weighed(patiently, sitting, said)
            )
        except PersonalPeftError as error:
            examined[user] = error
    return examined


@dataclass(frozen=True, slots=True)
class AnswerLogProb:
    """Mean log-probs a token of one wanted answer: of its ``words`` and that it ends there, and of the ``manner`` in which a short
    answer is said, where it is said in any.
    """

    words: float
    template: float | None = None


StackSelector: TypeAlias = Callable[[Lesson], Stack]
"""What answers a lesson."""


def constant_stack(stack: Stack) -> StackSelector:
    """The same stack, whatever is asked."""
    return lambda lesson: stack


def answer_logprobs(
    engine: Scorer, lessons: Sequence[Lesson], by: StackSelector
) -> dict[str, float]:
    """How likely the words of what each lesson wants are, by its key."""
    return {key: of.words for key, of in answer_logprobs_by_part(engine, lessons, by).items()}


def answer_logprobs_by_part(
    engine: Scorer, lessons: Sequence[Lesson], by: StackSelector
) -> dict[str, AnswerLogProb]:
    """How likely what each lesson wants is, by its key, apart from the manner in which it is said."""
    groups: dict[Stack, list[Lesson]] = {}
    for lesson in lessons:
        groups.setdefault(by(lesson), []).append(lesson)
    found: dict[str, AnswerLogProb] = {}
    for stack, asked in groups.items():
        items = [
            encode_continuation(engine.backend, a.messages, a.chosen, _LONGEST, ended=a.ended)
            for a in asked
        ]
        for lesson, score in zip(asked, engine.score(items, stack), strict=True):
            found[lesson.key] = _in_parts(engine.backend, lesson, score)
    return found


def _in_parts(backend: Backend, lesson: Lesson, score: Score) -> AnswerLogProb:
    # A manner that repeats the question has ten words to an answer's one, and they are known from what lies below. With
    # them a fact would pass for known by heart that is not, and for lost where only the manner moved.
    opening, closing = template_span(backend, lesson.template, lesson.prompt_response.request)
    last = len(score.tokens) - len(backend.end_of_turn)
    if opening + closing == 0 or opening + closing >= last:
        return AnswerLogProb(score.logp)
    words = (*score.tokens[opening : last - closing], *score.tokens[last:])
    manner = (*score.tokens[:opening], *score.tokens[last - closing : last])
    return AnswerLogProb(statistics.fmean(words), statistics.fmean(manner))


def _weighed(engine: Scorer, sitting: EvalJob, replies: Sequence[str]) -> EvalResult:
    generic, paper = load_general_prompts(), sitting.eval_set
    canaries, of_base = generic.probes, paper.history.base_probes
    asked = len(canaries) + len(sitting.displayed_lessons)
    before, after = replies[:asked], replies[asked:]
    right, still = _right(canaries, before), _right(canaries, after)
    broken_before = sum(is_degenerate(reply) for reply in before[: len(canaries)])
    if of_base.questions != generic.digest:
        said = [reply for _, reply in paper.base_completions]
        of_base = BaseProbeResults(
            generic.digest, tuple(sorted(_right(canaries, said))), sum(map(is_degenerate, said))
        )
    compare = _Comparison(engine, sitting)
    pins = {lesson.key: lesson for lesson in (*paper.target, *paper.retention)}
    scored = {asked.signal: asked for asked in compare(tuple(pins.values()), against_base=True)}
    divergence = list(_divergence(engine, sitting))
    evidence = Evidence(
        target=tuple(scored[lesson.key] for lesson in paper.target),
        retention=(
            *(scored[lesson.key] for lesson in paper.retention),
            *compare(paper.other_layers, against_base=True, own=False),
        ),
        trained_examples=compare(paper.trained_examples, against_base=False),
        probes=ProbeResults(
            asked=len(canaries),
            right_before=len(right),
            still_right=len(right & still),
            base=of_base,
            kept_of_base=tuple(sorted(still & set(of_base.right))),
            broken_before=broken_before,
            broken=sum(is_degenerate(reply) for reply in after[: len(canaries)]),
        ),
        kl=sum(divergence) / max(1, len(divergence)),
        text_quality=_sense(engine, sitting),
        rule_gains=_rules(engine, sitting),
        prior_e_value=paper.history.prior_e_value,
        spent_items=paper.history.spent_items,
    )
    first = len(canaries)
    examples = tuple(
        Example(lesson.messages[-1].content, before[first + i], after[first + i])
        for i, lesson in enumerate(sitting.displayed_lessons)
    )
    return evidence, examples


def _divergence(engine: Scorer, sitting: EvalJob) -> Iterator[float]:
    """How far the candidate is from the base on what that says to each canary, in nats a token: its own words, since those
    of a style below are far from it by themselves, and to questions that nothing was held to.
    """
    groups: dict[Stack, list[Continuation]] = {}
    for messages, reply in sitting.eval_set.base_completions:
        if reply:
            said = encode_continuation(engine.backend, messages, reply, MAX_REPLY_TOKENS)
            groups.setdefault(sitting.candidate.for_prompt(messages[-1].content), []).append(said)
    for stack, said_on in groups.items():
        yield from (score.kl or 0.0 for score in engine.score(said_on, stack, kl=True))


def _sense(engine: Scorer, sitting: EvalJob) -> TextQuality:
    """Whether what is new means something, as the bare base sees it."""

    def likelihoods(said: Sequence[PromptResponse]) -> Sequence[float]:
        items = [
            encode_continuation(engine.backend, [Message("user", each.request)], each.answer, _LOOK)
            for each in said
        ]
        return [score.logp for score in engine.score(items, Stack(sitting.live.stack.base))]

    written = [
        lesson.prompt_response
        for lesson in sitting.eval_set.new_examples
        if lesson.kind not in _NOT_WRITTEN
    ]
    return measure_text_quality(written, likelihoods)


def _rules(engine: Scorer, sitting: EvalJob) -> dict[str, RuleGain]:
    """What each rule explains of some answers, to the bare base and to the candidate."""
    rules, asked = sitting.eval_set.lessons_by_rule, sitting.eval_set.rule_lessons
    if not rules:
        return {}

    def to(by: StackSelector) -> dict[str, float]:
        plain = answer_logprobs(engine, asked, by)
        return {
            rule: logprob_gain(plain, answer_logprobs(engine, heard, by))
            for rule, heard in rules.items()
        }

    to_base, to_layer = (
        to(constant_stack(Stack(sitting.live.stack.base))),
        to(sitting.candidate.for_layer),
    )
    return {rule: RuleGain(to_base[rule], to_layer[rule]) for rule in rules}


def _right(canaries: Sequence[RegressionProbe], replies: Sequence[str]) -> set[int]:
    """Which of the canaries the first replies answer."""
    return {
        i
        for i, (canary, reply) in enumerate(zip(canaries, replies, strict=False))
        if canary.is_right(reply)
    }


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Scores lessons under the live stack and the candidate, and under the base where it is not known what that says."""

    engine: Scorer
    sitting: EvalJob

    def __call__(
        self, lessons: Sequence[Lesson], *, against_base: bool, own: bool = True
    ) -> tuple[EvalItem, ...]:
        """``own``: whether the lessons are the layer's own."""
        live, candidate, lineage = (
            self.sitting.live,
            self.sitting.candidate,
            self.sitting.eval_set.history,
        )
        before = answer_logprobs(
            self.engine, lessons, live.for_layer if own else live.for_other_layer
        )
        after = answer_logprobs(
            self.engine, lessons, candidate.for_layer if own else candidate.for_other_layer
        )
        base = dict(lineage.base)
        if against_base:
            bare = Stack(live.stack.base)
            new = [lesson for lesson in lessons if lesson.key not in base]
            found = (
                before
                if live.stack == bare
                else answer_logprobs(self.engine, new, constant_stack(bare))
            )
            base |= {key: likelihood for key, likelihood in found.items() if key not in base}
        return tuple(
            EvalItem(s, before[s], after[s], base.get(s), lineage.baseline(s, before[s]))
            for s in (each.key for each in lessons)
        )
