"""Build a user's layers on another base, from the ledger, and compare both by the held-out lessons.

Layers that the user had on that base before are continued, so going back trains only what is new.
Otherwise each is built from scratch, with the recipe of the base's card.

Invariants: no head moves. A revision whose inputs are those of a recorded one is not trained again.
A training that is interrupted continues from its checkpoint.

Bases have tokens of their own, so log-probs per token cannot be compared. The log-prob of a whole
text can: it is that of the same characters. It is divided by the bytes of the text, as bits per
byte are (Gao et al. 2020, arXiv 2101.00027, section 3.1). An end of turn counts as one byte. A long
text is cut at the same character for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby

from personalpeft.backends.base import Backend
from personalpeft.engine.engine import Request
from personalpeft.errors import NothingToLearn, PersonalPeftError
from personalpeft.learning.candidate import (
    Candidate,
    deleting_unrecorded,
    find_candidate,
    store_candidate,
)
from personalpeft.learning.data.general_prompts import load_general_prompts, prompt_languages
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.data.lesson_assignment import load_assignments
from personalpeft.learning.evaluate.eval_job import (
    EXAMPLE_SAMPLING,
    MAX_EXAMPLES,
    EvalJob,
    EvalSet,
    ThrottledScorer,
    add_prompt_examples,
    effective_stack,
    make_eval_job,
    score_answers,
)
from personalpeft.learning.evaluate.evaluation import evaluate
from personalpeft.learning.evaluate.exposure import measure_build_leakage
from personalpeft.learning.gate.evidence import EvalItem, Evidence, PromptExampleResults
from personalpeft.learning.layers import LayerState, layer_order, trained_on
from personalpeft.learning.learner import Learner
from personalpeft.learning.options import cancelled_error, not_cancelled
from personalpeft.learning.outcomes import LearnOutcome, MoveCause, text_reason
from personalpeft.learning.plan import MIN_LESSONS, Plan, build_plan
from personalpeft.learning.report import Example, LearnReport
from personalpeft.learning.train.config import MAX_LENGTH, Start
from personalpeft.learning.train.loop import train_alone
from personalpeft.memory.languages import find_languages
from personalpeft.services import Services
from personalpeft.store.store import Store
from personalpeft.types import PROMPT_EXAMPLES, Json, Progress, Stack, StackEntry

UNJUDGED = "built on another base, and not judged yet"
"""The reason of a revision until its stack is compared."""


@dataclass(frozen=True, slots=True)
class RebasedLayer:
    """One live layer: its revisions before and after. None: nothing gives it there, and ``why``.

    ``trained``: it was trained by this rebase. Otherwise a recorded revision was found.
    """

    layer: str
    before: str
    after: str | None
    trained: bool = False
    why: str = ""


def last_stack(store: Store, user: str, base: str) -> Stack:
    """Return the heads that a user has on a base, or had when the layers left it.

    Args:
        store: The open home.
        user: The user.
        base: The digest of the base.
    """
    revisions = {each.id: each for each in store.catalog.revisions(user)}
    heads: dict[str, str] = {}
    last: dict[str, str] = {}
    moves = store.catalog.head_moves(user)

    def is_on_base() -> bool:
        return any(revisions[each].base == base for each in heads.values())

    for (cause, _), group in groupby(moves, key=lambda move: (move.cause, move.at)):
        if cause == MoveCause.REBASE and is_on_base():
            last = dict(heads)
        for move in group:
            heads.pop(move.layer, None)
            if move.after is not None:
                heads[move.layer] = move.after
    if is_on_base():
        last = heads
    entries = [
        StackEntry(layer.name, last[layer.name], revisions[last[layer.name]].digest, layer.weight)
        for layer in store.catalog.layers(user)
        if layer.name in last
    ]
    return Stack(base, tuple(entries))


def build_layers(
    services: Services,
    user: str,
    heads: Mapping[str, str],
    former: Stack,
    *,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> tuple[Stack, tuple[RebasedLayer, ...]]:
    """Build the live layers of a user on the open base, lowest first, and record the new revisions.

    Call it inside ``LazyModel.learning``, with the user's lease.

    Args:
        services: The wired parts of the new base.
        user: The user.
        heads: The live revision of each layer, in the order of the stack.
        former: The stack to continue. Without entries all is built from scratch.
        progress: Called with a stage and the share of it that is done.
        cancelled: Called between steps; returns whether to stop.

    Returns:
        The new stack, and each layer before and after.

    Raises:
        Cancelled: ``cancelled`` returned True. What was built stays.
        ServingFailed: The model failed.
    """
    stack = Stack(services.base.digest)
    layers: list[RebasedLayer] = []
    entries = {entry.layer: entry for entry in former.entries}
    for layer in sorted(heads, key=layer_order):
        found = _decide(services, user, layer, stack, entries.get(layer))
        if isinstance(found, str):
            layers.append(RebasedLayer(layer, heads[layer], None, why=found))
            continue
        is_trained = False
        if isinstance(found, Plan):
            found, is_trained = _find_or_build(services, found, progress, cancelled)
        stack = replace(stack, entries=(*stack.entries, found))
        layers.append(RebasedLayer(layer, heads[layer], found.revision, is_trained))
    return stack, tuple(layers)


def _decide(
    services: Services, user: str, layer: str, below: Stack, former: StackEntry | None
) -> Plan | StackEntry | str:
    """Return the build of a layer, or the former head if nothing is new, or why there is none."""
    store = services.store
    live = replace(below, entries=(*below.entries, former)) if former else below
    state = LayerState(store, user, layer, live, load_assignments(store, user))
    recipe = Learner.from_services(services).recipes.for_layer(layer)
    start: Start = "auto" if former else "scratch"
    began = services.clock.timer()
    try:
        plan = build_plan(services, state, recipe, start, began, force=former is not None)
    except NothingToLearn as nothing:
        # A head of outdated lessons does not come back.
        return former if former and not state.outdated else nothing.message
    if not plan.has_enough:
        return f"a first build takes {MIN_LESSONS} lessons"
    if former and plan.is_incremental:
        disliked = {each.signal for each in plan.undesirable_examples}
        if not plan.new_examples and disliked <= trained_on(store, state.head):
            return former
    return plan


def _find_or_build(
    services: Services, plan: Plan, progress: Progress, cancelled: Callable[[], bool]
) -> tuple[StackEntry, bool]:
    """Find the recorded revision of a plan's inputs, or train and record it.

    Returns its entry, and whether it was trained.
    """
    store, clock = services.store, services.clock
    if known := find_candidate(store, plan):
        return known.entry, False
    weights = train_alone(services, plan, progress=progress, cancelled=cancelled)
    candidate = store_candidate(services, plan, weights)
    with deleting_unrecorded(store, [candidate]):
        unjudged = LearnReport(
            plan.user,
            plan.layer,
            LearnOutcome.ABSTAINED,
            (text_reason(UNJUDGED),),
            clock.now(),
            round(clock.timer() - plan.began, 3),
            scores={**candidate.scores, **_measure(services, candidate, cancelled)},
        )
        revision = candidate.to_revision(unjudged)
        report = {"rebase": {"base": plan.live.base, "revision": revision.id}}
        store.catalog.add_revision(
            revision, candidate.blob, report, promote=False, cause=MoveCause.REBASE
        )
    store.delete_checkpoint(plan.user, plan.layer)
    return candidate.entry, True


def _measure(services: Services, candidate: Candidate, cancelled: Callable[[], bool]) -> Json:
    """Return the scores that do not compare bases: the leakage, and a style's examples."""
    plan = candidate.plan
    probes, bare = EvalSet(plan.general_prompts), Stack(candidate.stack.base)
    lessons = replace(
        probes,
        retention=plan.holdout,
        trained=(*plan.replay, *plan.new_examples),
        max_length=plan.recipe.max_length,
    )
    job = make_eval_job(services, plan, bare, candidate.stack, lessons)
    scorer = ThrottledScorer(services.learning_engine, not_cancelled, cancelled)
    leakage = measure_build_leakage(scorer, job)
    examples = PromptExampleResults()
    if plan.layer == "style":
        job = add_prompt_examples(services, replace(job, eval_set=probes), plan)
        examples = _evaluate_one(services, job, cancelled).prompt_examples
    return {"leakage": asdict(leakage), PROMPT_EXAMPLES: asdict(examples)}


def _evaluate_one(services: Services, job: EvalJob, cancelled: Callable[[], bool]) -> Evidence:
    """Return the evidence of one evaluation. Raises its error."""
    result = evaluate(services, {job.user: job}, cancelled=cancelled)[job.user]
    if isinstance(result, PersonalPeftError):
        raise result
    return result[0]


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out lesson of a layer. Its chosen text is perhaps cut, for both sides alike."""

    layer: str
    lesson: Lesson

    @property
    def size(self) -> int:
        """The bytes of the text, and one for the end of the turn."""
        return len(self.lesson.chosen.encode()) + self.lesson.ended


@dataclass(frozen=True, slots=True)
class BaseComparison:
    """The same questions on both sides, in nats per byte; ``examples`` has generated answers."""

    questions: tuple[Question, ...]
    items: tuple[EvalItem, ...]
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two stacks, with the wired parts of its base. ``cancelled``: whether to stop."""

    services: Services
    user: str
    stack: Stack
    cancelled: Callable[[], bool]

    def stacks_for(self, questions: Sequence[Question]) -> dict[str, Stack]:
        """Return the stack for each question by the key of its lesson, with its layer attached."""
        prompts = [question.lesson.messages[-1].content for question in questions]
        # Which layers are attached to a prompt does not depend on the layer that asks.
        effective = effective_stack(self.services.router, self.user, "", self.stack, prompts, {})
        return {
            each.lesson.key: replace(effective, layer=each.layer).for_layer(each.lesson)
            for each in questions
        }

    def score(
        self, questions: Sequence[Question], stacks: Mapping[str, Stack]
    ) -> tuple[list[float], int]:
        """Return the log-prob per byte of each question's text, and the tokens of all texts."""
        self._check_not_cancelled()
        scorer = ThrottledScorer(self.services.learning_engine, not_cancelled, self.cancelled)
        lessons = [question.lesson for question in questions]
        scores = score_answers(scorer, lessons, lambda each: stacks[each.key], MAX_LENGTH)
        totals = {key: score.logp * len(score.token_logprobs) for key, score in scores.items()}
        values = [totals[each.lesson.key] / each.size for each in questions]
        return values, sum(len(score.token_logprobs) for score in scores.values())

    def answer(self, questions: Sequence[Question], stacks: Mapping[str, Stack]) -> list[str]:
        """Return the generated answers to questions."""
        requests = [
            Request(self.user, each.messages, stacks[each.key], EXAMPLE_SAMPLING, background=True)
            for each in (question.lesson for question in questions)
        ]
        texts = self.services.learning_engine.complete(requests, cancelled=self.cancelled)
        self._check_not_cancelled()
        return texts

    def _check_not_cancelled(self) -> None:
        if self.cancelled():
            raise cancelled_error("before the verdict")


def compare_sides(old: Side, new: Side, lessons: Mapping[str, Sequence[Lesson]]) -> BaseComparison:
    """Ask both sides the same questions.

    Args:
        old: The live stack.
        new: The stack that may take its place.
        lessons: The held-out lessons by layer.

    Raises:
        Cancelled: A side was cancelled.
    """
    sides = old, new
    backends = [side.services.learning_engine.backend for side in sides]
    pairs = [(layer, lesson) for layer, some in lessons.items() for lesson in some]
    questions = tuple(_question(layer, lesson, backends) for layer, lesson in pairs)
    live, candidate = (side.stacks_for(questions) for side in sides)
    before, old_tokens = old.score(questions, live)
    base, _ = old.score(questions, dict.fromkeys(live, Stack(old.stack.base)))
    after, new_tokens = new.score(questions, candidate)
    size = sum(question.size for question in questions)
    old_margin, new_margin = (
        Learner.from_services(side.services).margins.tie_margin for side in sides
    )
    margin = max(old_margin * old_tokens, new_margin * new_tokens) / size if size else 0.0
    items = tuple(
        EvalItem(question.lesson.key, was, now, bare, tie_margin=margin)
        for question, was, now, bare in zip(questions, before, after, base, strict=True)
    )
    shown = questions[:MAX_EXAMPLES]
    asked = [question.lesson.messages[-1].content for question in shown]
    examples = map(Example, asked, old.answer(shown, live), new.answer(shown, candidate))
    return BaseComparison(questions, items, tuple(examples))


def measure_general(side: Side, prompts: Sequence[str]) -> Evidence:
    """Return how a stack answers general probes, against its bare base.

    ``prompts`` are in the languages of the user. Raises ``Cancelled``, and ``PersonalPeftError`` if
    the model failed.
    """
    eval_set = EvalSet(load_general_prompts(find_languages(prompts, prompt_languages())))
    bare, stack = (
        effective_stack(side.services.router, side.user, "", each, eval_set.probes, {})
        for each in (Stack(side.stack.base), side.stack)
    )
    job = EvalJob(side.user, bare, stack, eval_set)
    return _evaluate_one(side.services, job, side.cancelled)


def _question(layer: str, lesson: Lesson, backends: Sequence[Backend]) -> Question:
    """Return a lesson, with its text cut where one of the bases has too many tokens for it."""
    text, ended = lesson.chosen, lesson.ended
    while (longest := max(len(each.encode(text)) for each in backends)) >= MAX_LENGTH:
        text = text[: min(len(text) - 1, len(text) * (MAX_LENGTH - 1) // longest)]
        ended = False
    return Question(layer, replace(lesson, chosen=text, ended=ended))
