"""One learn, from new signals to a verdict: plan, train, make the candidate durable, examine, judge, publish, report.

Invariants: one learn a user at a time, held by a lease that the system frees when the holder dies; the head moves in
the same transaction that records the revision, after its file is durable and was read back through the strict reader; a
refusal is an outcome, not an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeAlias

from personalpeft.adapters.base import Adapter, Manifest
from personalpeft.adapters.packed import in_half, pack
from personalpeft.backends.base import SessionSpec
from personalpeft.learning.anchors import LONGEST
from personalpeft.learning.curriculum import continuation, schedule
from personalpeft.learning.examination import Paper, examine
from personalpeft.learning.gate import Judgement, Margins, accepted, judge
from personalpeft.learning.generic import generic_questions
from personalpeft.learning.lessons import lessons_for
from personalpeft.learning.lineage import lineage_of
from personalpeft.learning.plan import FEWEST, Plan, make_plan, trained_on
from personalpeft.learning.probation import LEARNED, review, was_withdrawn
from personalpeft.learning.recipe import Recipes, Start
from personalpeft.learning.report import NO_ROOM, Example, LearnReport, Source, said
from personalpeft.learning.training import Desk, Trained, stopped, train
from personalpeft.serving.engine import Engine, Request
from personalpeft.store.base import Store
from personalpeft.types import Message, Revision, Sampling, StackEntry, Verdict

Progress: TypeAlias = Callable[[str, float], None]

ACCEPTED = "accepted"
"""The cause of a head's move that the user wanted although the gate refused."""


@dataclass(frozen=True, slots=True)
class Learner:
    """Learns for any user of one home on one base. ``now`` gives aware datetimes, ``timer`` seconds that never go back;
    ``observed`` lets what an app saw count as weak ratings.
    """

    store: Store
    engine: Engine
    recipes: Recipes
    margins: Margins
    now: Callable[[], datetime]
    timer: Callable[[], float]
    observed: bool = False

    def learn(
        self,
        user: str,
        layer: str,
        *,
        start: Start,
        seconds: float | None,
        dry_run: bool,
        progress: Progress,
        cancelled: Callable[[], bool],
        accept: bool = False,
    ) -> LearnReport:
        """See ``User.learn``."""
        began = self.timer()
        with self.store.lease(f"learn-{user}"):
            if not dry_run:
                review(self.store, user, self.now)
            backend = self.engine.backend
            plan = make_plan(
                self.store,
                user,
                layer,
                self.recipes.of(layer),
                backend.base.digest,
                start,
                architecture=backend.base.architecture,
                count=lambda text: len(backend.encode(text)),
                observed=self.observed,
            )
            if dry_run:
                return self._report(plan, Verdict.ABSTAINED, _would(plan), began, dry_run=True)
            if not plan.enough:
                count = len(plan.fresh) + len(plan.questions)
                reason = f"{count} of the {FEWEST} lessons that a first learn takes: three to learn, one to judge by"
                report = self._report(plan, Verdict.ABSTAINED, reason, began)
                self.store.catalog.add_report(user, report.as_json())
                return report
            return self._build(plan, began, seconds, progress, cancelled, accept)

    def _build(
        self,
        plan: Plan,
        began: float,
        seconds: float | None,
        progress: Progress,
        cancelled: Callable[[], bool],
        accept: bool,
    ) -> LearnReport:
        progress("Reading", 0.0)
        generic = self._generic(plan, cancelled)
        # A session keeps what lies below for itself, so its slot is free for others while it trains.
        with self.engine.resident(plan.below) as below:
            session = self.engine.backend.session(_spec(self, plan, below))
        try:
            trained = train(
                session,
                schedule(plan, self.engine.backend, generic),
                plan.recipe,
                plan.inputs,
                self._desk(plan),
                progress=lambda done: progress("Learning", done),
                cancelled=cancelled,
                out_of_time=lambda: seconds is not None and self.timer() - began > seconds,
            )
            pairs = session.pairs()
        finally:
            session.close()
        if not trained.complete:
            reason = f"the time was up after step {trained.done} of {trained.steps}; the next learn goes on from there"
            report = self._report(plan, Verdict.ABSTAINED, reason, began, steps=trained.done)
            if trained.done > trained.resumed_at:
                self.store.catalog.add_report(plan.user, report.as_json())
            return report

        progress("Judging", 0.0)
        blob = pack(Adapter(_manifest(plan), in_half(pairs)))
        digest = self.store.blobs.put(blob)
        entry = StackEntry(plan.layer, f"{plan.layer}@{digest[:12]}", digest, self._weight(plan))
        if entry in plan.live.entries:
            return self._as_it_was(plan, entry, blob, trained, began)
        candidate = plan.candidate(entry)
        evidence, examples = examine(
            self.engine, plan.user, plan.live, candidate, self._paper(plan, generic), cancelled=cancelled
        )
        judgement = judge(evidence, self.margins)
        if judgement.verdict is Verdict.PROMOTED and was_withdrawn(self.store, plan.user, entry.revision):
            judgement = Judgement(
                Verdict.REFUSED, "it is the revision that was withdrawn, and no lesson has come since"
            )
        if accept and judgement.verdict is not Verdict.PROMOTED:
            judgement = accepted(judgement, evidence)
        progress("Judging", 1.0)
        if not judgement.live:
            return self._publish(plan, entry, blob, judgement, evidence.as_json(), examples, trained, began)
        # Held from before the head moves until after, so that the first reply of a new revision waits for nothing.
        with self.engine.resident(candidate):
            return self._publish(plan, entry, blob, judgement, evidence.as_json(), examples, trained, began)

    def _as_it_was(self, plan: Plan, entry: StackEntry, blob: bytes, trained: Trained, began: float) -> LearnReport:
        """The same lessons made what is live already. That says nothing new of it, so what the gate said of it stays."""
        known = self.store.catalog.revision(plan.user, entry.revision)
        report = self._report(
            plan,
            Verdict.ABSTAINED,
            "it came out as the revision that is live already",
            began,
            revision=entry.revision,
            probation=known.probation,
            steps=trained.steps,
        )
        # Recorded again all the same: what was held back for this build is pinned from now on.
        again = replace(known, signals=plan.roles)
        self.store.catalog.add_revision(again, blob, report.as_json(), promote=False, cause=LEARNED)
        self.store.drop_session(plan.user, plan.layer)
        return report

    def _publish(
        self,
        plan: Plan,
        entry: StackEntry,
        blob: bytes,
        judgement: Judgement,
        scores: dict[str, Any],
        examples: tuple[Example, ...],
        trained: Trained,
        began: float,
    ) -> LearnReport:
        report = self._report(
            plan,
            judgement.verdict,
            judgement.reason,
            began,
            revision=entry.revision,
            probation=judgement.probation,
            accepted=judgement.accepted,
            steps=trained.steps,
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
            signals=plan.roles,
            scores=scores,
            verdict=judgement.verdict,
            reason=judgement.reason,
            probation=judgement.probation,
            at=report.at,
            seconds=report.seconds,
        )
        self.store.catalog.add_revision(
            revision,
            blob,
            report.as_json(),
            promote=judgement.live,
            cause=ACCEPTED if judgement.accepted else LEARNED,
        )
        self.store.drop_session(plan.user, plan.layer)
        return report

    def _generic(self, plan: Plan, cancelled: Callable[[], bool]) -> list[tuple[tuple[Message, ...], str]]:
        """What the stack below says to generic questions."""
        questions = [(Message("user", text),) for text in generic_questions().anchors]
        sampling = Sampling(max_tokens=LONGEST)
        requests = [Request(plan.user, messages, plan.below, sampling, background=True) for messages in questions]
        replies = self.engine.texts(requests, cancelled=cancelled)
        if cancelled():
            raise stopped("before the first step")
        return list(zip(questions, replies, strict=True))

    def _paper(self, plan: Plan, generic: Sequence[tuple[tuple[Message, ...], str]]) -> Paper:
        heads = [self.store.catalog.revision(plan.user, entry.revision) for entry in plan.live.entries]
        lineage = lineage_of(heads, plan.layer)
        target = tuple(lesson for lesson in plan.questions if lesson.signal not in lineage.counted)
        older = [lesson for lesson in plan.questions if lesson.signal not in plan.pins]
        for entry in plan.live.entries:
            if entry.layer != plan.layer:
                pinned = set(self.store.catalog.pinned(plan.user, entry.layer))
                older += [lesson for lesson in lessons_for(plan.routings, entry.layer) if lesson.signal in pinned]
        trained = () if plan.pins else plan.fresh[-8:]
        backend = self.engine.backend
        kept = tuple(continuation(backend, messages, reply, LONGEST) for messages, reply in generic if reply)
        return Paper(target, tuple(older), trained, kept, lineage)

    def _weight(self, plan: Plan) -> float:
        known = {layer.name: layer.weight for layer in self.store.catalog.layers(plan.user)}
        return known.get(plan.layer, 1.0)

    def _desk(self, plan: Plan) -> Desk:
        return Desk(
            load=lambda: self.store.load_session(plan.user, plan.layer),
            save=lambda data: self.store.save_session(plan.user, plan.layer, data),
        )

    def _report(self, plan: Plan, verdict: Verdict, reason: str, began: float, **more: Any) -> LearnReport:
        head = next((entry.revision for entry in plan.live.entries if entry.layer == plan.layer), None)
        return LearnReport(
            user=plan.user,
            layer=plan.layer,
            verdict=verdict,
            reason=reason,
            at=self.now(),
            seconds=round(self.timer() - began, 3),
            before=head,
            room=plan.room.as_json() if plan.room else {},
            sources=tuple(_sources(self.store, plan, trained=more.get("revision") is not None)),
            **more,
        )


def _spec(learner: Learner, plan: Plan, below: str | None) -> SessionSpec:
    recipe = plan.recipe
    return SessionSpec(
        rank=recipe.rank,
        scaling=recipe.scaling,
        targets=recipe.targets,
        seed=recipe.seed,
        below=below,
        start=learner.engine.adapter(plan.parent.digest).pairs if plan.parent else None,
        weight_decay=recipe.weight_decay,
        clip=recipe.clip,
    )


def _built_by(plan: Plan) -> dict[str, Any]:
    return {**plan.recipe.as_json(), "steps": plan.steps}


def _manifest(plan: Plan) -> Manifest:
    recipe = plan.recipe
    return Manifest(
        base=plan.live.base,
        layer=plan.layer,
        rank=recipe.rank,
        scaling=recipe.scaling,
        targets=recipe.targets,
        recipe=_built_by(plan),
        signals=plan.lessons_digest,
        below=tuple(entry.digest for entry in plan.below.entries),
        parent=plan.parent.digest if plan.parent else None,
    )


def _would(plan: Plan) -> str:
    if not plan.enough:
        return f"a first learn takes {FEWEST} lessons: three to learn, one to judge by"
    onto = f"on {plan.parent.id}" if plan.parent else "from nothing"
    return f"would train {plan.steps} steps {onto}, rank {plan.recipe.rank}"


def _sources(store: Store, plan: Plan, *, trained: bool) -> Sequence[Source]:
    learned = trained_on(store, plan.parent)
    fresh = {lesson.signal for lesson in (*plan.fresh, *plan.disliked)} - learned
    pins = set(plan.pins)
    questions = {lesson.signal for lesson in plan.questions}
    sources = []
    for routing in plan.routings:
        signal = routing.signal
        if signal.id in fresh:
            use = "learned" if trained else "to be learned"
        elif signal.id in pins:
            use = "held back to judge by" if trained else "to be held back, to judge by"
        elif signal.id in questions:
            use = "held back earlier"
        elif signal.id in plan.left_out:
            use = NO_ROOM
        elif routing.layer == plan.layer:
            use = "learned earlier"
        else:
            use = {"layer": f"for {routing.layer}", "kept": "only kept"}.get(
                routing.place, f"acts at once ({routing.place})"
            )
        sources.append(Source(signal.id, str(signal.kind), said(signal), use, routing.why))
    return sources
