"""What one candidate is measured on: lessons, the stacks that answer, and the requests.

Invariant: only lessons that were trained on are examples in a prompt, since no lesson may judge a
candidate that answers after it. ``chat.examples`` selects those of users.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias

from personalpeft.backends.base import Backend, Continuation, Score
from personalpeft.chat.examples import (
    MAX_LESSONS,
    MIN_LESSONS,
    begins_conversation,
    is_short,
    nearest_examples,
)
from personalpeft.chat.routing import AdapterRouter
from personalpeft.engine.engine import Engine, Request
from personalpeft.learning.data.general_prompts import BASE_SAMPLING, PROBE_SAMPLING, GeneralPrompts
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.data.lesson_assignment import load_style_examples
from personalpeft.learning.gate.evidence import TIE_MARGIN, EvalHistory, PromptExampleResults
from personalpeft.learning.layers import trained_on
from personalpeft.learning.options import (
    MAX_YIELD_SECONDS,
    Condition,
    cancelled_error,
    wait_while,
)
from personalpeft.learning.plan import Plan
from personalpeft.learning.train.config import MAX_LENGTH
from personalpeft.learning.train.losses import encode_continuation
from personalpeft.memory.types import Vectors
from personalpeft.plugins import Task
from personalpeft.services import Services
from personalpeft.types import (
    IS_SERVED,
    PROMPT_EXAMPLES,
    Message,
    PromptExample,
    Sampling,
    Stack,
    split_system,
)

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

    general: GeneralPrompts  # has the probes
    undecided: tuple[Lesson, ...] = ()  # held out in this layer, not decided by its history
    retention: tuple[Lesson, ...] = ()  # held out in this layer before this build
    other_layers: tuple[Lesson, ...] = ()  # held out in all other layers
    arrived_lessons: tuple[Lesson, ...] = ()  # arrived since the last learn
    history: EvalHistory = field(default_factory=EvalHistory)
    max_length: int = MAX_LENGTH  # tokens at which a reply is cut
    tie_margin: float = TIE_MARGIN  # nats a token within which a lesson is tied
    trained: tuple[Lesson, ...] = ()  # trained on
    trained_elsewhere: bool = False  # on unknown lessons
    judges_replies: bool = False  # whether ``trained`` shows how the user wants to be answered
    rated: RatedReplies = RatedReplies()

    @property
    def probes(self) -> list[str]:
        """The questions of the general probes."""
        return [probe.question for probe in self.general.probes]

    @property
    def held_out(self) -> tuple[Lesson, ...]:
        """The held-out lessons of the layer."""
        lessons = (*self.undecided, *self.retention)
        return tuple({lesson.key: lesson for lesson in lessons}.values())

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
        return self.eval_set.held_out[:_MAX_GENERATED]

    def probe_requests(self) -> tuple[list[Request], ...]:
        """Return the requests of the probes, in groups.

        The live stack replies, then the candidate, then the candidate with examples in the prompt.
        """
        with_examples = [
            self._ask((*turns, Message("user", probe)), self.candidate.parts[probe], PROBE_SAMPLING)
            for probe, turns in (self.prompt_examples or {}).items()
        ]
        return self._ask_probes(self.live), self._ask_probes(self.candidate), with_examples

    def lesson_requests(self, sampling: Sampling) -> tuple[list[Request], ...]:
        """Return the requests of the held-out lessons, in groups.

        Each stack, the live one first, replies greedily to those that the report shows. The
        candidate replies to the judged ones with the base's own ``sampling``, once for each seed.
        Then each stack replies to the held-out rated lessons, with that sampling.
        """
        rated, shown = self.eval_set.rated, self.generated_lessons
        sampled: list[Request] = []
        for seed in _SEEDS if sampling.temperature else ():
            own = replace(sampling, max_tokens=EXAMPLE_SAMPLING.max_tokens, seed=seed)
            sampled += self._ask_lessons(self.candidate, self.judged_lessons, own)
        compared = replace(sampling, max_tokens=rated.max_tokens, seed=_SEEDS[0])
        return (
            self._ask_lessons(self.live, shown, EXAMPLE_SAMPLING),
            self._ask_lessons(self.candidate, shown, EXAMPLE_SAMPLING),
            sampled,
            self._ask_lessons(self.live, rated.held_out, compared),
            self._ask_lessons(self.candidate, rated.held_out, compared),
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
                self._ask(each.messages, self.live.for_layer(each), sampling),
                self._ask(each.messages, self.candidate.for_layer(each), sampling),
            )
            for each in lessons
        ]

    def _ask_probes(self, side: EffectiveStack) -> list[Request]:
        requests = []
        for probe in self.eval_set.probes:
            stack = side.parts[probe]
            sampling = BASE_SAMPLING if stack.is_bare else PROBE_SAMPLING
            requests.append(self._ask((Message("user", probe),), stack, sampling))
        return requests

    def _ask_lessons(
        self, side: EffectiveStack, lessons: Sequence[Lesson], sampling: Sampling
    ) -> list[Request]:
        """Return the requests of lessons as a user's prompt: with the examples of the stack."""
        requests = []
        for each in lessons:
            stack = side.for_layer(each)
            *before, request = each.messages
            examples = side.examples.get(each.key, ()) if stack.style else ()
            requests.append(self._ask((*before, *examples, request), stack, sampling))
        return requests

    def _ask(self, messages: tuple[Message, ...], stack: Stack, sampling: Sampling) -> Request:
        return Request(self.user, messages, stack, sampling, background=True)


def make_eval_job(
    services: Services, plan: Plan, live: Stack, candidate: Stack, eval_set: EvalSet
) -> EvalJob:
    """Return the evaluation of a build, without examples in the prompt.

    Args:
        services: The wired parts.
        plan: What was built.
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
    prompts = [*eval_set.probes, *(lesson.messages[-1].content for lesson in lessons)]
    held_out = (lesson.signal for lesson in plan.holdout)
    built_from = {*plan.signal_roles, *held_out, *trained_on(services.store, plan.parent)}
    router, user, layer = services.router, plan.user, plan.layer
    return EvalJob(
        user,
        effective_stack(router, user, layer, live, prompts, {}),
        effective_stack(router, user, layer, candidate, prompts, {layer: built_from}),
        eval_set,
    )


def add_prompt_examples(services: Services, job: EvalJob, plan: Plan) -> EvalJob:
    """Return the evaluation of a style with the examples of the live revision and the candidate.

    Args:
        services: The wired parts.
        job: The evaluation, without examples.
        plan: What was built.
    """
    if plan.layer != "style":
        return job
    eval_set = job.eval_set
    held_out = (*eval_set.held_out, *eval_set.rated.held_out)

    def find(examples: Sequence[PromptExample]) -> dict[str, tuple[Message, ...]]:
        return _examples_for_lessons(services, examples, held_out, eval_set.max_length)

    live = find(_live_examples(services, plan, {each.signal for each in held_out}))
    job = replace(job, live=replace(job.live, examples=live))
    lessons = (*plan.replay, *plan.new_examples)
    known = {each.signal: each for lesson in lessons if (each := lesson.example) is not None}
    examples = list(known.values())[-MAX_LESSONS:]
    if len(examples) < MIN_LESSONS:
        return job
    return replace(
        job,
        candidate=replace(job.candidate, examples=find(examples)),
        prompt_examples=_examples_for_probes(services, plan, examples),
    )


def _live_examples(
    services: Services, plan: Plan, held_out: Collection[str]
) -> list[PromptExample]:
    """Return the lessons that the live style was trained on, if its users get examples."""
    style = plan.live.style
    if style is None:
        return []
    head = services.store.catalog.revision(plan.user, style.revision)
    if not head.scores.get(PROMPT_EXAMPLES, {}).get(IS_SERVED):
        return []
    shown = trained_on(services.store, head) - set(held_out)
    known = load_style_examples(services.store, plan.user, head.recipe.get("scrub", ()))
    return [each for each in known if each.signal in shown][-MAX_LESSONS:]


def _examples_for_probes(
    services: Services, plan: Plan, examples: Sequence[PromptExample]
) -> dict[str, tuple[Message, ...]]:
    """Return the examples that precede each probe which is like the lessons."""
    probes = [probe.question for probe in plan.general_prompts.probes]
    vectors = services.memory.embedder.embed([each.request for each in examples])
    every = list(range(len(examples)))
    asked = [
        (probe, (Message("user", probe),), row, every)
        for probe, row in zip(probes, services.router.embed_general(probes), strict=True)
    ]
    return _nearest_turns(services, examples, vectors, asked, PROBE_SAMPLING.max_tokens)


def _examples_for_lessons(
    services: Services,
    examples: Sequence[PromptExample],
    held_out: Sequence[Lesson],
    max_length: int,
) -> dict[str, tuple[Message, ...]]:
    """Return, by key, the examples that precede each held-out lesson when a user asks it.

    As when users are served, later turns of a conversation and requests with tools have none, and
    the lessons of another system text are none. ``max_length``: most tokens of a reply.
    """
    if len(examples) < MIN_LESSONS or not held_out:
        return {}
    requests = [lesson.messages[-1].content for lesson in held_out]
    vectors = services.memory.embedder.embed([*(each.request for each in examples), *requests])
    asked = []
    for lesson, request in zip(held_out, vectors[len(examples) :], strict=True):
        system, _ = split_system(lesson.messages)
        own = [number for number, each in enumerate(examples) if each.system == system]
        if begins_conversation(lesson.messages) and len(own) >= MIN_LESSONS:
            asked.append((lesson.key, lesson.messages, request, own))
    return _nearest_turns(services, examples, vectors, asked, max_length)


def _nearest_turns(
    services: Services,
    examples: Sequence[PromptExample],
    vectors: Vectors,
    asked: Iterable[tuple[str, Sequence[Message], Vectors, list[int]]],
    max_tokens: int,
) -> dict[str, tuple[Message, ...]]:
    """Return the turns of the examples nearest to each prompt, where they fit, by its key.

    Args:
        services: The wired parts.
        examples: The examples.
        vectors: ``[examples, size]``, the embeddings of their requests.
        asked: The key, the messages and the embedding of each prompt, and which examples it may get.
        max_tokens: The most tokens of a reply.
    """
    backend = services.learning_engine.backend
    found = {}
    for key, (*before, request), vector, own in asked:
        nearest = nearest_examples([examples[number] for number in own], vectors[own], vector)
        turns = tuple(chain.from_iterable(each.turns for each in nearest))
        length = len(backend.render((*before, *turns, request))) + max_tokens
        if turns and is_short(turns, backend) and length <= backend.max_length:
            found[key] = turns
    return found


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
        if self.cancelled():
            raise cancelled_error("before the verdict")
        self.engine.yield_to_foreground(MAX_YIELD_SECONDS)
        return self.engine.score(items, stack, kl=kl)


Scorer: TypeAlias = Engine | ThrottledScorer
"""What scores continuations."""

StackSelector: TypeAlias = Callable[[Lesson], Stack]
"""Returns the stack that a lesson is scored with."""


def score_answers(
    engine: Scorer, lessons: Sequence[Lesson], select: StackSelector, max_length: int
) -> dict[str, Score]:
    """Return the score of each lesson's chosen reply, by the lesson's key.

    Args:
        engine: Scores.
        lessons: The lessons.
        select: Returns the stack for a lesson.
        max_length: The tokens at which a reply is cut, as in training.
    """
    items = [
        encode_continuation(
            engine.backend, each.messages, each.chosen, max_length, ended=each.ended
        )
        for each in lessons
    ]
    scores = score_each(engine, items, list(map(select, lessons)))
    return {lesson.key: score for lesson, score in zip(lessons, scores, strict=True)}


def score_each(
    engine: Scorer, items: Sequence[Continuation], stacks: Sequence[Stack]
) -> list[Score]:
    """Score each continuation under its own stack, those of one stack together."""
    scores: dict[int, Score] = {}
    for stack in dict.fromkeys(stacks):
        numbers = [number for number, each in enumerate(stacks) if each == stack]
        together = [items[number] for number in numbers]
        scores |= zip(numbers, engine.score(together, stack), strict=True)
    return [scores[number] for number in range(len(items))]
