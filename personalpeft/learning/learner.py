"""Run learns: take each user's lease, go through the layers from the lowest up, build what is new.

Invariants: one learn a user at a time, held by a lease that the system frees when its holder dies.
A layer is planned when those below it are settled. A refusal is an outcome, and not an error. What
fails for one user, also by a bug, fails for no other. An error that the caller's own functions
raise ends the learn of all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from personalpeft.errors import NothingCause, NothingToLearn
from personalpeft.learning.data.assignment import lessons_for, load_assignments
from personalpeft.learning.gate.gate import Margins, load_margins
from personalpeft.learning.gate.probation import review_probation
from personalpeft.learning.layers import VALID_ON, layer_order, live_revision, stack_below
from personalpeft.learning.options import LearnOptions
from personalpeft.learning.outcomes import (
    LearnOutcome,
    MoveCause,
    Reason,
    ReasonCode,
    reason,
    render_reasons,
)
from personalpeft.learning.pipeline import BuildResult, TrainingPipeline
from personalpeft.learning.plan import MIN_LESSONS, Plan
from personalpeft.learning.publish import (
    BuildJob,
    failed_report,
    head_moved_report,
    record,
    report_of,
)
from personalpeft.learning.report import LearnReport
from personalpeft.learning.staleness import (
    known_layers,
    replacement_for,
    retracted_signals,
    revalidate,
    root_revision,
    stale_head,
    trained_on,
    was_cleared,
)
from personalpeft.learning.train.config import TrainingConfigs, load_training_configs
from personalpeft.learning.train.loop import cancelled_error
from personalpeft.services import Services
from personalpeft.types import HeadMove, Revision, Stack, Verdict

MAX_CONCURRENT_USERS = 8
"""More in a group make no user's build quicker, and each holds memory of its own."""


class _AlreadyAnswered(NothingToLearn):
    """Nothing to learn, but a retraction that was answered before is worth reporting."""


@dataclass(frozen=True, slots=True)
class Learner:
    """Learns for the users of one home on one base."""

    services: Services
    margins: Margins
    recipes: TrainingConfigs

    @classmethod
    def from_services(cls, services: Services) -> Learner:
        """Return one that is configured by the card of the open base. Raises ``CardError``."""
        card, projections = services.base.card, services.base.architecture.projections
        is_random = card.source.kind == "random"
        return cls(
            services,
            load_margins(card.name, card.gate, random=is_random),
            load_training_configs(card.name, card.learning, projections),
        )

    def learn(self, user: str, layer: str | None, options: LearnOptions) -> LearnReport:
        """See ``User.learn``."""
        result = self._learn_users([user], layer, options)[user]
        if isinstance(result, Exception):
            raise result
        return result

    def learn_many(
        self, users: Sequence[str], layer: str | None, options: LearnOptions
    ) -> tuple[LearnReport, ...]:
        """See ``Runtime.learn_many``."""
        results = self._learn_users(users, layer, options)
        return tuple(
            failed_report(self.services, user, layer or "", result)
            if isinstance(result, Exception)
            else result
            for user, result in ((user, results[user]) for user in users)
        )

    def _learn_users(
        self, users: Sequence[str], layer: str | None, options: LearnOptions
    ) -> dict[str, BuildResult]:
        """Learn for several users: the next layers of all are built together, group after group."""
        raised: list[Exception] = []
        options = options.capturing_errors(raised)
        started = self.services.clock.timer()
        pipeline = TrainingPipeline(self.services, self.margins, self.recipes, options, started)
        learns: dict[str, _UserLearn] = {}
        jobs: dict[str, BuildJob] = {}
        group: dict[str, BuildJob] = {}
        results: dict[str, BuildResult] = {}

        def advance(user: str, built: BuildResult | None = None) -> None:
            """Take a user to the next build, or to the end."""
            try:
                if built is not None:
                    learns[user].finish_job(group[user], built)
                job = learns[user].next_job()
                if job is not None:
                    jobs[user] = job
                    return
                results[user] = learns[user].result()
            except Exception as error:  # noqa: BLE001 - an error of any kind is a result
                results[user] = error
            learns[user].close()

        waiting = deque(users)
        with ExitStack() as leases:
            while waiting or jobs:
                # A user joins as soon as another ends, so that groups stay full.
                while waiting and len(jobs) < MAX_CONCURRENT_USERS:
                    user = waiting.popleft()
                    learns[user] = _UserLearn(pipeline, user, layer)
                    leases.callback(learns[user].close)
                    advance(user)
                group = dict(jobs)
                jobs.clear()
                for user, built in pipeline.build(group).items():
                    advance(user, built)
                if raised:
                    raise raised[0]
        return results


class _UserLearn:
    """One user's way through the layers of one learn. Holds the user's lease until closed."""

    def __init__(self, pipeline: TrainingPipeline, user: str, layer: str | None) -> None:
        self._pipeline, self._services = pipeline, pipeline.services
        self._store = self._services.store
        self._user, self._layer, self._options = user, layer, pipeline.options
        self._lease = ExitStack()
        self._layers: deque[tuple[str, bool]] | None = None
        self._reports: list[LearnReport] = []
        self._nothing: NothingToLearn | None = None

    def close(self) -> None:
        """Release the lease. Closing twice is allowed."""
        self._lease.close()

    def next_job(self) -> BuildJob | None:
        """Return the next build, or None where all layers are settled."""
        if self._layers is None:
            self._lease.enter_context(self._store.leases.acquire(f"learn-{self._user}"))
            if not self._options.dry_run:
                review_probation(self._store, self._user, self._services.clock.now)
            self._layers = deque(self._list_layers())
        while self._layers:
            layer, is_requested = self._layers.popleft()
            began = self._services.clock.timer()
            try:
                decision = self._decide_build(layer, began, is_requested=is_requested)
            except Exception as error:  # noqa: BLE001 - what lower layers learned stays
                self._fail(layer, error)
                continue
            if isinstance(decision, Plan):
                return BuildJob(decision, began)
            if decision is not None:
                self._add(decision)
        return None

    def finish_job(self, job: BuildJob, built: BuildResult) -> None:
        """Take the result of a job."""
        try:
            if isinstance(built, Exception):
                raise built
            if self._options.start == "auto":
                self._keep_head(job, built)
        except Exception as error:  # noqa: BLE001 - what lower layers learned stays
            self._fail(job.plan.layer, error)
        else:
            self._add(built)

    def result(self) -> LearnReport:
        """Return the report of the lowest layer, with those above. Raises ``NothingToLearn``."""
        if not self._reports:
            raise self._nothing or NothingToLearn(
                f"There is nothing to learn for {self._user}.", cause=NothingCause.NO_FEEDBACK
            )
        return replace(self._reports[0], above=tuple(self._reports[1:]))

    def _add(self, report: LearnReport) -> None:
        self._reports.append(report)
        # Layers above would be built on what is about to change.
        if self._layers and (report.is_unfinished or report.outcome is LearnOutcome.FAILED):
            self._layers.clear()

    def _fail(self, layer: str, error: Exception) -> None:
        if isinstance(error, NothingToLearn):
            if self._nothing is None or isinstance(error, _AlreadyAnswered):
                self._nothing = error
            if layer == self._layer and self._layers:
                self._layers.clear()
            return
        if not self._reports:
            raise error
        self._add(failed_report(self._services, self._user, layer, error))

    def _list_layers(self) -> Sequence[tuple[str, bool]]:
        """Return the layers, lowest first, and whether they were requested.

        Layers above a requested one are only revalidated.
        """
        names = known_layers(self._store, self._user, load_assignments(self._store, self._user))
        if self._layer is None:
            return [(name, True) for name in names]
        order = layer_order(self._layer)
        return [
            (self._layer, True),
            *((each, False) for each in names if layer_order(each) > order),
        ]

    def _live_stack(self) -> Stack:
        base = self._services.engine.backend.base
        return self._store.catalog.stack(self._user, base.digest)

    def _plan(self, layer: str, *, force: bool = False) -> Plan:
        start = "auto" if force else self._options.start
        return self._pipeline.plan(self._user, layer, start, force=force)

    def _decide_build(
        self, layer: str, began: float, *, is_requested: bool
    ) -> Plan | LearnReport | None:
        """Return what to build for a layer, or what to report of it.

        Raises:
            NothingToLearn: A requested layer has nothing new, and its head is up to date.
        """
        options = self._options
        if not is_requested:
            return self._revalidate(layer, began)
        try:
            plan = self._plan(layer)
        except NothingToLearn as nothing:
            decision = self._decide_retraction(layer, began)
            if decision is not None and not isinstance(decision, NothingToLearn):
                return decision
            again = self._revalidate(layer, began)
            if again is None:
                raise (decision or nothing) from None
            return again
        is_rebuild = not plan.is_incremental and not plan.retracted
        if is_rebuild and options.start == "auto" and not options.dry_run:
            again = self._revalidate(layer, began)
            if isinstance(again, LearnReport):
                # The head is valid, so what is new is learned on top of it.
                plan = self._plan(layer)
            elif again is not None and not plan.has_enough:
                plan = again
        if options.dry_run:
            return self._report_dry_run(plan, began)
        if not plan.has_enough:
            job, why = BuildJob(plan, began), _too_few(plan)
            outcome = LearnOutcome.NOTHING_TO_LEARN
            return record(self._services, report_of(self._services, job, outcome, why))
        return plan

    def _report_dry_run(self, plan: Plan, began: float) -> LearnReport:
        parent = plan.parent.id if plan.parent else "nothing"
        steps, rank = plan.steps, plan.recipe.rank
        would = reason(ReasonCode.WOULD_TRAIN, steps=steps, parent=parent, rank=rank)
        why = would if plan.has_enough else _too_few(plan)
        job = BuildJob(plan, began)
        return report_of(self._services, job, LearnOutcome.DRY_RUN, *plan.build_reasons, why)

    def _decide_retraction(
        self, layer: str, began: float
    ) -> Plan | LearnReport | NothingToLearn | None:
        """Decide about a layer without new lessons of which some were retracted.

        Returns:
            The build without them; where no lesson is left, the report that the root is live again;
            what to raise where they were answered before; None where nothing was retracted.
        """
        store = self._store
        head = live_revision(store, self._user, layer, self._live_stack())
        if head is None:
            return None
        assignments = load_assignments(store, self._user)
        retracted = retracted_signals(store, self._user, head, assignments)
        if not retracted:
            return None
        try:
            plan = self._plan(layer, force=True)
        except NothingToLearn as error:
            held_out = store.catalog.holdout(self._user, layer)
            lessons = lessons_for(assignments, layer)
            if any(lesson.signal not in held_out for lesson in lessons):
                # There are lessons left, and no capacity for them.
                return error
            # A user who rolled back to it since wants it.
            return None if was_cleared(store, head) else self._clear_head(head)
        if built := replacement_for(store, head, retracted, assignments):
            return self._already_answered(plan, built)
        return self._report_dry_run(plan, began) if self._options.dry_run else plan

    def _clear_head(self, head: Revision) -> LearnReport:
        """Make the root of a head live, since no lesson of the head is left."""
        root = root_revision(self._store, head)
        before = root.id if root else None
        is_dry_run = self._options.dry_run
        code = ReasonCode.WOULD_RETRACT if is_dry_run else ReasonCode.ALL_RETRACTED
        report = LearnReport(
            head.user,
            head.layer,
            LearnOutcome.DRY_RUN if is_dry_run else LearnOutcome.RETRACTED,
            (reason(code, live=before or "the base"),),
            self._services.clock.now(),
            0.0,
            revision=head.id,
            before=before,
        )
        if is_dry_run:
            return report
        if self._options.cancelled():
            raise cancelled_error("before the head was moved")
        move = HeadMove(head.user, head.layer, head.id, before, MoveCause.RETRACTED, report.at)
        return self._record_move(head, report, move)

    def _record_move(self, head: Revision, report: LearnReport, move: HeadMove) -> LearnReport:
        is_recorded = self._store.catalog.add_judgement(head, report.as_json(), move=move)
        return report if is_recorded else head_moved_report(self._store, report)

    def _already_answered(self, plan: Plan, built: Revision) -> _AlreadyAnswered:
        """Return the error that says what became of the build without the retracted lessons."""
        layer = plan.layer
        retracted = render_reasons(plan.build_reasons)
        rest = f"Nothing new for {layer}: {retracted}, and what was built of the others"
        if built.id == plan.head:
            return _AlreadyAnswered(
                f"{rest} came out as what is live.",
                hint="Teach it something else.",
                cause=NothingCause.SAME_AS_LIVE,
            )
        moves = self._store.catalog.head_moves(self._user, layer=layer)
        causes = [move.cause for move in moves if move.before == built.id]
        rollback = f"personalpeft rollback {layer} --to"
        if causes and causes[-1] != MoveCause.WITHDRAWN:
            again = f"{rollback} {built.id} makes it live again; or teach it more."
            return _AlreadyAnswered(
                f"{rest} is not live: you went back.", hint=again, cause=NothingCause.ROLLED_BACK
            )
        what = "was withdrawn" if causes else "did not go live"
        to_base = f"Go back to the base ({rollback} base), or teach it more."
        return _AlreadyAnswered(f"{rest} {what}.", hint=to_base, cause=NothingCause.NOT_LIVE)

    def _revalidate(self, layer: str, began: float) -> Plan | LearnReport | None:
        """Judge a layer again that was built on another stack below.

        Returns:
            None where it was not; its report where it stays; else the build in its place.
        """
        store, live = self._store, self._live_stack()
        head = stale_head(store, self._user, live, layer)
        if head is None:
            return None
        if self._options.dry_run:
            would = Reason(ReasonCode.WOULD_REVALIDATE)
            return self._report_head(head, began, LearnOutcome.DRY_RUN, would)
        try:
            plan = self._plan(layer, force=True) if trained_on(store, head) else None
        except NothingToLearn:
            plan = None
        if plan is None:
            return self._mark_valid(head, live, began, Reason(ReasonCode.NO_HOLDOUT))
        result = revalidate(
            self._services,
            self._pipeline.margins,
            head,
            plan.live,
            plan.holdout,
            plan.new_examples,
        )
        if result.is_valid:
            return self._mark_valid(head, live, began, result.reason)
        if "practice" in head.recipe:
            practice = Reason(ReasonCode.PRACTICE_NEEDED)
            return self._mark_valid(head, live, began, result.reason, practice)
        if self._was_built(plan):
            built = Reason(ReasonCode.BUILT_BEFORE)
            return self._mark_valid(head, live, began, result.reason, built)
        return replace(plan, rebuild_reason=result.reason)

    def _was_built(self, plan: Plan) -> bool:
        """Return whether a build of the same inputs did not go live. It is not built twice."""
        return any(
            each.inputs == plan.inputs and each.verdict is not Verdict.PROMOTED
            for each in self._store.catalog.revisions(plan.user, layer=plan.layer)
        )

    def _keep_head(self, job: BuildJob, built: LearnReport) -> None:
        """Keep a stale head whose replacement did not go live.

        What is learned next is built on it, or every later lesson would end as that build did.
        """
        plan = job.plan
        head = stale_head(self._store, plan.user, plan.live, plan.layer)
        is_refused = built.revision is not None and not built.live
        if head is not None and is_refused and not plan.retracted:
            why = reason(ReasonCode.REPLACEMENT_NOT_LIVE, revision=built.revision)
            self._mark_valid(head, plan.live, job.began, why)

    def _mark_valid(
        self, head: Revision, live: Stack, began: float, *reasons: Reason
    ) -> LearnReport:
        """Record that a head is valid on the stack that is below it now."""
        report = self._report_head(head, began, LearnOutcome.UNCHANGED, *reasons)
        below = stack_below(self._store, head.user, live, head.layer)
        # Stored in its scores, so that it is judged again only when that stack changes again.
        valid = replace(head, scores={**head.scores, VALID_ON: below.digest})
        move = HeadMove(head.user, head.layer, head.id, head.id, MoveCause.REVALIDATED, report.at)
        return self._record_move(valid, report, move)

    def _report_head(
        self, head: Revision, began: float, outcome: LearnOutcome, *reasons: Reason
    ) -> LearnReport:
        return LearnReport(
            user=head.user,
            layer=head.layer,
            outcome=outcome,
            reasons=reasons,
            at=self._services.clock.now(),
            seconds=round(self._services.clock.timer() - began, 3),
            revision=head.id,
            before=head.id,
            probation=head.probation,
        )


def _too_few(plan: Plan) -> Reason:
    return reason(ReasonCode.TOO_FEW_LESSONS, count=plan.lesson_count, needed=MIN_LESSONS)
