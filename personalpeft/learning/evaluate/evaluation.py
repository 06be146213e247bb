"""Measure a candidate against the live stack and the bare base, on the engine that serves users.

Invariant: generation is greedy throughout, so the same stacks give the same evidence.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from personalpeft.backends.base import Backend, Continuation, Score
from personalpeft.chat.routing import AdapterRouter
from personalpeft.engine.completion_cache import CompletionCache, Completions
from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import PersonalPeftError
from personalpeft.learning.data.assignment import Lesson
from personalpeft.learning.data.style import PromptResponse
from personalpeft.learning.evaluate.measures import (
    RuleGain,
    TextQuality,
    logprob_gain,
    measure_text_quality,
)
from personalpeft.learning.evaluate.probes import (
    BASE_SAMPLING,
    MAX_REPLY_TOKENS,
    PROBE_SAMPLING,
    is_degenerate,
    load_general_prompts,
)
from personalpeft.learning.gate.gate import (
    BaseProbeResults,
    EvalHistory,
    EvalItem,
    Evidence,
    ProbeResults,
)
from personalpeft.learning.options import Condition, not_cancelled, wait_while
from personalpeft.learning.report import Example
from personalpeft.learning.train.loop import cancelled_error
from personalpeft.learning.train.losses import encode_continuation, template_span
from personalpeft.types import Message, Sampling, SignalKind, Stack

_EXAMPLE_SAMPLING = Sampling(max_tokens=40)
_MAX_EXAMPLES = 3
_MAX_ANSWER_TOKENS = 256
_MAX_QUALITY_TOKENS = 32
# A fact's answer is a word or two, and a liked reply is the model's own.
_UNWRITTEN_KINDS = (SignalKind.FACT, SignalKind.RATING)
# Seconds that one scoring call waits for users who chat: they may never stop.
_MAX_WAIT = 5.0


@dataclass(frozen=True, slots=True)
class EvalSet:
    """The lessons that a candidate is measured on."""

    target: tuple[Lesson, ...]  # held out in this layer, and not spent by its history
    retention: tuple[Lesson, ...]  # held out in this layer before this build
    other_layers: tuple[Lesson, ...]  # held out in all other layers
    trained_examples: tuple[Lesson, ...]  # of this build, in place of an empty target
    base_completions: Completions  # of the probes
    new_examples: tuple[Lesson, ...] = ()  # arrived since the last learn
    rule_lessons: tuple[Lesson, ...] = ()  # measure rules
    lessons_by_rule: Mapping[str, tuple[Lesson, ...]] = field(default_factory=dict)
    history: EvalHistory = field(default_factory=EvalHistory)


StackSelector: TypeAlias = Callable[[Lesson], Stack]
"""Returns the stack that a lesson is scored with."""


def constant_stack(stack: Stack) -> StackSelector:
    """Return a selector of one stack."""
    return lambda lesson: stack


@dataclass(frozen=True, slots=True)
class EffectiveStack:
    """A stack as it answers users: a layer with a scope is attached to some prompts only.

    ``parts`` has the layers that are attached to each prompt. Lessons of ``layer`` itself are
    scored with that layer in any case.
    """

    layer: str
    stack: Stack
    parts: Mapping[str, Stack]

    def for_layer(self, lesson: Lesson) -> Stack:
        """Return the stack for a lesson of the layer itself."""
        part = self.parts[lesson.messages[-1].content].entries
        kept = (entry for entry in self.stack.entries if entry in part or entry.layer == self.layer)
        return replace(self.stack, entries=tuple(kept))

    def for_other_layer(self, lesson: Lesson) -> Stack:
        """Return the stack for a lesson of another layer."""
        return self.parts[lesson.messages[-1].content]


def effective_stack(
    router: AdapterRouter,
    user: str,
    layer: str,
    stack: Stack,
    prompts: Sequence[str],
    built_from: Mapping[str, Collection[str]],
) -> EffectiveStack:
    """Return how a stack answers some prompts.

    ``built_from``: by layer, the signals of a revision that is not in the catalog yet.
    """
    prompts = list(dict.fromkeys(prompts))
    parts = router.select_each(user, stack, prompts, built_from)
    return EffectiveStack(layer, stack, dict(zip(prompts, parts, strict=True)))


@dataclass(frozen=True, slots=True)
class EvalJob:
    """One candidate to be measured against the live stack."""

    user: str
    live: EffectiveStack
    candidate: EffectiveStack
    eval_set: EvalSet

    @property
    def displayed_lessons(self) -> tuple[Lesson, ...]:
        """The lessons whose replies are generated for the report."""
        lessons = (
            *self.eval_set.target,
            *self.eval_set.trained_examples,
            *self.eval_set.retention,
        )
        return tuple({lesson.key: lesson for lesson in lessons}.values())[:_MAX_EXAMPLES]

    def requests(self) -> list[Request]:
        """Return what both stacks generate: replies to the probes, then to displayed lessons."""
        return [request for side in (self.live, self.candidate) for request in self._requests(side)]

    def _requests(self, side: EffectiveStack) -> Iterator[Request]:
        for probe in load_general_prompts().probes:
            stack, messages = side.parts[probe.question], (Message("user", probe.question),)
            sampling = BASE_SAMPLING if stack.is_bare else PROBE_SAMPLING
            yield Request(self.user, messages, stack, sampling, background=True)
        for lesson in self.displayed_lessons:
            stack = side.for_layer(lesson)
            yield Request(self.user, lesson.messages, stack, _EXAMPLE_SAMPLING, background=True)


def make_eval_job(
    router: AdapterRouter,
    user: str,
    layer: str,
    live: Stack,
    candidate: Stack,
    eval_set: EvalSet,
    built_from: Mapping[str, Collection[str]],
) -> EvalJob:
    """Return the evaluation of a candidate for a layer. Arguments as for ``effective_stack``."""
    lessons = (
        *eval_set.target,
        *eval_set.retention,
        *eval_set.other_layers,
        *eval_set.trained_examples,
        *eval_set.rule_lessons,
    )
    prompts = [probe.question for probe in load_general_prompts().probes]
    prompts += [lesson.messages[-1].content for lesson in lessons]
    return EvalJob(
        user,
        effective_stack(router, user, layer, live, prompts, {}),
        effective_stack(router, user, layer, candidate, prompts, built_from),
        eval_set,
    )


EvalResult: TypeAlias = tuple[Evidence, tuple[Example, ...]]
"""The evidence, and examples for the report."""


@dataclass(frozen=True, slots=True)
class ThrottledScorer:
    """Scores in turns with users who chat, since the model does one thing at a time."""

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
        self.engine.yield_to_foreground(_MAX_WAIT)
        return self.engine.score(items, stack, kl=kl)


Scorer: TypeAlias = Engine | ThrottledScorer
"""What scores continuations."""


def evaluate(
    engine: Engine,
    completions: CompletionCache,
    jobs: Mapping[str, EvalJob],
    *,
    cancelled: Condition,
    paused: Condition = not_cancelled,
) -> dict[str, EvalResult | PersonalPeftError]:
    """Measure the candidates of several users; return the result or the error of each.

    All replies are generated in one batch. Scoring gives way to users who chat. Raises
    ``Cancelled`` when the caller stops.
    """
    requests = {user: job.requests() for user, job in jobs.items()}
    replies = completions.complete_for_users(requests, cancelled=cancelled, paused=paused)
    scorer = ThrottledScorer(engine, paused, cancelled)
    results: dict[str, EvalResult | PersonalPeftError] = {}
    for user, job in jobs.items():
        generated = replies[user]
        if cancelled():
            raise cancelled_error("before the verdict")
        if isinstance(generated, PersonalPeftError):
            results[user] = generated
            continue
        try:
            results[user] = _measure(scorer, job, generated)
        except PersonalPeftError as error:
            results[user] = error
    return results


@dataclass(frozen=True, slots=True)
class AnswerLogProb:
    """Mean log-probs per token of a chosen reply.

    ``words``: of its words and its end. ``template``: of the response template around them.
    """

    words: float
    template: float | None = None


def answer_logprobs(
    engine: Scorer, lessons: Sequence[Lesson], select: StackSelector
) -> dict[str, float]:
    """Return the log-prob per token of each lesson's words, by the lesson's key."""
    parts = answer_logprobs_by_part(engine, lessons, select)
    return {key: logprob.words for key, logprob in parts.items()}


def answer_logprobs_by_part(
    engine: Scorer, lessons: Sequence[Lesson], select: StackSelector
) -> dict[str, AnswerLogProb]:
    """Return the log-probs of each lesson's chosen reply, by the lesson's key."""
    by_stack: dict[Stack, list[Lesson]] = {}
    for lesson in lessons:
        by_stack.setdefault(select(lesson), []).append(lesson)
    logprobs: dict[str, AnswerLogProb] = {}
    for stack, some in by_stack.items():
        items = [
            encode_continuation(
                engine.backend, each.messages, each.chosen, _MAX_ANSWER_TOKENS, ended=each.ended
            )
            for each in some
        ]
        for lesson, score in zip(some, engine.score(items, stack), strict=True):
            logprobs[lesson.key] = _split_score(engine.backend, lesson, score)
    return logprobs


def _split_score(backend: Backend, lesson: Lesson, score: Score) -> AnswerLogProb:
    # A template that repeats the request has ten tokens to an answer's one, and the stack below
    # knows them. In the mean they would hide whether the fact itself is known.
    request = lesson.messages[-1].content
    opening, closing = template_span(backend, lesson.template, request)
    end = len(score.token_logprobs) - len(backend.end_of_turn)
    if opening + closing == 0 or opening + closing >= end:
        return AnswerLogProb(score.logp)
    words = (*score.token_logprobs[opening : end - closing], *score.token_logprobs[end:])
    template = (*score.token_logprobs[:opening], *score.token_logprobs[end - closing : end])
    return AnswerLogProb(statistics.fmean(words), statistics.fmean(template))


def _measure(engine: Scorer, job: EvalJob, replies: Sequence[str]) -> EvalResult:
    """Measure one candidate. ``replies`` are those to ``EvalJob.requests``."""
    eval_set, history = job.eval_set, job.eval_set.history
    count = len(load_general_prompts().probes)
    before, after = replies[: len(replies) // 2], replies[len(replies) // 2 :]
    held_out = {each.key: each for each in (*eval_set.target, *eval_set.retention)}
    items = {
        item.signal: item
        for item in _score_items(engine, job, tuple(held_out.values()), against_base=True)
    }
    kl = list(_kl_from_base(engine, job))
    evidence = Evidence(
        target=tuple(items[lesson.key] for lesson in eval_set.target),
        retention=(
            *(items[lesson.key] for lesson in eval_set.retention),
            *_score_items(engine, job, eval_set.other_layers, against_base=True, is_own=False),
        ),
        trained_examples=_score_items(engine, job, eval_set.trained_examples, against_base=False),
        probes=_probe_results(job, before[:count], after[:count]),
        kl=sum(kl) / max(1, len(kl)),
        text_quality=_measure_new_examples(engine, job),
        rule_gains=_measure_rules(engine, job),
        prior_e_value=history.prior_e_value,
        spent_items=history.spent_items,
        decided_items=history.decided_items,
    )
    examples = tuple(
        Example(lesson.messages[-1].content, *texts)
        for lesson, *texts in zip(job.displayed_lessons, before[count:], after[count:], strict=True)
    )
    return evidence, examples


def _probe_results(job: EvalJob, before: Sequence[str], after: Sequence[str]) -> ProbeResults:
    prompts, of_base = load_general_prompts(), job.eval_set.history.base_probes

    def right(replies: Sequence[str]) -> set[int]:
        answered = zip(prompts.probes, replies, strict=False)
        return {n for n, (probe, reply) in enumerate(answered) if probe.is_right(reply)}

    if of_base.questions != prompts.digest:
        replies = [reply for _, reply in job.eval_set.base_completions]
        broken = sum(map(is_degenerate, replies))
        of_base = BaseProbeResults(prompts.digest, tuple(sorted(right(replies))), broken)
    right_before, right_after = right(before), right(after)
    return ProbeResults(
        asked=len(prompts.probes),
        right_before=len(right_before),
        still_right=len(right_before & right_after),
        base=of_base,
        kept_of_base=tuple(sorted(right_after & set(of_base.right))),
        broken_before=sum(map(is_degenerate, before)),
        broken=sum(map(is_degenerate, after)),
    )


def _kl_from_base(engine: Scorer, job: EvalJob) -> Iterator[float]:
    """Yield the candidate's KL from the base on the base's own completion of each probe.

    Measured on the base's words, since those of a style below are far from it by themselves.
    """
    by_stack: dict[Stack, list[Continuation]] = {}
    for messages, reply in job.eval_set.base_completions:
        if reply:
            item = encode_continuation(engine.backend, messages, reply, MAX_REPLY_TOKENS)
            by_stack.setdefault(job.candidate.parts[messages[-1].content], []).append(item)
    for stack, items in by_stack.items():
        yield from (score.kl or 0.0 for score in engine.score(items, stack, kl=True))


def _measure_new_examples(engine: Scorer, job: EvalJob) -> TextQuality:
    def logprobs(some: Sequence[PromptResponse]) -> Sequence[float]:
        items = [
            encode_continuation(
                engine.backend,
                [Message("user", each.request)],
                each.answer,
                _MAX_QUALITY_TOKENS,
            )
            for each in some
        ]
        return [score.logp for score in engine.score(items, Stack(job.live.stack.base))]

    new = job.eval_set.new_examples
    written = [each.prompt_response for each in new if each.kind not in _UNWRITTEN_KINDS]
    return measure_text_quality(written, logprobs)


def _measure_rules(engine: Scorer, job: EvalJob) -> dict[str, RuleGain]:
    lessons, by_rule = job.eval_set.rule_lessons, job.eval_set.lessons_by_rule
    if not by_rule:
        return {}

    def gains(select: StackSelector) -> dict[str, float]:
        plain = answer_logprobs(engine, lessons, select)
        return {
            rule: logprob_gain(plain, answer_logprobs(engine, some, select))
            for rule, some in by_rule.items()
        }

    base, layer = gains(constant_stack(Stack(job.live.stack.base))), gains(job.candidate.for_layer)
    return {rule: RuleGain(base[rule], layer[rule]) for rule in by_rule}


def _score_items(
    engine: Scorer,
    job: EvalJob,
    lessons: Sequence[Lesson],
    *,
    against_base: bool,
    is_own: bool = True,
) -> tuple[EvalItem, ...]:
    """Score lessons under both stacks, and under the base where its scores are not known.

    ``is_own``: the lessons are of the layer that is evaluated.
    """
    live, candidate, history = job.live, job.candidate, job.eval_set.history
    before = answer_logprobs(engine, lessons, live.for_layer if is_own else live.for_other_layer)
    after = answer_logprobs(
        engine, lessons, candidate.for_layer if is_own else candidate.for_other_layer
    )
    base = dict(history.base)
    if against_base:
        bare = Stack(live.stack.base)
        new = [lesson for lesson in lessons if lesson.key not in base]
        is_bare = live.stack == bare
        base = (before if is_bare else answer_logprobs(engine, new, constant_stack(bare))) | base
    return tuple(
        EvalItem(key, before[key], after[key], base.get(key), history.baseline(key, before[key]))
        for key in (lesson.key for lesson in lessons)
    )
