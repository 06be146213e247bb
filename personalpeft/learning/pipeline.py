"""From plans to verdicts: what lies below answers generic questions, sessions train, candidates become durable and are
examined, judged and published. Each step is done for all users at once, and each user has a plan and an outcome alone.

Invariants: the head moves in the same transaction that records the revision, after its file is durable and was read back
through the strict reader; who leaves the group (by an error of any kind, or since time is up) changes nothing for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, TypeAlias, TypeVar

from personalpeft.adapters.formats.packed import in_half, pack
from personalpeft.adapters.types import Adapter, Manifest
from personalpeft.backends.base import Session
from personalpeft.engine.completion_cache import Completions
from personalpeft.engine.engine import Request
from personalpeft.errors import PersonalPeftError
from personalpeft.formatting import to_json
from personalpeft.learning.data.assignment import Lesson, lessons_for
from personalpeft.learning.data.batching import build_batches
from personalpeft.learning.data.capacity import estimate_session_mb, check_memory_budget
from personalpeft.learning.data.filters import find_leak
from personalpeft.learning.data.style_conflict import find_style_conflict
from personalpeft.learning.evaluate.completion_cache import BASE_SAMPLING
from personalpeft.learning.evaluate.evaluation import EvalJob, EvalSet, evaluate, make_eval_job
from personalpeft.learning.evaluate.probes import load_general_prompts
from personalpeft.learning.evaluate.rule_gain import MOST_LESSONS, MOST_RULES
from personalpeft.learning.gate.eval_history import eval_history
from personalpeft.learning.gate.gate import Evidence, Judgement, Margins, judge, override
from personalpeft.learning.gate.probation import ACCEPTED, LEARNED, refuse_withdrawn
from personalpeft.learning.options import LearnOptions
from personalpeft.learning.plan import Plan, holdout_of, live_revision
from personalpeft.learning.progress import publish
from personalpeft.learning.publish import publish_revision, session_spec
from personalpeft.learning.report import (
    LEARNED_NOT_LIVE,
    NO_ROOM,
    Example,
    LearnReport,
    Source,
    signal_text,
)
from personalpeft.learning.staleness import has_practice_since, trained_on
from personalpeft.learning.train.loop import TrainJob, CheckpointStore, TrainResult, make_loop_control, cancelled_error, train
from personalpeft.services import Services
from personalpeft.store.base import Store
from personalpeft.types import Message, Revision, Stack, StackEntry, Verdict

BuildResult: TypeAlias = LearnReport | Exception

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class BuildJob:
    """One plan on its way; ``began`` is when its learn did, on the timer."""

    plan: Plan
    began: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layer that is trained, with its durable file."""

    job: BuildJob
    trained: TrainResult
    blob: bytes
    entry: StackEntry

    @property
    def plan(self) -> Plan:
        return self.job.plan

    @property
    def stack(self) -> Stack:
        """The live stack with it in place."""
        return self.plan.with_candidate(self.entry)


@dataclass(frozen=True, slots=True)
class TrainingPipeline:
    """Builds for one learn, which ``started`` then on the timer."""

    services: Services
    margins: Margins
    started: float

    def build(self, jobs: Mapping[str, BuildJob], order: LearnOptions) -> dict[str, BuildResult]:
        """What becomes of each user's plan. Where memory is short, fewer are built at once, and one after another."""
        outcomes: dict[str, BuildResult] = {}
        for some in self._groups(jobs, order, outcomes):
            self._build_group(some, order, outcomes)
        return outcomes

    def _build_group(
        self, jobs: Mapping[str, BuildJob], order: LearnOptions, outcomes: dict[str, BuildResult]
    ) -> None:
        """Build for a group. After an unexpected error, build for each of its users alone, to find whose error it is."""
        try:
            self._build(jobs, order, outcomes)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome of those whose it is
            left = {user: job for user, job in jobs.items() if user not in outcomes}
            if isinstance(error, PersonalPeftError) or len(jobs) == 1:
                # An expected one stops all who are not done yet: the caller asked for it, or the engine was closed.
                outcomes.update(dict.fromkeys(left, error))
                return
            for user, job in left.items():
                self._build_group({user: job}, order, outcomes)

    def _groups(
        self, jobs: Mapping[str, BuildJob], order: LearnOptions, outcomes: dict[str, BuildResult]
    ) -> Sequence[Mapping[str, BuildJob]]:
        """Those whose sessions fit into memory together; whose own does not is told so."""
        most, groups, size = order.memory or inf, list[dict[str, BuildJob]](), inf
        for user, job in jobs.items():
            need = estimate_session_mb(job.plan.recipe, self.services.engine.backend.base.architecture)
            if reason := check_memory_budget(need, order.memory):
                refused = partial(self._refused, reason=reason)
                outcomes |= _each({user: job}, refused, outcomes)
                continue
            if size + need > most or not groups:
                groups.append({})
                size = 0.0
            groups[-1][user] = job
            size += need
        return groups

    def _refused(self, user: str, job: BuildJob, reason: str) -> LearnReport:
        return self.report(job, Verdict.ABSTAINED, reason)

    def _build(
        self, jobs: Mapping[str, BuildJob], order: LearnOptions, outcomes: dict[str, BuildResult]
    ) -> None:
        together = f" for {len(jobs)}" if len(jobs) > 1 else ""

        def progress(stage: str) -> Callable[[float], None]:
            return lambda done: order.progress(f"{stage}{together}", done)

        for user, job in jobs.items():
            publish(self.services.store, user, job.plan.layer, "Reading")
        progress("Reading")(0.0)
        generic = _good(self._generic(jobs, order), outcomes)
        courses = _each(generic, lambda user, said: self._course(jobs[user].plan, said), outcomes)
        manners = make_loop_control(self.services, order, self.started, progress("Learning"))
        trained = _good(train(courses, self.services.engine.backend.advance, manners), outcomes)
        unfinished = {
            user: trained.pop(user) for user in list(trained) if not trained[user].is_complete
        }
        outcomes |= _each(
            unfinished, lambda user, each: self._unfinished(jobs[user], each, order), outcomes
        )

        for user, each in trained.items():
            publish(
                self.services.store, user, jobs[user].plan.layer, "Judging", each.steps_done, each.total_steps
            )
        if trained:
            progress("Judging")(0.0)
        candidates = _each(trained, lambda user, each: self._candidate(jobs[user], each), outcomes)
        same = [user for user, each in candidates.items() if each.entry in each.plan.live.entries]
        unchanged = {user: candidates.pop(user) for user in same}
        outcomes |= _each(unchanged, lambda user, each: self._as_it_was(each), outcomes)
        sittings = _each(candidates, lambda user, each: self._sitting(each, order), outcomes)
        examined = _good(
            evaluate(
                self.services.engine,
                self.services.completions,
                sittings,
                cancelled=order.cancelled,
                paused=order.paused,
            ),
            outcomes,
        )
        progress("Judging")(1.0)
        outcomes |= _each(
            examined, lambda user, each: self._published(candidates[user], *each, order), outcomes
        )

    def report(self, job: BuildJob, verdict: Verdict, reason: str, **more: Any) -> LearnReport:
        """A report of a plan, which says what became of each signal; recorded by nobody yet."""
        plan = job.plan
        report = LearnReport(
            user=plan.user,
            layer=plan.layer,
            verdict=verdict,
            reason=reason,
            at=self.services.clock.now(),
            seconds=round(self.services.clock.timer() - job.began, 3),
            before=plan.head,
            room={**to_json(plan.capacity), "advised": plan.capacity.recommended_tokens} if plan.capacity else {},
            **more,
        )
        learned = "learned" if report.live or report.revision == plan.head else LEARNED_NOT_LIVE
        if report.revision is None:
            learned = "to be learned"
        return replace(report, sources=tuple(_sources(self.services.store, plan, learned)))

    def noted(self, report: LearnReport) -> LearnReport:
        """The report, once it is recorded."""
        self.services.store.catalog.add_report(report.user, report.as_json())
        return report

    def _generic(
        self, jobs: Mapping[str, BuildJob], order: LearnOptions
    ) -> dict[str, Completions | PersonalPeftError]:
        """What the stack below each layer says to generic questions."""
        questions = [
            (Message("user", text),) for text in load_general_prompts().regularizer_prompts
        ]
        requests = {
            user: [
                Request(user, asked, job.plan.below, BASE_SAMPLING, background=True)
                for asked in questions
            ]
            for user, job in jobs.items()
        }
        replies = self.services.completions.complete_for_users(
            requests, cancelled=order.cancelled, paused=order.paused
        )
        if order.cancelled():
            raise cancelled_error("before the first step")
        return {
            user: said
            if isinstance(said, PersonalPeftError)
            else list(zip(questions, said, strict=True))
            for user, said in replies.items()
        }

    def _course(self, plan: Plan, generic: Completions) -> TrainJob:
        store, engine = self.services.store, self.services.engine

        def open_session() -> Session:
            start = engine.read_adapter(plan.parent.digest).pairs if plan.parent else None
            # A session keeps what lies below for itself, so its slot is free for others while it trains.
            with engine.pin(plan.below) as below:
                return engine.backend.session(session_spec(plan.recipe, below, start))

        desk = CheckpointStore(
            load=lambda: store.load_session(plan.user, plan.layer),
            save=lambda data: store.save_session(plan.user, plan.layer, data),
        )
        told = partial(publish, store, plan.user, plan.layer, "Learning")
        return TrainJob(
            open_session,
            build_batches(plan, engine.backend, generic),
            plan.recipe,
            plan.inputs,
            desk,
            told,
        )

    def _unfinished(self, job: BuildJob, trained: TrainResult, order: LearnOptions) -> LearnReport:
        why = (
            "the time was up"
            if order.steps is None or len(trained.losses) < order.steps
            else "it was to stop"
        )
        reason = (
            f"{why} after step {trained.steps_done} of {trained.total_steps}; the next learn goes on from there"
        )
        report = self.report(job, Verdict.ABSTAINED, reason, steps=trained.steps_done)
        return self.noted(report) if trained.losses else report

    def _candidate(self, job: BuildJob, trained: TrainResult) -> Candidate:
        plan = job.plan
        blob = pack(Adapter(_manifest(plan), in_half(trained.pairs)))
        digest = self.services.store.blobs.put(blob)
        weights = {
            layer.name: layer.weight for layer in self.services.store.catalog.layers(plan.user)
        }
        entry = StackEntry(
            plan.layer, f"{plan.layer}@{digest[:12]}", digest, weights.get(plan.layer, 1.0)
        )
        return Candidate(job, trained, blob, entry)

    def _as_it_was(self, candidate: Candidate) -> LearnReport:
        """The same lessons made what is live already. That says nothing new of it, so what the gate said of it stays."""
        plan, entry = candidate.plan, candidate.entry
        known = self.services.store.catalog.revision(plan.user, entry.revision)
        report = self.report(
            candidate.job,
            Verdict.ABSTAINED,
            "it came out as the revision that is live already",
            revision=entry.revision,
            probation=known.probation,
            steps=candidate.trained.total_steps,
        )
        # Recorded again all the same: what was held back for this build is pinned from now on.
        again = replace(known, signals=plan.signal_roles)
        self.services.store.catalog.add_revision(
            again, candidate.blob, report.as_json(), promote=False, cause=LEARNED
        )
        self.services.store.drop_session(plan.user, plan.layer)
        return report

    def _sitting(self, candidate: Candidate, order: LearnOptions) -> EvalJob:
        plan, catalog = candidate.plan, self.services.store.catalog
        lineage = eval_history(
            [catalog.revision(plan.user, entry.revision) for entry in plan.live.entries], plan.layer
        )
        counted = {key.partition("/")[0] for key in lineage.spent_items}
        target = tuple(lesson for lesson in plan.holdout if lesson.signal not in counted)
        older = tuple(lesson for lesson in plan.holdout if lesson.signal not in plan.new_holdout)
        others = [entry.layer for entry in plan.live.entries if entry.layer != plan.layer]
        theirs = tuple(
            lesson
            for layer in others
            for lesson in holdout_of(
                self.services.store, plan.user, plan.live, layer, plan.assignments
            )
        )
        trained = () if plan.new_holdout else plan.new_examples[-8:]
        canaries = [canary.question for canary in load_general_prompts().probes]
        of_base = self.services.completions.complete_with_base(
            plan.user, plan.live.base, canaries, cancelled=order.cancelled
        )
        if order.cancelled():
            raise cancelled_error("before the verdict")
        asked = plan.holdout[-MOST_LESSONS:]
        rules = self._heard_with_rules(plan, asked)
        paper = EvalSet(
            target, older, theirs, trained, of_base, tuple(_since(plan)), asked, rules, lineage
        )
        signals = {*plan.signal_roles, *trained_on(self.services.store, plan.parent)}
        return make_eval_job(
            self.services.router,
            plan.user,
            plan.layer,
            plan.live,
            candidate.stack,
            paper,
            {plan.layer: signals},
        )

    def _heard_with_rules(
        self, plan: Plan, asked: Sequence[Lesson]
    ) -> dict[str, tuple[Lesson, ...]]:
        """Questions of a style as they are heard with each of the newest rules; no other layer takes a rule over."""
        if plan.layer != "style" or not asked:
            return {}
        rules = [routing.signal.id for routing in plan.assignments if routing.place == "profile"][
            -MOST_RULES:
        ]
        heard = self.services.render_with_item
        return {
            rule: tuple(
                replace(each, messages=heard(plan.user, rule, each.messages)) for each in asked
            )
            for rule in rules
        }

    def _judged(self, candidate: Candidate, evidence: Evidence, order: LearnOptions) -> Judgement:
        plan, revision = candidate.plan, candidate.entry.revision
        judgement = judge(
            evidence,
            self.margins,
            removes_lessons=bool(plan.retracted),
            has_new_lessons=self._brings_new(plan),
        )
        judgement = refuse_withdrawn(self.services.store, plan.user, revision, judgement)
        facts = [routing.signal for routing in plan.assignments if routing.place == "memory"]
        if judgement.verdict is Verdict.PROMOTED and plan.layer != "memory":
            since = _since(plan)
            doubt = find_leak(
                lessons_for(plan.assignments, plan.layer),
                facts,
                new={lesson.signal for lesson in since},
                accepted=self._accepted(plan),
            ) or find_style_conflict([lesson.prompt_response for lesson in since])
            judgement = Judgement(Verdict.REFUSED, doubt) if doubt else judgement
        # Whoever accepts does so of what they asked for, not of what follows from it.
        if order.accept and not plan.rebuild_reason and judgement.verdict is not Verdict.PROMOTED:
            judgement = override(judgement, evidence)
        why = plan.unlearned or plan.rebuild_reason
        reason = f"{why}: {judgement.reason}" if why else judgement.reason
        store = self.services.store
        head = live_revision(store, plan.user, plan.layer, plan.live)
        if head is not None and has_practice_since(store, head, plan.parent):
            reason += "; what was practised is not in it: practise it again"
        return replace(judgement, reason=reason)

    def _brings_new(self, plan: Plan) -> bool:
        """Whether there is anything in it that what is live was not learned from."""
        store = self.services.store
        learned = trained_on(store, live_revision(store, plan.user, plan.layer, plan.live))
        return bool(plan.new_holdout) or any(
            lesson.signal not in learned for lesson in plan.new_examples
        )

    def _accepted(self, plan: Plan) -> set[str]:
        """The lessons of revisions that the person took although the gate refused them."""
        catalog = self.services.store.catalog
        taken = {move.after for move in catalog.history(plan.user) if move.cause == ACCEPTED}
        built = [
            revision for revision in catalog.revisions(plan.user) if revision.layer == plan.layer
        ]
        return {signal for revision in built if revision.id in taken for signal in revision.signals}

    def _published(
        self,
        candidate: Candidate,
        evidence: Evidence,
        examples: tuple[Example, ...],
        order: LearnOptions,
    ) -> LearnReport:
        plan, entry, scores = candidate.plan, candidate.entry, evidence.as_json()
        judgement = self._judged(candidate, evidence, order)
        report = self.report(
            candidate.job,
            judgement.verdict,
            judgement.reason,
            revision=entry.revision,
            probation=judgement.probation,
            accepted=judgement.accepted,
            steps=candidate.trained.total_steps,
            examples=examples,
            scores=scores,
        )
        revision = Revision(
            id=entry.revision,
            user=plan.user,
            layer=plan.layer,
            digest=entry.digest,
            base=plan.live.base,
            parent=plan.parent.id if plan.parent else None,
            below=plan.below.entries,
            recipe=_built_by(plan),
            inputs=plan.inputs,
            signals=plan.signal_roles,
            scores=scores,
            verdict=judgement.verdict,
            reason=judgement.reason,
            probation=judgement.probation,
            at=report.at,
            seconds=report.seconds,
        )
        cause = ACCEPTED if judgement.accepted else LEARNED
        report = publish_revision(
            self.services.store,
            self.services.engine,
            revision,
            candidate.blob,
            report,
            candidate.stack,
            cause=cause,
        )
        self.services.store.drop_session(plan.user, plan.layer)
        return report


def _good(given: Mapping[str, T | Exception], outcomes: dict[str, BuildResult]) -> dict[str, T]:
    """Those that came so far; an error is its user's outcome."""
    good = {}
    for user, each in given.items():
        if isinstance(each, Exception):
            outcomes[user] = each
        else:
            good[user] = each
    return good


def _each(
    given: Mapping[str, T], make: Callable[[str, T], U], outcomes: dict[str, BuildResult]
) -> dict[str, U]:
    """What is made of each; an error is its user's outcome."""

    def tried(user: str, each: T) -> U | Exception:
        try:
            return make(user, each)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome of the user whose it is
            return error

    return _good({user: tried(user, each) for user, each in given.items()}, outcomes)


def _since(plan: Plan) -> Sequence[Lesson]:
    """What came since the last learn, in the order in which it was said."""
    new = {*(lesson.signal for lesson in plan.new_examples), *plan.new_holdout}
    return [lesson for lesson in lessons_for(plan.assignments, plan.layer) if lesson.signal in new]


def _built_by(plan: Plan) -> dict[str, Any]:
    return {**plan.recipe.to_stored(), "steps": plan.steps}


def _manifest(plan: Plan) -> Manifest:
    recipe = plan.recipe
    return Manifest(
        base=plan.live.base,
        layer=plan.layer,
        rank=recipe.rank,
        scaling=recipe.scaling,
        targets=recipe.target_modules,
        recipe=_built_by(plan),
        signals=plan.lessons_digest,
        below=tuple(entry.digest for entry in plan.below.entries),
        parent=plan.parent.digest if plan.parent else None,
    )


def _sources(store: Store, plan: Plan, use_of_new: str) -> Sequence[Source]:
    learned = trained_on(store, plan.parent)
    fresh = {lesson.signal for lesson in (*plan.new_examples, *plan.rejected_examples)} - learned
    pins = set(plan.new_holdout)
    questions = {lesson.signal for lesson in plan.holdout}
    sources = []
    for routing in plan.assignments:
        signal = routing.signal
        if signal.id in fresh:
            use = use_of_new
        elif signal.id in pins:
            use = (
                "held back to judge by"
                if use_of_new != "to be learned"
                else "to be held back, to judge by"
            )
        elif signal.id in questions:
            use = "held back earlier"
        elif signal.id in plan.excluded:
            use = NO_ROOM
        elif routing.layer == plan.layer:
            use = "learned earlier"
        else:
            use = {"layer": f"for {routing.layer}", "kept": "only kept"}.get(
                routing.place, f"acts at once ({routing.place})"
            )
        sources.append(Source(signal.id, str(signal.kind), signal_text(signal), use, routing.why))
    return sources
