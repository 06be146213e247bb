"""One learn, from new signals to a verdict: plan, train, make the candidate durable, examine, judge, publish, report.

Invariants: one learn a user at a time, held by a lease that the system frees when the holder dies; the head moves in
the same transaction that records the revision, after its file is durable and was read back through the strict reader; a
refusal is an outcome, not an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

from personalpeft.adapters.base import Adapter, Manifest
from personalpeft.adapters.packed import in_half, pack
from personalpeft.backends.base import SessionSpec
from personalpeft.learning.anchors import LONGEST
from personalpeft.learning.curriculum import continuation, schedule
from personalpeft.learning.examination import Paper, examine
from personalpeft.learning.gate import Judgement, Margins, judge
from personalpeft.learning.generic import generic_questions
from personalpeft.learning.lessons import lessons_for
from personalpeft.learning.plan import FEWEST, Plan, make_plan
from personalpeft.learning.recipe import Recipe, Start
from personalpeft.learning.report import Example, LearnReport, Source, said
from personalpeft.learning.training import Desk, Trained, stopped, train
from personalpeft.serving.engine import Engine, Request
from personalpeft.store.base import Store
from personalpeft.types import Message, Revision, Sampling, StackEntry, Verdict

Progress: TypeAlias = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Learner:
    """Learns for any user of one home on one base. ``now`` gives aware datetimes, ``timer`` seconds that never go back."""

    store: Store
    engine: Engine
    recipe: Recipe
    margins: Margins
    now: Callable[[], datetime]
    timer: Callable[[], float]

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
    ) -> LearnReport:
        """See ``User.learn``."""
        began = self.timer()
        with self.store.lease(f"learn-{user}"):
            plan = make_plan(self.store, user, layer, self.recipe, self.engine.backend.base.digest, start)
            if dry_run:
                return self._report(plan, Verdict.ABSTAINED, _would(plan), began, dry_run=True)
            if not plan.enough:
                count = len(plan.fresh) + len(plan.questions)
                reason = f"{count} of the {FEWEST} lessons that a first learn takes: three to learn, one to judge by"
                report = self._report(plan, Verdict.ABSTAINED, reason, began)
                self.store.catalog.add_report(user, report.as_json())
                return report
            return self._build(plan, began, seconds, progress, cancelled)

    def _build(
        self, plan: Plan, began: float, seconds: float | None, progress: Progress, cancelled: Callable[[], bool]
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
            return self._report(plan, Verdict.ABSTAINED, reason, began, steps=trained.done)

        progress("Judging", 0.0)
        blob = pack(Adapter(_manifest(plan), in_half(pairs)))
        digest = self.store.blobs.put(blob)
        entry = StackEntry(plan.layer, f"{plan.layer}@{digest[:12]}", digest, self._weight(plan))
        candidate = plan.candidate(entry)
        evidence, examples = examine(
            self.engine, plan.user, plan.live, candidate, self._paper(plan, generic), cancelled=cancelled
        )
        judgement = judge(evidence, self.margins)
        progress("Judging", 1.0)
        if judgement.verdict is not Verdict.PROMOTED:
            return self._publish(plan, entry, blob, judgement, evidence.as_json(), examples, trained, began)
        # Held from before the head moves until after, so that the first reply of a new revision waits for nothing.
        with self.engine.resident(candidate):
            return self._publish(plan, entry, blob, judgement, evidence.as_json(), examples, trained, began)

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
            revision, blob, report.as_json(), promote=judgement.verdict is Verdict.PROMOTED, cause="learn"
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
        target = tuple(lesson for lesson in plan.questions if lesson.signal in plan.pins)
        older = [lesson for lesson in plan.questions if lesson.signal not in plan.pins]
        for entry in plan.live.entries:
            if entry.layer != plan.layer:
                pinned = set(self.store.catalog.pinned(plan.user, entry.layer))
                older += [lesson for lesson in lessons_for(plan.routings, entry.layer) if lesson.signal in pinned]
        trained = () if target else plan.fresh[-8:]
        backend = self.engine.backend
        kept = tuple(continuation(backend, messages, reply, LONGEST) for messages, reply in generic if reply)
        return Paper(target, tuple(older), trained, kept)

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
            sources=tuple(_sources(plan, trained=more.get("revision") is not None)),
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


def _sources(plan: Plan, *, trained: bool) -> Sequence[Source]:
    fresh = {lesson.signal for lesson in plan.fresh}
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
        elif routing.layer == plan.layer:
            use = "learned earlier"
        else:
            use = {"layer": f"for {routing.layer}", "kept": "only kept"}.get(
                routing.place, f"acts at once ({routing.place})"
            )
        sources.append(Source(signal.id, str(signal.kind), said(signal), use, routing.why))
    return sources
