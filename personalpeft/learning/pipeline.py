"""The training pipeline: plan, train, evaluate, gate, publish.

Each stage runs for all users at once.

Invariants: a user whose build fails, or runs out of time, changes nothing for the others. Nothing
of a build is visible before ``publish_candidate``, which makes it so in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias, TypeVar

from personalpeft.adapters.compose import in_half
from personalpeft.adapters.formats.packed import pack
from personalpeft.adapters.types import Adapter, Manifest
from personalpeft.backends.base import Session
from personalpeft.engine.completion_cache import Completions
from personalpeft.engine.engine import Request
from personalpeft.errors import PersonalPeftError
from personalpeft.learning.data.assignment import Lesson
from personalpeft.learning.data.batching import build_batches
from personalpeft.learning.data.capacity import estimate_session_mb
from personalpeft.learning.data.filters import find_unsafe_lessons
from personalpeft.learning.evaluate.evaluation import (
    EvalJob,
    EvalResult,
    EvalSet,
    evaluate,
    make_eval_job,
)
from personalpeft.learning.evaluate.measures import MAX_RULE_LESSONS, MAX_RULES
from personalpeft.learning.evaluate.probes import BASE_SAMPLING, load_general_prompts
from personalpeft.learning.gate.gate import (
    Evidence,
    Judgement,
    Margins,
    eval_history,
    judge,
    override,
)
from personalpeft.learning.gate.probation import refuse_withdrawn
from personalpeft.learning.layers import live_revision
from personalpeft.learning.options import LearnOptions
from personalpeft.learning.outcomes import (
    LearnOutcome,
    MoveCause,
    Placement,
    Reason,
    ReasonCode,
    reason,
)
from personalpeft.learning.plan import Plan, build_plan, holdout_of
from personalpeft.learning.publish import (
    BuildJob,
    Candidate,
    make_entry,
    make_session_spec,
    publish_candidate,
    record,
    report_of,
)
from personalpeft.learning.report import LearnReport
from personalpeft.learning.staleness import has_practice_since, trained_on
from personalpeft.learning.train.checkpoint import CheckpointStore
from personalpeft.learning.train.config import Start, TrainingConfigs
from personalpeft.learning.train.loop import (
    TrainJob,
    TrainResult,
    cancelled_error,
    make_loop_control,
    train,
)
from personalpeft.learning.training_status import publish_status
from personalpeft.services import Services
from personalpeft.types import Message, Verdict

BuildResult: TypeAlias = LearnReport | Exception

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class TrainingPipeline:
    """Builds layers for one learn, which began at ``started`` on the timer."""

    services: Services
    margins: Margins
    recipes: TrainingConfigs
    options: LearnOptions
    started: float

    # dataset -> plan

    def plan(self, user: str, layer: str, start: Start, *, force: bool = False) -> Plan:
        """Read the ledger and decide what to build. Raises as ``build_plan``."""
        recipe = self.recipes.for_layer(layer)
        return build_plan(self.services, user, layer, recipe, start, force=force)

    # plan -> train -> evaluate -> gate -> publish

    def build(self, jobs: Mapping[str, BuildJob]) -> dict[str, BuildResult]:
        """Build each user's plan. As many are trained together as fit into memory."""
        results: dict[str, BuildResult] = {}
        for group in self._groups(jobs, results):
            self._build_group(group, results)
        return results

    def _build_stages(self, jobs: Mapping[str, BuildJob], results: dict[str, BuildResult]) -> None:
        """Run the stages for a group. An error is the result of its user, who leaves the group."""

        def show(stage: str, done: float) -> None:
            self.options.progress(f"{stage} for {len(jobs)}" if len(jobs) > 1 else stage, done)

        self._publish_progress(jobs, "Reading")
        show("Reading", 0.0)
        completions = _split_errors(self._complete_below(jobs), results)
        train_jobs = _map_users(
            lambda user, texts: self._make_train_job(jobs[user].plan, texts), completions, results
        )

        control = make_loop_control(
            self.services, self.options, self.started, lambda done: show("Learning", done)
        )
        advance = self.services.engine.backend.advance
        trained = _split_errors(train(train_jobs, advance, control), results)
        complete = {user: jobs[user] for user, each in trained.items() if each.is_complete}
        if complete:
            self._publish_progress(complete, "Judging")
            show("Judging", 0.0)
        candidates = _map_users(
            lambda user, each: self._make_candidate(jobs[user], each), trained, results
        )
        eval_jobs = _map_users(
            lambda user, each: self._make_eval_job(jobs[user].plan, each), candidates, results
        )
        evaluated = evaluate(
            self.services.engine,
            self.services.completions,
            eval_jobs,
            cancelled=self.options.cancelled,
            paused=self.options.paused,
        )
        show("Judging", 1.0)

        _map_users(
            lambda user, each: self._gate_and_publish(jobs[user], candidates[user], each),
            _split_errors(evaluated, results),
            results,
        )

    def _publish_progress(self, jobs: Mapping[str, BuildJob], stage: str) -> None:
        for user, job in jobs.items():
            steps = job.plan.steps if stage == "Judging" else 0
            publish_status(self.services.store, user, job.plan.layer, stage, steps, steps)

    # train

    def _complete_below(
        self, jobs: Mapping[str, BuildJob]
    ) -> dict[str, Completions | PersonalPeftError]:
        """Return what the stack below each layer says to the regularizer prompts."""
        texts = load_general_prompts().regularizer_prompts
        prompts = [(Message("user", text),) for text in texts]
        requests = {
            user: [
                Request(user, messages, job.plan.below, BASE_SAMPLING, background=True)
                for messages in prompts
            ]
            for user, job in jobs.items()
        }
        replies = self.services.completions.complete_for_users(
            requests, cancelled=self.options.cancelled, paused=self.options.paused
        )
        if self.options.cancelled():
            raise cancelled_error("before the first step")
        return {
            user: each
            if isinstance(each, PersonalPeftError)
            else list(zip(prompts, each, strict=True))
            for user, each in replies.items()
        }

    def _make_train_job(self, plan: Plan, completions: Completions) -> TrainJob:
        store, engine = self.services.store, self.services.engine

        def open_session() -> Session:
            start = engine.read_adapter(plan.parent.digest).pairs if plan.parent else None
            # The session copies the stack below, so its slot is free while it trains.
            with engine.pin(plan.below) as below:
                return engine.backend.session(make_session_spec(plan.recipe, below, start))

        return TrainJob(
            open_session,
            build_batches(plan, engine.backend, completions),
            plan.recipe,
            plan.inputs,
            CheckpointStore.of_layer(store, plan.user, plan.layer),
            lambda step, steps: publish_status(
                store, plan.user, plan.layer, "Learning", step, steps
            ),
        )

    def _report_unfinished(self, job: BuildJob, trained: TrainResult) -> LearnReport:
        is_step_budget = (
            self.options.steps is not None and len(trained.losses) >= self.options.steps
        )
        code = ReasonCode.STEP_BUDGET if is_step_budget else ReasonCode.TIME_BUDGET
        why = reason(code, step=trained.steps_done, steps=trained.total_steps)
        report = report_of(
            self.services, job, LearnOutcome.UNFINISHED, why, steps=trained.steps_done
        )
        return record(self.services, report) if trained.losses else report

    def _make_candidate(self, job: BuildJob, trained: TrainResult) -> Candidate | LearnReport:
        """Write the adapter's file and return the candidate, or the report where there is none."""
        if not trained.is_complete:
            return self._report_unfinished(job, trained)
        plan = job.plan
        recipe = {**plan.recipe.to_stored(), "steps": plan.steps}
        manifest = Manifest(
            base=plan.live.base,
            layer=plan.layer,
            rank=plan.recipe.rank,
            scaling=plan.recipe.scaling,
            targets=plan.recipe.target_modules,
            recipe=recipe,
            signals=plan.lessons_digest,
            below=tuple(entry.digest for entry in plan.below.entries),
            parent=plan.parent.digest if plan.parent else None,
        )
        blob = pack(Adapter(manifest, in_half(trained.pairs)))
        store = self.services.store
        candidate = Candidate(
            plan.user,
            make_entry(store, plan.user, plan.layer, store.blobs.put(blob)),
            blob,
            plan.live,
            plan.below,
            plan.parent,
            recipe,
            plan.inputs,
            plan.signal_roles,
        )
        is_live = candidate.entry in plan.live.entries
        return self._report_unchanged(job, candidate) if is_live else candidate

    def _report_unchanged(self, job: BuildJob, candidate: Candidate) -> LearnReport:
        """Report a build that came out as the live revision, whose judgement stays."""
        store, plan = self.services.store, job.plan
        known = store.catalog.revision(plan.user, candidate.entry.revision)
        report = report_of(
            self.services,
            job,
            LearnOutcome.UNCHANGED,
            Reason(ReasonCode.SAME_AS_LIVE),
            revision=known.id,
            probation=known.probation,
            steps=plan.steps,
        )
        # Recorded again, so that what this build holds out stays held out.
        again = replace(known, signals=plan.signal_roles)
        store.catalog.add_revision(
            again, candidate.blob, report.as_json(), promote=False, cause=MoveCause.LEARN
        )
        store.delete_session(plan.user, plan.layer)
        return report

    # evaluate

    def _make_eval_job(self, plan: Plan, candidate: Candidate) -> EvalJob:
        store, user, layer = self.services.store, plan.user, plan.layer
        heads = [store.catalog.revision(user, entry.revision) for entry in plan.live.entries]
        candidates = [
            each
            for each in store.catalog.revisions(user)
            if each.layer == layer and each.base == plan.live.base
        ]
        history = eval_history(heads, layer, candidates)
        decided = {key.partition("/")[0] for key in history.decided_items}
        others = [entry.layer for entry in plan.live.entries if entry.layer != layer]
        base_completions = self.services.completions.complete_with_base(
            user,
            plan.live.base,
            [probe.question for probe in load_general_prompts().probes],
            cancelled=self.options.cancelled,
        )
        if self.options.cancelled():
            raise cancelled_error("before the verdict")
        rule_lessons = plan.holdout[-MAX_RULE_LESSONS:]
        eval_set = EvalSet(
            target=tuple(each for each in plan.holdout if each.signal not in decided),
            retention=tuple(each for each in plan.holdout if each.signal not in plan.new_holdout),
            other_layers=tuple(
                lesson
                for other in others
                for lesson in holdout_of(store, user, plan.live, other, plan.assignments)
            ),
            trained_examples=() if plan.new_holdout else plan.new_examples[-8:],
            base_completions=base_completions,
            new_examples=plan.new_lessons,
            rule_lessons=rule_lessons,
            lessons_by_rule=self._add_rules(plan, rule_lessons),
            history=history,
        )
        signals = {*plan.signal_roles, *trained_on(store, plan.parent)}
        router, stack = self.services.router, candidate.stack
        return make_eval_job(router, user, layer, plan.live, stack, eval_set, {layer: signals})

    def _add_rules(self, plan: Plan, lessons: Sequence[Lesson]) -> dict[str, tuple[Lesson, ...]]:
        """Return lessons of a style with each of the newest rules in the prompt."""
        if plan.layer != "style" or not lessons:
            return {}
        rules = [each.signal.id for each in plan.assignments if each.place is Placement.PROFILE]
        render = self.services.render_with_item
        return {
            rule: tuple(
                replace(each, messages=render(plan.user, rule, each.messages)) for each in lessons
            )
            for rule in rules[-MAX_RULES:]
        }

    # gate

    def _judge_candidate(self, plan: Plan, candidate: Candidate, evidence: Evidence) -> Judgement:
        """Return the verdict on a candidate, with all that speaks for or against it."""
        store = self.services.store
        head = live_revision(store, plan.user, plan.layer, plan.live)
        learned = trained_on(store, head)
        judgement = judge(
            evidence,
            self.margins,
            removes_lessons=bool(plan.retracted),
            has_new_lessons=bool(plan.new_holdout)
            or any(lesson.signal not in learned for lesson in plan.new_examples),
        )
        judgement = refuse_withdrawn(store, plan.user, candidate.entry.revision, judgement)
        is_promoted = judgement.verdict is Verdict.PROMOTED
        problem = (
            find_unsafe_lessons(store, plan.user, plan.layer, plan.assignments, plan.new_lessons)
            if is_promoted
            else None
        )
        if problem is not None:
            judgement = Judgement(Verdict.REFUSED, (problem,))
        # The user accepts what they asked for, and not a rebuild that follows from it.
        may_override = self.options.accept and plan.rebuild_reason is None
        if may_override and judgement.verdict is not Verdict.PROMOTED:
            judgement = override(judgement, evidence)
        reasons = (*plan.build_reasons, *judgement.reasons)
        if head is not None and has_practice_since(store, head, plan.parent):
            reasons = (*reasons, Reason(ReasonCode.PRACTICE_NOT_INCLUDED))
        return replace(judgement, reasons=reasons)

    # publish

    def _gate_and_publish(
        self, job: BuildJob, candidate: Candidate, result: EvalResult
    ) -> LearnReport:
        evidence, examples = result
        judgement = self._judge_candidate(job.plan, candidate, evidence)
        report = report_of(
            self.services,
            job,
            LearnOutcome(judgement.verdict),
            *judgement.reasons,
            revision=candidate.entry.revision,
            probation=judgement.probation,
            accepted=judgement.accepted,
            steps=job.plan.steps,
            examples=examples,
            scores=evidence.as_json(),
        )
        report = publish_candidate(self.services, candidate, judgement, report)
        self.services.store.delete_session(job.plan.user, job.plan.layer)
        return report

    # groups

    def _groups(
        self, jobs: Mapping[str, BuildJob], results: dict[str, BuildResult]
    ) -> Sequence[Mapping[str, BuildJob]]:
        """Return groups whose sessions fit into the memory budget. Report jobs that never do."""
        budget, groups, size = self.options.memory or inf, list[dict[str, BuildJob]](), inf
        architecture = self.services.engine.backend.base.architecture
        needed = {
            user: estimate_session_mb(job.plan.recipe, architecture) for user, job in jobs.items()
        }

        def check(user: str, job: BuildJob) -> BuildJob | LearnReport:
            if needed[user] <= budget:
                return job
            why = reason(ReasonCode.MEMORY_BUDGET, needed=needed[user], allowed=budget)
            return report_of(self.services, job, LearnOutcome.UNFINISHED, why)

        for user, job in _map_users(check, jobs, results).items():
            if size + needed[user] > budget or not groups:
                groups.append({})
                size = 0.0
            groups[-1][user] = job
            size += needed[user]
        return groups

    def _build_group(self, jobs: Mapping[str, BuildJob], results: dict[str, BuildResult]) -> None:
        """Build a group. After an unexpected error, build one by one to find whose error it is."""
        try:
            self._build_stages(jobs, results)
        except Exception as error:  # noqa: BLE001 - an error of any kind is a result
            left = {user: job for user, job in jobs.items() if user not in results}
            if isinstance(error, PersonalPeftError) or len(jobs) == 1:
                # An expected one ends all: the caller stopped, or the engine was closed.
                results.update(dict.fromkeys(left, error))
                return
            for user, job in left.items():
                self._build_group({user: job}, results)


def _split_errors(
    outcomes: Mapping[str, T | BuildResult], results: dict[str, BuildResult]
) -> dict[str, T]:
    """Return the values. A report or an error is its user's result."""
    values: dict[str, T] = {}
    for user, each in outcomes.items():
        if isinstance(each, LearnReport | Exception):
            results[user] = each
        else:
            values[user] = each
    return values


def _map_users(
    make: Callable[[str, T], U | LearnReport],
    values: Mapping[str, T],
    results: dict[str, BuildResult],
) -> dict[str, U]:
    """Return what ``make`` returns for each user. A report or an error is its user's result."""
    outcomes: dict[str, U | BuildResult] = {}
    for user, value in values.items():
        try:
            outcomes[user] = make(user, value)
        except Exception as error:  # noqa: BLE001 - an error of any kind is a result
            outcomes[user] = error
    return _split_errors(outcomes, results)
