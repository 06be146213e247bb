"""What one candidate is measured on: lessons, the stacks that answer, and the requests.

Where a verifier judges replies, to held-out prompts or to tasks, they are sampled and judged here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeAlias

from personalpeft.backends.base import Backend
from personalpeft.chat.routing import AdapterRouter
from personalpeft.engine.engine import Engine, Request
from personalpeft.learning.data.general_prompts import (
    BASE_SAMPLING,
    PROBE_SAMPLING,
    GeneralPrompts,
)
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.gate.evidence import (
    TIE_MARGIN,
    EvalHistory,
    EvalItem,
    Evidence,
    PromptExampleResults,
)
from personalpeft.learning.options import LearnOptions
from personalpeft.learning.report import Example
from personalpeft.learning.rl.rollouts import Rollout, sample_rollouts
from personalpeft.learning.train.config import MAX_LENGTH
from personalpeft.plugins import CheckedRewardShaper, CheckedVerifier, Task
from personalpeft.types import Message, Sampling, Stack

MAX_EXAMPLES = 3
EXAMPLE_SAMPLING = Sampling(max_tokens=40)
_MAX_GENERATED = 6
# A dozen edits leave three held-out prompts. One reply to each is too little to judge by.
_SEEDS = (1, 2)
MAX_RATED = 200
"""The liked replies that the classifier is fit on, and as many disliked ones, the newest of each."""
MAX_COMPARED = 20
"""The held-out prompts to which the live stack and the candidate both reply, to be compared."""
# Of tokens more than the longest wanted answer: a wrong one need not be written to its end.
_EXTRA_TOKENS = 4

EvalResult: TypeAlias = tuple[Evidence, tuple[Example, ...]]
"""The evidence, and examples for the report."""


@dataclass(frozen=True, slots=True)
class RatedReplies:
    """What the user rated, and the prompts by which new replies are compared with it."""

    liked: tuple[str, ...] = ()
    disliked: tuple[str, ...] = ()
    held_out: tuple[Lesson, ...] = ()  # rated lessons that were never trained on
    max_tokens: int = 1  # those of the longest rated reply


@dataclass(frozen=True, slots=True)
class EvalSet:
    """The lessons that a candidate is measured on."""

    undecided: tuple[Lesson, ...]  # held out in this layer, and not decided by its history
    retention: tuple[Lesson, ...]  # held out in this layer before this build
    other_layers: tuple[Lesson, ...]  # held out in all other layers
    general: GeneralPrompts  # has the probes
    arrived_lessons: tuple[Lesson, ...] = ()  # arrived since the last learn
    history: EvalHistory = field(default_factory=EvalHistory)
    max_length: int = MAX_LENGTH  # tokens at which a reply is cut
    tie_margin: float = TIE_MARGIN  # nats a token within which a lesson is tied
    trained: tuple[Lesson, ...] = ()  # trained on
    trained_elsewhere: bool = False  # on unknown lessons
    judges_replies: bool = False  # whether ``trained`` shows how the user wants to be answered
    rated: RatedReplies = RatedReplies()

    @property
    def decided(self) -> tuple[Lesson, ...]:
        """The held-out lessons of the layer that its history decided."""
        undecided = {lesson.key for lesson in self.undecided}
        return tuple(lesson for lesson in self.retention if lesson.key not in undecided)

    @property
    def benefit(self) -> tuple[Lesson, ...]:
        """The held-out lessons that show the benefit: the undecided ones, else the decided ones."""
        return self.undecided or self.decided


@dataclass(frozen=True, slots=True)
class EvalTask:
    """One task for both stacks. ``key`` is that of its item."""

    key: str
    task: Task
    live: Request
    candidate: Request


@dataclass(frozen=True, slots=True)
class EffectiveStack:
    """A stack as it answers users: a layer with a scope is attached to some prompts only.

    ``parts`` has the layers that are attached to each prompt. Lessons of ``layer`` itself are
    scored with that layer in any case. ``examples`` has the turns that precede the request of a
    lesson, by its key.
    """

    layer: str
    stack: Stack
    parts: Mapping[str, Stack]
    examples: Mapping[str, tuple[Message, ...]] = field(default_factory=dict)

    def for_layer(self, lesson: Lesson) -> Stack:
        """Return the stack for a lesson of the layer itself."""
        part = self.parts[lesson.messages[-1].content].entries
        kept = (entry for entry in self.stack.entries if entry in part or entry.layer == self.layer)
        return replace(self.stack, entries=tuple(kept))

    def for_other_layer(self, lesson: Lesson) -> Stack:
        """Return the stack for a lesson of another layer."""
        return self.parts[lesson.messages[-1].content]

    def messages_for(self, lesson: Lesson, stack: Stack) -> tuple[Message, ...]:
        """Return the prompt of a lesson as a user gets it from ``stack``, which answers it."""
        *before, request = lesson.messages
        examples = self.examples.get(lesson.key, ()) if stack.style else ()
        return (*before, *examples, request)


def effective_stack(
    router: AdapterRouter,
    user: str,
    layer: str,
    stack: Stack,
    prompts: Sequence[str],
    built_from: Mapping[str, Collection[str]],
) -> EffectiveStack:
    """Return how a stack answers some prompts.

    Args:
        router: Selects the layers for each prompt.
        user: The user.
        layer: The layer that is evaluated.
        stack: The whole stack.
        prompts: The prompts.
        built_from: By layer, the signals of a revision that is not in the catalog yet.
    """
    prompts = list(dict.fromkeys(prompts))
    requests = [[Message("user", prompt)] for prompt in prompts]
    parts = router.select_each(user, stack, requests, built_from)
    return EffectiveStack(layer, stack, dict(zip(prompts, parts, strict=True)))


@dataclass(frozen=True, slots=True)
class EvalJob:
    """One candidate to be measured against the live stack.

    ``prompt_examples`` are turns by the probe that they would precede; None where a candidate has
    none.
    """

    user: str
    live: EffectiveStack
    candidate: EffectiveStack
    eval_set: EvalSet
    prompt_examples: Mapping[str, tuple[Message, ...]] | None = None

    def as_served(self, measured: PromptExampleResults) -> EvalJob:
        """Return the job with the candidate as its users get it: perhaps without its examples."""
        if measured.served or self.prompt_examples is None:
            return self
        return replace(self, candidate=replace(self.candidate, examples={}))

    @property
    def generated_lessons(self) -> tuple[Lesson, ...]:
        """The lessons whose replies are generated; the report shows the first of them."""
        lessons = (*self.eval_set.undecided, *self.eval_set.retention)
        return tuple({lesson.key: lesson for lesson in lessons}.values())[:_MAX_GENERATED]

    def probe_requests(self) -> tuple[list[Request], ...]:
        """Return the requests of the probes, in groups.

        The live stack replies, then the candidate, then the candidate with examples in the prompt.
        """
        return (
            self._ask_probes(self.live),
            self._ask_probes(self.candidate),
            self._ask_with_examples(),
        )

    def lesson_requests(self, sampling: Sampling) -> tuple[list[Request], ...]:
        """Return the requests of the held-out lessons, in groups.

        Each stack, the live one first, replies greedily to those that the report shows. The
        candidate replies to the judged ones with the base's own ``sampling``, once for each seed.
        Then each stack replies to the held-out rated lessons, with that sampling.
        """
        rated, shown = self.eval_set.rated, self.generated_lessons

        def ask(side: EffectiveStack, lessons: Sequence[Lesson], own: Sampling) -> list[Request]:
            return [self._ask_lesson(side, each, own) for each in lessons]

        judged = [
            replace(sampling, max_tokens=EXAMPLE_SAMPLING.max_tokens, seed=seed)
            for seed in _SEEDS
            if sampling.temperature
        ]
        compared = replace(sampling, max_tokens=rated.max_tokens, seed=_SEEDS[0])
        return (
            ask(self.live, shown, EXAMPLE_SAMPLING),
            ask(self.candidate, shown, EXAMPLE_SAMPLING),
            [each for own in judged for each in ask(self.candidate, self.judged_lessons, own)],
            ask(self.live, rated.held_out, compared),
            ask(self.candidate, rated.held_out, compared),
        )

    @property
    def judged_lessons(self) -> tuple[Lesson, ...]:
        """The lessons whose generated replies are judged."""
        judged = {each.key for each in self.eval_set.benefit if self.eval_set.judges_replies}
        return tuple(each for each in self.generated_lessons if each.key in judged)

    def tasks(self, backend: Backend) -> list[EvalTask]:
        """Return the undecided prompts as tasks, whose ``about`` has the wanted "answer".

        Without examples in the prompt, as where lessons are scored.
        """
        lessons = self.eval_set.undecided
        longest = max(len(backend.encode(each.chosen)) for each in lessons)
        sampling = Sampling(max_tokens=longest + _EXTRA_TOKENS)
        return [
            EvalTask(
                f"{each.key}/right",
                Task(each.signal, each.messages[-1].content, {"answer": each.chosen}),
                *(
                    Request(
                        self.user, each.messages, side.for_layer(each), sampling, background=True
                    )
                    for side in (self.live, self.candidate)
                ),
            )
            for each in lessons
        ]

    def _ask_lesson(self, side: EffectiveStack, lesson: Lesson, sampling: Sampling) -> Request:
        stack = side.for_layer(lesson)
        messages = side.messages_for(lesson, stack)
        return Request(self.user, messages, stack, sampling, background=True)

    def _ask_probes(self, side: EffectiveStack) -> list[Request]:
        requests = []
        for probe in self.eval_set.general.probes:
            stack, messages = side.parts[probe.question], (Message("user", probe.question),)
            sampling = BASE_SAMPLING if stack.is_bare else PROBE_SAMPLING
            requests.append(Request(self.user, messages, stack, sampling, background=True))
        return requests

    def _ask_with_examples(self) -> list[Request]:
        return [
            Request(
                self.user,
                (*turns, Message("user", question)),
                self.candidate.parts[question],
                PROBE_SAMPLING,
                background=True,
            )
            for question, turns in (self.prompt_examples or {}).items()
        ]


def make_eval_job(
    router: AdapterRouter,
    user: str,
    layer: str,
    live: Stack,
    candidate: Stack,
    eval_set: EvalSet,
    built_from: Mapping[str, Collection[str]],
) -> EvalJob:
    """Return the evaluation of a candidate for a layer, without examples in the prompt.

    Args:
        router, user, layer, built_from: As for ``effective_stack``.
        live: The live stack.
        candidate: The stack with the candidate.
        eval_set: What is measured.
    """
    lessons = (
        *eval_set.undecided,
        *eval_set.retention,
        *eval_set.other_layers,
        *eval_set.trained,
        *eval_set.rated.held_out,
    )
    prompts = [probe.question for probe in eval_set.general.probes]
    prompts += [lesson.messages[-1].content for lesson in lessons]
    return EvalJob(
        user,
        effective_stack(router, user, layer, live, prompts, {}),
        effective_stack(router, user, layer, candidate, prompts, built_from),
        eval_set,
    )


def evaluate_replies(
    engine: Engine,
    tasks: Sequence[EvalTask],
    verifier: CheckedVerifier,
    shaping: CheckedRewardShaper | None,
    evidence: Evidence,
    options: LearnOptions,
) -> EvalResult:
    """Compare greedy replies of the live stack and of a candidate.

    Args:
        engine: Generates the replies.
        tasks: What is asked.
        verifier: Says how right a reply is.
        shaping: Changes the rewards of both replies to a task, or None.
        evidence: What else was measured.
        options: Stops or pauses the generation.

    Returns:
        The evidence, and examples. It has one undecided item for each task, by its (shaped) reward.

    Raises:
        Cancelled: The options ended it.
        PluginError: The verifier failed.
    """

    def sample(asked: Sequence[tuple[Task, Request]]) -> list[Rollout]:
        groups = sample_rollouts(
            engine, asked, verifier, cancelled=options.cancelled, paused=options.paused
        )
        return [rollout for (rollout,) in groups]

    before = sample([(each.task, each.live) for each in tasks])
    after = sample([(each.task, each.candidate) for each in tasks])
    items, examples = [], []
    for each, old, new in zip(tasks, before, after, strict=True):
        attempts = (old.attempt, new.attempt)
        rewards = tuple(attempt.reward for attempt in attempts)
        if shaping is not None:
            rewards = shaping.shape(attempts, fmean(attempt.passed for attempt in attempts))
        was, reached = rewards
        items.append(EvalItem(each.key, was, reached))
        examples.append(Example(each.task.prompt, old.text, new.text))
    figures = {
        "asked": len(items),
        "improved": sum(item.improved for item in items),
        "regressed": sum(item.regressed for item in items),
        "passed_before": sum(rollout.attempt.passed for rollout in before),
        "passed_after": sum(rollout.attempt.passed for rollout in after),
        "length_before": round(fmean(rollout.length for rollout in before), 4),
        "length_after": round(fmean(rollout.length for rollout in after), 4),
    }
    return replace(evidence, undecided=tuple(items), tasks=figures), tuple(examples[:MAX_EXAMPLES])
