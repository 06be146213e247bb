"""Has a skill practised for a user of a home, judged by the gate and published: what practice is to a learn's ``Learner``.

Invariants: a practice holds the same lease as a learn, so that one build of a user runs at a time; until the candidate is
complete nothing is written but the page that a practice which was stopped goes on from, and then its file comes first and
all rows in one transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from personalpeft.adapters.formats.packed import pack
from personalpeft.adapters.types import Adapter
from personalpeft.engine.completion_cache import Completions
from personalpeft.errors import Cancelled, PersonalPeftError
from personalpeft.learning.data.assignment import Lesson, load_assignments
from personalpeft.learning.data.capacity import megabytes, too_much
from personalpeft.learning.evaluate.evaluation import EvalResult, EvalSet, EvalJob, evaluate, make_eval_job
from personalpeft.learning.evaluate.probes import load_general_prompts
from personalpeft.learning.gate.eval_history import eval_history
from personalpeft.learning.gate.gate import (
    EvalItem,
    Evidence,
    Judgement,
    Margins,
    override,
    judge,
    margins_for,
)
from personalpeft.learning.gate.probation import ACCEPTED, LEARNED, review_probation, refuse_withdrawn
from personalpeft.learning.options import Asking, Order
from personalpeft.learning.plan import questions_of, stack_below
from personalpeft.learning.progress import say
from personalpeft.learning.publish import publish, session_spec
from personalpeft.learning.report import Example, LearnReport
from personalpeft.learning.rl.config import Drill, drill_for
from personalpeft.learning.rl.job import (
    Exercise,
    adapter_of,
    examined,
    guarded,
    make_exercise,
    run_rounds,
)
from personalpeft.learning.rl.rollouts import STOPPED
from personalpeft.learning.rl.state import Diary
from personalpeft.learning.staleness import trained_on
from personalpeft.learning.train.config import Recipe, recipes_for
from personalpeft.learning.train.loop import Desk, Manners, manners_of
from personalpeft.plugins import Shaped, Verifying
from personalpeft.services import Services
from personalpeft.types import Revision, Verdict


@dataclass(frozen=True, slots=True)
class Coach:
    """Practises with any user of one home on one base."""

    services: Services
    margins: Margins
    recipe: Recipe
    drill: Drill

    @classmethod
    def from_services(cls, services: Services) -> Coach:
        """Return one that is configured by the card of the open base. Raises ``CardError``."""
        base = services.base
        recipes = recipes_for(base.card.name, base.card.learning, base.architecture.projections)
        drill = drill_for(base.card.name, base.card.practice)
        return cls(
            services,
            margins_for(base.card.name, base.card.gate, random=base.card.source.kind == "random"),
            recipes.skill,
            drill,
        )

    def practise(
        self,
        user: str,
        layer: str,
        verifier: Verifying,
        shaping: Shaped | None,
        rounds: int | None,
        order: Order,
    ) -> LearnReport:
        """See ``User.practice``."""
        began = self.services.clock.timer()
        with self.services.store.lease(f"learn-{user}"):
            review_probation(self.services.store, user, self.services.clock.now)
            live = self.services.store.catalog.stack(user, self.services.engine.backend.base.digest)
            heads = [
                self.services.store.catalog.revision(user, entry.revision) for entry in live.entries
            ]
            head = next((each for each in heads if each.layer == layer), None)
            drill = self.drill if rounds is None else replace(self.drill, rounds=rounds)
            below = stack_below(self.services.store, user, live, layer)
            exercise = make_exercise(
                user, layer, drill, self.recipe, verifier, shaping, live, below, head
            )
            need = megabytes(exercise.recipe, self.services.engine.backend.base.architecture)
            if reason := too_much(need, order.memory):
                return self._report(
                    exercise, Diary(), Judgement(Verdict.ABSTAINED, reason), began, scores={}
                )

            def practised(done: float) -> None:
                say(
                    self.services.store,
                    user,
                    layer,
                    "Practising",
                    round(done * drill.rounds),
                    drill.rounds,
                )
                spent = (
                    0.0
                    if order.seconds is None
                    else (self.services.clock.timer() - began) / order.seconds
                )
                order.progress("Practising", min(1.0, max(done, spent)))

            diary, adapter = self._train(
                exercise, manners_of(self.services, order, began, practised)
            )
            if adapter is None:
                report = self._report(
                    exercise, diary, Judgement(Verdict.ABSTAINED, _why_nothing(diary)), began
                )
                self.services.store.catalog.add_report(user, report.as_json())
                self.services.store.drop_session(user, layer)
                return report
            say(self.services.store, user, layer, "Judging", diary.rounds, diary.rounds)
            order.progress("Judging", 0.0)
            try:
                report = self._judged(exercise, heads, diary, adapter, began, order)
                self.services.store.drop_session(user, layer)
                return report
            except Cancelled as error:
                # What is shared with a learn says that the next one goes on from there.
                raise Cancelled(error.message, hint=STOPPED) from error

    def _train(self, exercise: Exercise, manners: Manners) -> tuple[Diary, Adapter | None]:
        """What happened, and the layer as it is then; none where no step was made."""
        recipe, parent = exercise.recipe, exercise.parent
        # A session keeps what lies below for itself, so its slot is free for others while it trains.
        with self.services.engine.resident(exercise.below) as below, guarded():
            start = self.services.engine.adapter(parent.digest).pairs if parent else None
            session = self.services.engine.backend.session(session_spec(recipe, below, start))
        try:
            # The head with its own weight would not be what the session has, so it is tried with 1.
            first = exercise.with_layer(parent.digest, 1.0) if parent else exercise.live
            user, layer = exercise.user, exercise.layer
            diary = run_rounds(
                self.services.engine,
                exercise,
                session,
                start=first,
                desk=Desk(
                    load=lambda: self.services.store.load_session(user, layer),
                    save=lambda page: self.services.store.save_session(user, layer, page),
                ),
                manners=manners,
            )
            return diary, adapter_of(
                exercise, session, _built_by(exercise, diary)
            ) if diary.steps else None
        finally:
            session.close()

    def _judged(
        self,
        exercise: Exercise,
        heads: Sequence[Revision],
        diary: Diary,
        adapter: Adapter,
        began: float,
        order: Order,
    ) -> LearnReport:
        user, layer = exercise.user, exercise.layer
        blob = pack(adapter)
        weight = {
            known.name: known.weight for known in self.services.store.catalog.layers(user)
        }.get(layer, 1.0)
        with self.services.engine.lent(adapter) as digest:
            candidate = exercise.with_layer(digest, weight)
            paper = self._paper(exercise, heads, order)
            known = {layer: self._learned_from(exercise)}
            harm, _ = self._examined(
                make_eval_job(self.services.router, user, layer, exercise.live, candidate, paper, known),
                order,
            )
            asked, tasks, examples = examined(
                self.services.engine,
                exercise,
                candidate,
                cancelled=order.cancelled,
                paused=order.paused,
            )
        own = set(self.services.store.catalog.pinned(user, layer))
        evidence = replace(
            harm,
            target=asked,
            retention=tuple(_held_to_half(a) if a.signal in own else a for a in harm.retention),
        )
        entry = next(each for each in candidate.entries if each.layer == layer)
        judgement = judge(evidence, self.margins)
        judgement = refuse_withdrawn(self.services.store, user, entry.revision, judgement)
        if order.accept and judgement.verdict is not Verdict.PROMOTED:
            judgement = override(judgement, evidence)
        order.progress("Judging", 1.0)
        self.services.store.blobs.put(blob)
        scores = _scores(evidence, tasks, diary)
        report = self._report(exercise, diary, judgement, began, entry.revision, scores, examples)
        revision = Revision(
            id=entry.revision,
            user=user,
            layer=layer,
            digest=digest,
            base=exercise.live.base,
            parent=exercise.parent.id if exercise.parent else None,
            below=exercise.below.entries,
            recipe=_built_by(exercise, diary),
            inputs=exercise.inputs(diary.rounds, diary.steps),
            signals={},
            scores=scores,
            verdict=judgement.verdict,
            reason=judgement.reason,
            probation=judgement.probation,
            at=report.at,
            seconds=report.seconds,
        )
        cause = ACCEPTED if judgement.accepted else LEARNED
        return publish(
            self.services.store,
            self.services.engine,
            revision,
            blob,
            report,
            candidate,
            cause=cause,
        )

    def _learned_from(self, exercise: Exercise) -> set[str]:
        """The demonstrations that the skill was learned from before it was practised."""
        pinned = self.services.store.catalog.pinned(exercise.user, exercise.layer)
        return {*pinned, *trained_on(self.services.store, exercise.parent)}

    def _examined(self, sitting: EvalJob, order: Order) -> EvalResult:
        sittings = {sitting.user: sitting}
        outcomes = evaluate(
            self.services.engine,
            self.services.completions,
            sittings,
            cancelled=order.cancelled,
            paused=order.paused,
        )
        examined = outcomes[sitting.user]
        if isinstance(examined, PersonalPeftError):
            raise examined
        return examined

    def _paper(self, exercise: Exercise, heads: Sequence[Revision], order: Order) -> EvalSet:
        """What a practice may not spoil: everything that was ever held back, of all layers, this one's too."""
        routings = load_assignments(self.services.store, exercise.user)

        def held_back(layers: Iterable[str]) -> tuple[Lesson, ...]:
            found = (
                questions_of(self.services.store, exercise.user, exercise.live, layer, routings)
                for layer in layers
            )
            return tuple(lesson for some in found for lesson in some)

        return EvalSet(
            target=(),
            retention=held_back([exercise.layer]),
            other_layers=held_back(
                entry.layer for entry in exercise.live.entries if entry.layer != exercise.layer
            ),
            trained_examples=(),
            base_completions=self._of_base(exercise, order.cancelled),
            history=eval_history(heads, exercise.layer),
        )

    def _of_base(self, exercise: Exercise, cancelled: Asking) -> Completions:
        """What the bare base says to the canaries."""
        canaries = [canary.question for canary in load_general_prompts().probes]
        said = self.services.completions.complete_with_base(
            exercise.user, exercise.live.base, canaries, cancelled=cancelled
        )
        if cancelled():
            raise Cancelled("Stopped before the verdict; nothing has changed.", hint=STOPPED)
        return said

    def _report(
        self,
        exercise: Exercise,
        diary: Diary,
        judgement: Judgement,
        began: float,
        revision: str | None = None,
        scores: dict[str, Any] | None = None,
        examples: tuple[Example, ...] = (),
    ) -> LearnReport:
        return LearnReport(
            user=exercise.user,
            layer=exercise.layer,
            verdict=judgement.verdict,
            reason=judgement.reason,
            at=self.services.clock.now(),
            seconds=round(self.services.clock.timer() - began, 3),
            revision=revision,
            before=exercise.parent.id if exercise.parent else None,
            probation=judgement.probation,
            accepted=judgement.accepted,
            steps=diary.steps,
            examples=examples,
            scores={"practice": diary.as_json()} if scores is None else scores,
        )


def _built_by(exercise: Exercise, diary: Diary) -> dict[str, Any]:
    practised = {**exercise.about, "rounds": exercise.rounds_before + diary.rounds}
    return {**exercise.recipe.as_json(), "steps": diary.steps, "practice": practised}


def _held_to_half(asked: EvalItem) -> EvalItem:
    """A demonstration of the very skill that is practised: less likely is no harm, since tasks judge the skill now and may
    be solved in another way; but it is not to be undone.
    """
    best = asked.before if asked.best is None else max(asked.before, asked.best)
    return replace(asked, before=min(asked.before, asked.after), best=best)


def _scores(evidence: Evidence, tasks: dict[str, Any], diary: Diary) -> dict[str, Any]:
    """As a learn's, with tasks in the place of lessons held back."""
    scores = evidence.as_json()
    del scores["target"]
    return {**scores, "tasks": tasks, "practice": diary.as_json()}


def _why_nothing(diary: Diary) -> str:
    states = diary.as_json()["tasks"]
    if not any(diary.pass_rates):
        return f"none of {diary.replies} replies passed, so there is nothing to go by; show it some with teach, and learn first"
    if states["solved"] and not states["open"]:
        return f"all tasks are solved already: {states['solved']}, in {diary.replies} replies"
    return f"in {diary.replies} replies no task was answered well at one time and badly at another"
