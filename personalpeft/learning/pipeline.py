"""The training pipeline, for lessons and for practice alike: plan, train, evaluate, gate, promote.

- dataset -> plan: ``learner.py`` decides which layers to build. ``build_plan`` reads lessons from
  the ledger, ``plan_practice`` draws tasks.
- plan -> train -> evaluate -> gate -> promote: ``TrainingPipeline._build_group``, below.

A learn builds the layers of several users at once, and each stage runs for all of them. A practice
is the build of one user. It is trained by its own loop, and it is to improve tasks.

Invariants: a build that fails or runs out of time changes nothing for other users. Until a training
is complete only its checkpoint is written. Then its file is made durable, before its rows are
written. The head moves in the transaction that records the revision: before it nothing is visible.
The first reply of a new revision does not wait for its adapter.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TypeAlias, TypeVar

from personalpeft.errors import Cancelled, format_origin
from personalpeft.learning.candidate import (
    Candidate,
    ProposalPlan,
    deleting_unrecorded,
    find_candidate,
    store_candidate,
)
from personalpeft.learning.evaluate.eval_job import (
    MAX_COMPARED,
    MAX_RATED,
    EvalJob,
    EvalSet,
    RatedReplies,
    add_prompt_examples,
    make_eval_job,
)
from personalpeft.learning.evaluate.evaluation import EvalResult, evaluate, evaluate_replies
from personalpeft.learning.gate.evidence import Evidence, eval_history
from personalpeft.learning.gate.gate import Margins, judge_candidate
from personalpeft.learning.options import MAX_YIELD_SECONDS, LearnOptions
from personalpeft.learning.outcomes import (
    LearnOutcome,
    MoveCause,
    Reason,
    ReasonCode,
    reason,
)
from personalpeft.learning.plan import Plan, liked
from personalpeft.learning.report import Example, LearnReport
from personalpeft.learning.report_builder import head_moved_report, record, report_of
from personalpeft.learning.rl.loop import PracticePlan, RLLoop, allow_regressions
from personalpeft.learning.train.loop import (
    Checkpoint,
    LoopControl,
    TrainResult,
    map_training_errors,
    open_session,
    train_plans,
)
from personalpeft.services import Services
from personalpeft.store.locks import learn_lease

_log = logging.getLogger(__name__)

BuildResult: TypeAlias = LearnReport | Exception

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class TrainingPipeline:
    """Builds layers for one learn or practice, which began at ``started`` on the timer.

    A stage takes and returns a value for each user. A user for whom it returns a report or an
    error is done: that is the user's result, and the later stages do not see the user.
    """

    services: Services
    margins: Margins
    options: LearnOptions
    started: float

    def build(self, plans: Mapping[str, Plan]) -> dict[str, BuildResult]:
        """Build each user's plan, and return each result by user.

        As many are trained together as fit into memory.
        """
        results: dict[str, BuildResult] = {}
        for group in self._groups(plans, results):
            self._build_group(group, results)
        return results

    def _groups(
        self, plans: Mapping[str, Plan], results: dict[str, BuildResult]
    ) -> Sequence[Mapping[str, Plan]]:
        """Return groups whose sessions fit into the memory budget. Report plans that never do."""
        budget, groups, size = self.options.max_memory_mb or inf, list[dict[str, Plan]](), inf
        architecture = self.services.base.architecture
        for user, plan in plans.items():
            needed = plan.recipe.estimate_session_mb(architecture)
            if needed > budget:
                why = reason(ReasonCode.MEMORY_BUDGET, needed=needed, allowed=budget)
                results[user] = report_of(self.services, plan, LearnOutcome.UNFINISHED, why)
                continue
            if size + needed > budget or not groups:
                groups.append({})
                size = 0.0
            groups[-1][user] = plan
            size += needed
        return groups

    def _build_group(self, plans: Mapping[str, Plan], results: dict[str, BuildResult]) -> None:
        """Build a group. After an error of the whole group, build one by one from the checkpoints."""
        try:
            candidates = self._train(plans, results)
            self._run_stages_after_training(candidates, results)
        except Exception as error:  # noqa: BLE001 - an error of any kind is a result
            left = {user: plan for user, plan in plans.items() if user not in results}
            if isinstance(error, Cancelled) or len(plans) == 1:
                results.update(dict.fromkeys(left, error))
                return
            # It may be the error of one of them, or there is no memory for all at once.
            _log.warning("builds of several users go on one by one: %s", format_origin(error))
            for user, plan in left.items():
                self._build_group({user: plan}, results)

    def judge_and_promote(self, candidate: Candidate) -> BuildResult:
        """Run the stages after the training for a candidate, and return its report or the error."""
        results: dict[str, BuildResult] = {}
        self._run_stages_after_training({candidate.plan.user: candidate}, results)
        return results[candidate.plan.user]

    def _run_stages_after_training(
        self, candidates: Mapping[str, Candidate], results: dict[str, BuildResult]
    ) -> None:
        with deleting_unrecorded(self.services.store, candidates.values()):
            changed = _each_user(lambda _, each: self._record_unchanged(each), candidates, results)
            evaluated = self._evaluate(changed, results)
            _each_user(
                lambda user, result: self._judge_and_promote(changed[user], *result),
                evaluated,
                results,
            )

    # train

    def _train(
        self, plans: Mapping[str, Plan], results: dict[str, BuildResult]
    ) -> dict[str, Candidate]:
        """Train the plans of a group together, and return the candidates of those that ended.

        What was built before from the same inputs is not trained again.
        """
        practices = {user: each for user, each in plans.items() if isinstance(each, PracticePlan)}
        if practices:
            return _each_user(lambda _, plan: self._practice(plan), practices, results)
        found = {user: find_candidate(self.services.store, plan) for user, plan in plans.items()}
        candidates = {user: each for user, each in found.items() if each is not None}
        plans = {user: plan for user, plan in plans.items() if user not in candidates}
        if not plans:
            return candidates
        for plan in plans.values():
            self._set_status(plan, "Reading", 0, 0)
        self._show("Reading", len(plans), 0.0)
        trained = train_plans(
            self.services,
            plans,
            self._control(lambda done: self._show("Learning", len(plans), done)),
            show_step=lambda plan, step, steps: self._set_status(plan, "Learning", step, steps),
        )
        return candidates | _each_user(
            lambda user, result: self._finish_training(plans[user], result), trained, results
        )

    def _finish_training(self, plan: Plan, trained: TrainResult) -> Candidate | LearnReport:
        """Return the candidate, or the report of a training that a budget ended."""
        if trained.is_complete:
            return store_candidate(self.services, plan, trained.weights)
        services, budget, done = self.services, self.options.steps, trained.steps_done
        is_step_budget = budget is not None and len(trained.losses) >= budget
        code = ReasonCode.STEP_BUDGET if is_step_budget else ReasonCode.TIME_BUDGET
        why = reason(code, step=done, steps=trained.total_steps)
        report = report_of(services, plan, LearnOutcome.UNFINISHED, why, steps=done)
        return record(services, report) if trained.losses else report

    def _practice(self, plan: PracticePlan) -> Candidate | LearnReport:
        """Practice in rounds, and return the candidate, or the report where no step was made."""
        store, rounds = self.services.store, plan.config.rounds

        def show(done: float) -> None:
            step = round(done * rounds)
            self._set_status(plan, "Practicing", step, rounds)
            elapsed, seconds = self.services.clock.timer() - self.started, self.options.seconds
            spent = elapsed / seconds if seconds is not None else 0.0
            self._show("Practicing", 1, min(1.0, max(done, spent)))

        with map_training_errors():
            session = open_session(self.services, plan)
        with closing(session):
            engine = self.services.learning_engine
            checkpoint = Checkpoint.of_plan(store, plan)
            loop = RLLoop(engine, plan, session, checkpoint, self._control(show))
            practiced = replace(plan, state=loop.run())
            if practiced.steps:
                return store_candidate(self.services, practiced, session.weights())
        report = report_of(
            self.services,
            practiced,
            LearnOutcome.NOTHING_TO_LEARN,
            practiced.explain_no_step(),
            scores=practiced.figures,
        )
        record(self.services, report)
        store.delete_checkpoint(plan.user, plan.layer)
        return report

    # evaluate

    def _record_unchanged(self, candidate: Candidate) -> Candidate | LearnReport:
        """Return the candidate, or the recorded report of one that came out as the live revision.

        The revision's judgement stays.
        """
        services, store, plan = self.services, self.services.store, candidate.plan
        if candidate.entry not in plan.live.entries:
            return candidate
        known = store.catalog.revision(plan.user, candidate.entry.revision)
        report = report_of(
            services,
            plan,
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
        store.delete_checkpoint(plan.user, plan.layer)
        return report

    def _evaluate(
        self, candidates: Mapping[str, Candidate], results: dict[str, BuildResult]
    ) -> dict[str, EvalResult]:
        """Measure each candidate on held-out lessons and probes, and what a verifier judges."""
        if not candidates:
            return {}
        services, options = self.services, self.options
        for candidate in candidates.values():
            progress = candidate.plan.progress
            self._set_status(candidate.plan, "Judging", progress, progress)
        self._show("Judging", len(candidates), 0.0)
        jobs = _each_user(lambda _, each: self._make_eval_job(each), candidates, results)
        evaluated = evaluate(services, jobs, cancelled=options.cancelled, paused=options.paused)

        def add_verified(user: str, result: EvalResult) -> EvalResult:
            plan, stack = candidates[user].plan, candidates[user].stack
            engine, evidence = services.learning_engine, result[0]
            if isinstance(plan, PracticePlan):
                tasks, evidence = plan.eval_tasks_for(stack), allow_regressions(plan, evidence)
                return evaluate_replies(
                    engine, tasks, plan.verifier, plan.shaping, evidence, options
                )
            if plan.answer_verifier is None or not jobs[user].eval_set.undecided:
                return result
            tasks = jobs[user].tasks(engine.backend)
            return evaluate_replies(engine, tasks, plan.answer_verifier, None, evidence, options)

        measured = _each_user(add_verified, evaluated, results)
        self._show("Judging", len(candidates), 1.0)
        return measured

    def _make_eval_job(self, candidate: Candidate) -> EvalJob:
        plan, catalog = candidate.plan, self.services.store.catalog
        revisions = {each.id: each for each in catalog.revisions(plan.user)}
        history = eval_history(
            [revisions[entry.revision] for entry in plan.live.entries],
            plan.layer,
            [each for each in revisions.values() if each.base == plan.live.base],
        )
        decided = {key.partition("/")[0] for key in history.decided_items}
        trained = (*plan.replay, *plan.new_examples)
        eval_set = EvalSet(
            undecided=plan.undecided(decided),
            retention=tuple(each for each in plan.holdout if each.signal not in plan.new_holdout),
            other_layers=plan.other_holdout,
            general=plan.general_prompts,
            max_length=plan.recipe.max_length,
            tie_margin=self.margins.tie_margin,
            # Where a verifier judges answers, their likelihood as text says nothing.
            arrived_lessons=plan.arrived_lessons if plan.answer_verifier is None else (),
            trained=trained,
            trained_elsewhere=isinstance(plan, ProposalPlan),
            rated=self._rated_replies(plan),
            history=history,
            judges_replies=bool(trained and self.margins.min_generated)
            and plan.layer != "memory"
            and plan.answer_verifier is None,
        )
        job = make_eval_job(self.services, plan, plan.live, candidate.stack, eval_set)
        return add_prompt_examples(self.services, job, plan)

    def _rated_replies(self, plan: Plan) -> RatedReplies:
        if not plan.rated_holdout:
            return RatedReplies()
        backend = self.services.learning_engine.backend
        likes = (*plan.desirable_examples, *liked(plan.rated_holdout))
        dislikes = (*plan.undesirable_examples, *(x for x in plan.rated_holdout if not x.chosen))
        if min(len(likes), len(dislikes)) < 2:
            return RatedReplies()  # The others are too long, and one shows no difference.
        liked_texts = tuple(each.chosen for each in likes)[-MAX_RATED:]
        disliked_texts = tuple(each.rejected or "" for each in dislikes)[-MAX_RATED:]
        longest = max(len(backend.encode(text)) for text in (*liked_texts, *disliked_texts))
        return RatedReplies(
            liked=liked_texts,
            disliked=disliked_texts,
            held_out=plan.rated_holdout[-MAX_COMPARED:],
            max_tokens=min(max(longest, 1), plan.recipe.max_length),
        )

    # gate, promote

    def _judge_and_promote(
        self, candidate: Candidate, evidence: Evidence, examples: tuple[Example, ...]
    ) -> LearnReport:
        """Record a candidate with its verdict, and make it live where it was promoted.

        It replaces the head that it was judged against. Where another one is live by now, only that
        is recorded. The checkpoint is deleted.
        """
        services, store = self.services, self.services.store
        plan, revision = candidate.plan, candidate.entry.revision
        judgement = judge_candidate(
            store, plan, revision, evidence, self.margins, accept=self.options.accept
        )
        report = report_of(
            services,
            plan,
            LearnOutcome(judgement.verdict),
            *judgement.reasons,
            revision=revision,
            probation=judgement.probation,
            accepted=judgement.accepted,
            steps=plan.steps,
            examples=examples,
            scores={**evidence.as_json(), **plan.figures, **candidate.scores},
        )
        cause = MoveCause.ACCEPTED if report.accepted else plan.move_cause
        # Pinned until the head has moved, so that the first reply does not load it.
        with services.model.preloaded(candidate.stack) if report.live else nullcontext():
            is_recorded = store.catalog.add_revision(
                candidate.to_revision(report),
                candidate.blob,
                report.as_json(),
                promote=report.live,
                cause=cause,
                expected_head=report.previous_head,
            )
        if not is_recorded:
            report = record(services, head_moved_report(store, report))
        store.delete_checkpoint(plan.user, plan.layer)
        return report

    # progress

    def _show(self, stage: str, users: int, done: float) -> None:
        self.options.progress(f"{stage} for {users}" if users > 1 else stage, done)

    def _set_status(self, plan: Plan, stage: str, step: int, steps: int) -> None:
        """Show the progress to other processes, which read it by ``status.training_status``."""
        status = json.dumps([plan.layer, stage, step, steps])
        self.services.store.leases.set_status(learn_lease(plan.user), status)

    def _control(self, progress: Callable[[float], None]) -> LoopControl:
        timer, seconds = self.services.clock.timer, self.options.seconds
        return LoopControl(
            timer=timer,
            progress=progress,
            cancelled=self.options.cancelled,
            paused=self.options.paused,
            out_of_time=lambda: seconds is not None and timer() - self.started > seconds,
            yield_to_serving=partial(
                self.services.learning_engine.yield_to_foreground, MAX_YIELD_SECONDS
            ),
            max_steps=self.options.steps,
        )


def _each_user(
    act: Callable[[str, T], U | LearnReport],
    values: Mapping[str, T | Exception],
    results: dict[str, BuildResult],
) -> dict[str, U]:
    """Return what ``act`` returns for each user. A report or an error is its user's result."""
    returned: dict[str, U] = {}
    for user, value in values.items():
        try:
            made = value if isinstance(value, Exception) else act(user, value)
        except Exception as error:  # noqa: BLE001 - an error of any kind is a result
            results[user] = error
            continue
        if isinstance(made, LearnReport | Exception):
            results[user] = made
        else:
            returned[user] = made
    return returned
