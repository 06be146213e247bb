"""Practises a skill, has the result judged by the gate and publishes it: ``Learner`` for practice.

Invariants: a practice holds the same lease as a learn, so one build of a user runs at a time. Until
the candidate is complete, only the checkpoint is written; then its file comes first, and all rows
in one transaction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from personalpeft.adapters.formats.packed import pack
from personalpeft.adapters.types import Adapter
from personalpeft.errors import Cancelled, PersonalPeftError
from personalpeft.learning.data.assignment import Lesson, load_assignments
from personalpeft.learning.data.capacity import estimate_session_mb
from personalpeft.learning.evaluate.evaluation import EvalSet, evaluate, make_eval_job
from personalpeft.learning.evaluate.probes import load_general_prompts
from personalpeft.learning.gate.gate import (
    EvalItem,
    Evidence,
    Margins,
    eval_history,
    judge,
    load_margins,
    override,
)
from personalpeft.learning.gate.probation import refuse_withdrawn, review_probation
from personalpeft.learning.layers import live_revision, stack_below
from personalpeft.learning.options import LearnOptions
from personalpeft.learning.outcomes import LearnOutcome, Reason, ReasonCode, reason
from personalpeft.learning.plan import holdout_of
from personalpeft.learning.publish import (
    Candidate,
    make_entry,
    make_session_spec,
    publish_candidate,
)
from personalpeft.learning.report import LearnReport
from personalpeft.learning.rl.job import RLJob, RLState, draw_tasks
from personalpeft.learning.rl.loop import (
    RLLoop,
    build_adapter,
    evaluate_tasks,
    map_practice_errors,
)
from personalpeft.learning.rl.rollouts import RESUME_HINT
from personalpeft.learning.staleness import trained_on
from personalpeft.learning.train.checkpoint import CheckpointStore
from personalpeft.learning.train.config import RLConfig, TrainingConfig, load_training_configs
from personalpeft.learning.train.loop import make_loop_control
from personalpeft.learning.training_status import publish_status
from personalpeft.plugins import CheckedRewardShaper, CheckedVerifier
from personalpeft.services import Services
from personalpeft.types import Verdict


@dataclass(frozen=True, slots=True)
class RLTrainer:
    """Practises with any user of one home on one base."""

    services: Services
    margins: Margins
    shape: TrainingConfig
    config: RLConfig

    @classmethod
    def from_services(cls, services: Services) -> RLTrainer:
        """Return one configured by the card of the open base. Raises ``CardError``."""
        base = services.base
        card = base.card
        configs = load_training_configs(card.name, card.learning, base.architecture.projections)
        return cls(
            services,
            load_margins(card.name, card.gate, random=card.source.kind == "random"),
            configs.skill,
            RLConfig(**RLConfig.read_table(card.name, "practice", card.practice)),
        )

    def train(
        self,
        user: str,
        layer: str,
        verifier: CheckedVerifier,
        shaping: CheckedRewardShaper | None,
        rounds: int | None,
        options: LearnOptions,
    ) -> LearnReport:
        """Practise a layer; see ``User.practice``."""
        services, store = self.services, self.services.store
        started = services.clock.timer()
        with store.leases.acquire(f"learn-{user}"):
            review_probation(store, user, services.clock.now)
            live = store.catalog.stack(user, services.engine.backend.base.digest)
            parent = live_revision(store, user, layer, live)
            config = self.config
            if rounds is not None:
                config = config.model_copy(update={"rounds": rounds})
            train_tasks, eval_tasks = draw_tasks(layer, config, verifier, parent)
            job = RLJob(
                user=user,
                layer=layer,
                config=config,
                shape=self.shape.with_shape_of(parent.recipe) if parent else self.shape,
                verifier=verifier,
                shaping=shaping,
                live=live,
                below=stack_below(store, user, live, layer),
                parent=parent,
                train_tasks=train_tasks,
                eval_tasks=eval_tasks,
            )
            return _Practice(services, self.margins, job, options, started).run()


@dataclass(frozen=True, slots=True)
class _Practice:
    """One practice under its lease; ``started`` is a time of the timer."""

    services: Services
    margins: Margins
    job: RLJob
    options: LearnOptions
    started: float

    def run(self) -> LearnReport:
        store, job, options = self.services.store, self.job, self.options
        need = estimate_session_mb(job.shape, self.services.engine.backend.base.architecture)
        if options.memory is not None and need > options.memory:
            why = reason(ReasonCode.MEMORY_BUDGET, needed=need, allowed=options.memory)
            return self._report(RLState(), LearnOutcome.UNFINISHED, why)
        state, adapter = self._practise()
        if adapter is None:
            report = self._report(
                state,
                LearnOutcome.NOTHING_TO_LEARN,
                _explain_no_step(state),
                scores={"practice": state.summary()},
            )
            store.catalog.add_report(job.user, report.as_json())
        else:
            publish_status(store, job.user, job.layer, "Judging", state.rounds, state.rounds)
            options.progress("Judging", 0.0)
            try:
                report = self._judge_and_publish(state, adapter)
            except Cancelled as error:
                # The error of a learn would say that the next learn goes on from there.
                raise Cancelled(error.message, hint=RESUME_HINT) from error
        store.delete_session(job.user, job.layer)
        return report

    def _practise(self) -> tuple[RLState, Adapter | None]:
        """Return what happened, and the layer as it is then; None if no step was made."""
        engine, job = self.services.engine, self.job
        # A session copies the stack below, whose slot is free for others while it trains.
        with engine.pin(job.below) as below, map_practice_errors():
            start = engine.read_adapter(job.parent.digest).pairs if job.parent else None
            session = engine.backend.session(make_session_spec(job.shape, below, start))
        try:
            loop = RLLoop(
                engine=engine,
                job=job,
                session=session,
                # Weight 1, because a session has no other.
                start=job.stack_with(job.parent.digest, 1.0) if job.parent else job.live,
                checkpoints=CheckpointStore.of_layer(self.services.store, job.user, job.layer),
                control=make_loop_control(
                    self.services, self.options, self.started, self._publish_progress
                ),
            )
            state = loop.run()
            if not state.steps:
                return state, None
            return state, build_adapter(job, session, job.recipe(state))
        finally:
            session.close()

    def _publish_progress(self, done: float) -> None:
        job, seconds = self.job, self.options.seconds
        rounds = job.config.rounds
        step = round(done * rounds)
        publish_status(self.services.store, job.user, job.layer, "Practising", step, rounds)
        elapsed = self.services.clock.timer() - self.started
        spent = 0.0 if seconds is None else elapsed / seconds
        self.options.progress("Practising", min(1.0, max(done, spent)))

    def _judge_and_publish(self, state: RLState, adapter: Adapter) -> LearnReport:
        services, store, job = self.services, self.services.store, self.job
        with services.engine.temporary_adapter(adapter) as digest:
            candidate = Candidate(
                user=job.user,
                entry=make_entry(store, job.user, job.layer, digest),
                blob=pack(adapter),
                live=job.live,
                below=job.below,
                parent=job.parent,
                recipe=job.recipe(state),
                inputs=job.inputs(state),
            )
            evidence = self._evaluate_lessons(candidate)
            tasks = evaluate_tasks(services.engine, job, candidate.stack, self.options)
        evidence = replace(evidence, target=tasks.items)
        judgement = judge(evidence, self.margins)
        judgement = refuse_withdrawn(store, job.user, candidate.entry.revision, judgement)
        if self.options.accept and judgement.verdict is not Verdict.PROMOTED:
            judgement = override(judgement, evidence)
        self.options.progress("Judging", 1.0)
        store.blobs.put(candidate.blob)
        # As in a learn's scores, with tasks in the place of held-out lessons.
        scores = {**evidence.as_json(), "tasks": tasks.figures, "practice": state.summary()}
        del scores["target"]
        report = self._report(
            state,
            LearnOutcome(judgement.verdict),
            *judgement.reasons,
            revision=candidate.entry.revision,
            probation=judgement.probation,
            accepted=judgement.accepted,
            examples=tasks.examples,
            scores=scores,
        )
        return publish_candidate(services, candidate, judgement, report)

    def _evaluate_lessons(self, candidate: Candidate) -> Evidence:
        """Return what the candidate does to held-out lessons of all layers and to the probes."""
        services, store, job = self.services, self.services.store, self.job
        own = set(store.catalog.holdout(job.user, job.layer))
        eval_job = make_eval_job(
            services.router,
            job.user,
            job.layer,
            job.live,
            candidate.stack,
            self._make_eval_set(),
            {job.layer: {*own, *trained_on(store, job.parent)}},
        )
        result = evaluate(
            services.engine,
            services.completions,
            {job.user: eval_job},
            cancelled=self.options.cancelled,
            paused=self.options.paused,
        )[job.user]
        if isinstance(result, PersonalPeftError):
            raise result
        evidence, _ = result
        retention = tuple(
            _allow_regression(item) if item.signal in own else item for item in evidence.retention
        )
        return replace(evidence, retention=retention)

    def _make_eval_set(self) -> EvalSet:
        """Return what a practice must not harm: all held-out lessons of all layers, and probes."""
        store, job = self.services.store, self.job
        assignments = load_assignments(store, job.user)

        def held_out(layers: Iterable[str]) -> tuple[Lesson, ...]:
            return tuple(
                lesson
                for layer in layers
                for lesson in holdout_of(store, job.user, job.live, layer, assignments)
            )

        layers = [entry.layer for entry in job.live.entries]
        heads = [store.catalog.revision(job.user, entry.revision) for entry in job.live.entries]
        base_completions = self.services.completions.complete_with_base(
            job.user,
            job.live.base,
            [probe.question for probe in load_general_prompts().probes],
            cancelled=self.options.cancelled,
        )
        if self.options.cancelled():
            raise Cancelled("Stopped before the verdict; nothing has changed.", hint=RESUME_HINT)
        judged = [
            each
            for each in store.catalog.revisions(job.user)
            if each.layer == job.layer and each.base == job.live.base
        ]
        return EvalSet(
            target=(),
            retention=held_out([job.layer]),
            other_layers=held_out(layer for layer in layers if layer != job.layer),
            trained_examples=(),
            base_completions=base_completions,
            history=eval_history(heads, job.layer, judged),
        )

    def _report(
        self, state: RLState, outcome: LearnOutcome, *reasons: Reason, **fields: Any
    ) -> LearnReport:
        job, clock = self.job, self.services.clock
        return LearnReport(
            user=job.user,
            layer=job.layer,
            outcome=outcome,
            reasons=reasons,
            at=clock.now(),
            seconds=round(clock.timer() - self.started, 3),
            before=job.parent.id if job.parent else None,
            steps=state.steps,
            **fields,
        )


def _allow_regression(item: EvalItem) -> EvalItem:
    """Return a demonstration of the practised skill as no regression, unless it is forgotten.

    Tasks judge the skill now, and may be solved in another way than the one that was shown.
    """
    best = item.before if item.best is None else max(item.before, item.best)
    return replace(item, before=min(item.before, item.after), best=best)


def _explain_no_step(state: RLState) -> Reason:
    tasks = state.summary()["tasks"]
    if not any(state.pass_rates):
        return reason(ReasonCode.NO_REPLY_PASSED, replies=state.replies)
    if tasks["solved"] and not tasks["open"]:
        return reason(ReasonCode.ALL_TASKS_SOLVED, tasks=tasks["solved"], replies=state.replies)
    return reason(ReasonCode.NO_REWARD_CONTRAST, replies=state.replies)
