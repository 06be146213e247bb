"""Who learns what, in which order: takes the leases, goes through each user's layers from the lowest up, and has what is to
be built built together (``build.py``). A learn of one user is a learn of many with one of them.

Invariants: one learn a user at a time, held by a lease that the system frees when the holder dies; a layer is planned
when those below it are settled; a refusal is an outcome, not an error; what fails for one user fails for no other, also
where the error is a bug; what the caller's own functions raise ends the learn of all.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from personalpeft.backends.error_mapping import failure
from personalpeft.errors import NothingToLearn, PersonalPeftError, kind_of, where_raised
from personalpeft.formatting import pluralize
from personalpeft.learning.data.assignment import lessons_for, load_assignments
from personalpeft.learning.gate.gate import Margins, margins_for
from personalpeft.learning.gate.probation import WITHDRAWN, review_probation
from personalpeft.learning.options import Order
from personalpeft.learning.pipeline import Builder, Job, Outcome
from personalpeft.learning.plan import (
    FEWEST,
    HOLDS_ON,
    Plan,
    head_of,
    make_plan,
    rank_of,
    stack_below,
)
from personalpeft.learning.publish import moved_meanwhile
from personalpeft.learning.report import LearnReport
from personalpeft.learning.revalidation import judge_again, layers_of, on_something_old, was_tried
from personalpeft.learning.staleness import (
    TAKEN_BACK,
    answer_to,
    ground_of,
    taken_back,
    trained_on,
    was_let_go,
)
from personalpeft.learning.train.config import Recipes, Start, recipes_for
from personalpeft.learning.train.loop import stopped
from personalpeft.services import Services
from personalpeft.types import HeadMove, Revision, Stack, Verdict

_log = logging.getLogger(__name__)

TOGETHER = 8
"""So many users' layers are built at once: more in a pass make none quicker, and each holds memory of its own."""

_Course: TypeAlias = Generator[Job, LearnReport | None, LearnReport]


class _StillKnown(NothingToLearn):
    """Nothing is to be learned, and yet there is something to be told: a layer knows what was taken back."""


@dataclass(frozen=True, slots=True)
class Learner:
    """Learns for the users of one home on one base."""

    services: Services
    margins: Margins
    recipes: Recipes

    @classmethod
    def from_services(cls, services: Services) -> Learner:
        """Return one that is configured by the card of the open base. Raises ``CardError``."""
        base = services.base
        recipes = recipes_for(base.card.name, base.card.learning, base.architecture.projections)
        return cls(
            services,
            margins_for(base.card.name, base.card.gate, random=base.card.source.kind == "random"),
            recipes,
        )

    def learn(self, user: str, layer: str | None, order: Order) -> LearnReport:
        """See ``User.learn``."""
        outcome = self._outcomes([user], layer, order)[user]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def learn_many(
        self, users: Sequence[str], layer: str | None, order: Order
    ) -> tuple[LearnReport, ...]:
        """See ``Runtime.learn_many``."""
        outcomes = self._outcomes(users, layer, order)
        return tuple(
            self._failed(user, layer or "", outcome) if isinstance(outcome, Exception) else outcome
            for user, outcome in ((user, outcomes[user]) for user in users)
        )

    def _outcomes(
        self, users: Sequence[str], layer: str | None, order: Order
    ) -> dict[str, Outcome]:
        raised: list[Exception] = []
        order = order.noting(raised)
        builder = Builder(self.services, self.margins, self.services.clock.timer())
        courses: dict[str, _Course] = {}
        outcomes: dict[str, Outcome] = {}
        jobs: dict[str, Job] = {}

        def go_on(user: str, built: Outcome | None) -> None:
            course = courses[user]
            try:
                jobs[user] = (
                    course.throw(built) if isinstance(built, Exception) else course.send(built)
                )
            except StopIteration as end:
                outcomes[user] = end.value
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this user's alone
                outcomes[user] = error

        coming = deque(users)
        try:
            while coming or jobs:
                # Somebody new begins as soon as somebody is done, so that a home of many users is gone through in full passes.
                while coming and len(jobs) < TOGETHER:
                    user = coming.popleft()
                    courses[user] = self._course(builder, user, layer, order)
                    go_on(user, None)
                together = dict(jobs)
                jobs.clear()
                for user, built in builder.build(together, order).items():
                    go_on(user, built)
                if raised:
                    raise raised[0]
        finally:
            for course in courses.values():
                course.close()
        return outcomes

    def _course(self, builder: Builder, user: str, layer: str | None, order: Order) -> _Course:
        """One user's way through their layers: gives what is to be built and hears what became of it."""
        reports: list[LearnReport] = []
        nothing: NothingToLearn | None = None
        with self.services.store.lease(f"learn-{user}"):
            if not order.dry_run:
                review_probation(self.services.store, user, self.services.clock.now)
            for name, is_asked in self._layers(user, layer):
                began = self.services.clock.timer()
                try:
                    found = self._found(builder, user, name, began, order, is_asked=is_asked)
                    report = (yield Job(found, began)) if isinstance(found, Plan) else found
                    if isinstance(found, Plan) and report is not None and order.start == "auto":
                        self._outlives(Job(found, began), report)
                except NothingToLearn as error:
                    if nothing is None or isinstance(error, _StillKnown):
                        nothing = error
                    if name == layer:
                        break
                    continue
                except Exception as error:
                    # What was done below stays, and is told.
                    if not reports:
                        raise
                    report = self._failed(user, name, error)
                if report is not None:
                    reports.append(report)
                    if report.error or _is_unfinished(report):
                        break
        if not reports:
            raise nothing or NothingToLearn(f"There is nothing to learn for {user}.")
        return replace(reports[0], above=tuple(reports[1:]))

    def _layers(self, user: str, layer: str | None) -> Sequence[tuple[str, bool]]:
        """The layers to go through, lowest first, and whether they were asked for. Over one that is named, only what then
        stands on something old is of interest.
        """
        routings = load_assignments(self.services.store, user)
        names = layers_of(self.services.store, user, routings)
        if layer is None:
            return [(name, True) for name in names]
        return [(layer, True), *((name, False) for name in names if rank_of(name) > rank_of(layer))]

    def _found(
        self, builder: Builder, user: str, layer: str, began: float, order: Order, *, is_asked: bool
    ) -> Plan | LearnReport | None:
        """What is to be built for a layer, or what is to be said of it. Raises ``NothingToLearn`` where one that was asked
        for has nothing new and stands on nothing old.
        """
        if not is_asked:
            return self._again(user, layer, began, order)
        try:
            plan = self._plan(user, layer, order.start)
        except NothingToLearn as nothing:
            found = self._without(builder, user, layer, began, order)
            if found is None or isinstance(found, NothingToLearn):
                again = self._again(user, layer, began, order)
                if again is None:
                    raise (found or nothing) from None
                return again
            return found
        if not plan.is_incremental and not plan.retracted and order.start == "auto" and not order.dry_run:
            # What is new is learned on top of what still holds.
            again = self._again(user, layer, began, order)
            if isinstance(again, LearnReport):
                plan = self._plan(user, layer, order.start)
            elif again is not None and not plan.has_enough:
                plan = again
        if order.dry_run:
            why = f"{plan.unlearned}; " if plan.unlearned else ""
            return builder.report(
                Job(plan, began), Verdict.ABSTAINED, f"{why}{_would(plan)}", dry_run=True
            )
        if not plan.has_enough:
            return builder.noted(
                builder.report(Job(plan, began), Verdict.ABSTAINED, _too_few(plan))
            )
        return plan

    def _without(
        self, builder: Builder, user: str, layer: str, began: float, order: Order
    ) -> Plan | LearnReport | NothingToLearn | None:
        """What becomes of a layer without a new lesson that knows what was taken back: it is built anew from what is left, and
        where nothing is, the base answers again. None where it knows nothing of the kind; where that was answered before, what
        to say of it.
        """
        store = self.services.store
        live = store.catalog.stack(user, self.services.engine.backend.base.digest)
        head, routings = head_of(store, user, layer, live), load_assignments(store, user)
        gone = taken_back(store, user, head, routings) if head is not None else frozenset()
        if head is None or not gone:
            return None
        try:
            plan = self._plan(user, layer, "auto", anyway=True)
        except NothingToLearn as error:
            pinned = store.catalog.pinned(user, layer)
            if any(lesson.signal not in pinned for lesson in lessons_for(routings, layer)):
                # There is something left, and no room for it.
                return error
            # Whoever went back to it after that wants it.
            return None if was_let_go(store, head) else self._emptied(head, order)
        if built := answer_to(store, head, gone, routings):
            return self._answered(plan, built)
        if order.dry_run:
            reason = f"{plan.unlearned}; {_would(plan)}"
            return builder.report(Job(plan, began), Verdict.ABSTAINED, reason, dry_run=True)
        return plan

    def _emptied(self, head: Revision, order: Order) -> LearnReport:
        store, at = self.services.store, self.services.clock.now()
        ground = ground_of(store, head)
        whoever = ground.id if ground else "the base"
        why = "all that it had learned was taken back"
        report = LearnReport(
            head.user,
            head.layer,
            Verdict.ABSTAINED,
            f"{why}; {whoever} answers again",
            at,
            0.0,
            revision=head.id,
            before=ground.id if ground else None,
            event="taken back",
        )
        if order.dry_run:
            return replace(report, reason=f"{why}: {whoever} would answer", dry_run=True)
        if order.cancelled():
            raise stopped("before anything was let go")
        move = HeadMove(
            head.user, head.layer, head.id, ground.id if ground else None, TAKEN_BACK, at
        )
        if not store.catalog.judge_again(head, report.as_json(), move=move):
            return moved_meanwhile(store, report)
        return report

    def _again(
        self, user: str, layer: str, began: float, order: Order
    ) -> Plan | LearnReport | None:
        """What becomes of a layer that stands on something old: None where it does not."""
        store = self.services.store
        live = store.catalog.stack(user, self.services.engine.backend.base.digest)
        head = on_something_old(store, user, live, layer)
        if head is None:
            return None
        report = partial(self._judged_again, head, began)
        if order.dry_run:
            return replace(
                report("what lies below has changed; would judge it again"), dry_run=True
            )
        try:
            plan = self._plan(user, layer, "auto", anyway=True) if trained_on(store, head) else None
        except NothingToLearn:
            plan = None
        if plan is None:
            return self._holds(
                head,
                live,
                report(
                    "what lies below has changed; it stays, since no lesson is there to ask it by"
                ),
            )
        standing = judge_again(self.services, self.margins, plan, head)
        if standing.holds:
            return self._holds(head, live, report(str(standing)))
        if "practice" in head.recipe:
            return self._holds(
                head,
                live,
                report(f"{standing}; practise it again, which a build from lessons would undo"),
            )
        if was_tried(store, plan):
            return self._holds(
                head,
                live,
                report(f"{standing}; it stays, since what was built in its place did not go live"),
            )
        return replace(plan, because=str(standing))

    def _outlives(self, job: Job, tried: LearnReport) -> None:
        """A layer that stands on something old stays where what was built in its place did not go live. Then what is learned
        next is built on it, or every later lesson would end as that build did.
        """
        plan = job.plan
        head = on_something_old(self.services.store, plan.user, plan.live, plan.layer)
        if head is not None and tried.revision is not None and not tried.live and not plan.retracted:
            reason = f"it stays: {tried.revision}, built in its place, did not go live"
            self._holds(head, plan.live, self._judged_again(head, job.began, reason))

    def _judged_again(self, head: Revision, began: float, reason: str) -> LearnReport:
        return LearnReport(
            user=head.user,
            layer=head.layer,
            verdict=Verdict.ABSTAINED,
            reason=reason,
            at=self.services.clock.now(),
            seconds=round(self.services.clock.timer() - began, 3),
            revision=head.id,
            before=head.id,
            probation=head.probation,
        )

    def _holds(self, head: Revision, live: Stack, report: LearnReport) -> LearnReport:
        """Notes that a head holds on what lies below it now."""
        store, below = (
            self.services.store,
            stack_below(self.services.store, head.user, live, head.layer),
        )
        # With the revision's own judgement, so that it is not asked again until what lies below has changed again.
        judged = replace(head, scores={**head.scores, HOLDS_ON: below.digest})
        where = HeadMove(head.user, head.layer, head.id, head.id, "judged again", report.at)
        return (
            report
            if store.catalog.judge_again(judged, report.as_json(), move=where)
            else moved_meanwhile(store, report)
        )

    def _answered(self, plan: Plan, built: Revision) -> _StillKnown:
        """That what was taken back was answered already, and what became of that."""
        layer, there = (
            plan.layer,
            f"Nothing new for {plan.layer}: {plan.unlearned}, and what was built of the others",
        )
        if built.id == plan.head:
            return _StillKnown(
                f"{there} came out as what is live.", hint="Teach it something else."
            )
        let_go = f"Let go of it (personalpeft rollback {layer} --to base), or teach it more."
        moves = self.services.store.catalog.history(plan.user, layer=layer)
        left = [move.cause for move in moves if move.before == built.id]
        if not left:
            return _StillKnown(f"{there} did not go live.", hint=let_go)
        if left[-1] == WITHDRAWN:
            return _StillKnown(f"{there} was withdrawn.", hint=let_go)
        again = (
            f"personalpeft rollback {layer} --to {built.id} makes it live again; or teach it more."
        )
        return _StillKnown(f"{there} is not live: you went back.", hint=again)

    def _plan(self, user: str, layer: str, start: Start, *, anyway: bool = False) -> Plan:
        backend = self.services.engine.backend
        return make_plan(
            self.services.store,
            user,
            layer,
            self.recipes.of(layer),
            backend.base.digest,
            start,
            force=anyway,
            architecture=backend.base.architecture,
            count=lambda text: len(backend.encode(text)),
            heard=lambda fact, messages: self.services.render_with_item(user, fact, messages),
        )

    def _failed(self, user: str, layer: str, error: Exception) -> LearnReport:
        """The outcome of an error that is one user's, or one layer's, alone. Of an unexpected error it names the kind only, since the
        text of the error may hold private words.
        """
        if not isinstance(error, PersonalPeftError):
            kind = type(error).__name__
            _log.error("A learn ended with an unexpected %s", where_raised(error))
            error = failure(
                f"An unexpected {kind} ended this learn.",
                error,
                hint="Run personalpeft verify. The log says where it was raised; the next learn goes on from what was done.",
            )
        return LearnReport(
            user=user,
            layer=layer,
            verdict=Verdict.ABSTAINED,
            reason=f"{error.message} {error.hint}".strip(),
            at=self.services.clock.now(),
            seconds=0.0,
            error=kind_of(error).__name__,
        )


def _is_unfinished(report: LearnReport) -> bool:
    """Whether its training goes on in a later learn. What lies above would then be built on what is about to change."""
    return report.revision is None and report.steps > 0


def _would(plan: Plan) -> str:
    if not plan.has_enough:
        return _too_few(plan)
    onto = f"on {plan.parent.id}" if plan.parent else "from nothing"
    return f"would train {pluralize(plan.steps, 'step')} {onto}, rank {plan.recipe.rank}"


def _too_few(plan: Plan) -> str:
    count = len(plan.new_examples) + len(plan.holdout)
    return (
        f"{count} of the {FEWEST} lessons that a first learn takes: three to learn, one to judge by"
    )
