"""Plan a recorded revision again, from its ledger entries and its recorded recipe.

Invariants: nothing is written to the home. The lessons are those of the moment at which the first
build read the ledger. The recorded recipe decides how they are trained, and not the card. A signal
that training is no longer allowed on is not trained on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, partial

from personalpeft.errors import Damaged
from personalpeft.formatting import pluralize
from personalpeft.learning.candidate import imported_inputs
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.data.lesson_assignment import (
    PROMPT_KINDS,
    lessons_for,
    load_assignments,
    reply_shows,
    scrub_assignments,
    undesirable_lessons_for,
)
from personalpeft.learning.layers import trained_on
from personalpeft.learning.outcomes import ReproductionOutcome
from personalpeft.learning.plan import Plan, add_teacher, liked
from personalpeft.learning.train.config import TrainingConfig, TrainingConfigs, override_config
from personalpeft.services import Services
from personalpeft.types import Json, Revision, Signal, SignalKind, SignalRole, Stack


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a revision cannot be built again: the outcome, and what is missing."""

    outcome: ReproductionOutcome
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproductionPlan(Plan):
    """The plan of a revision that is built again.

    ``recorded`` is the revision, and ``recorded_recipe`` its recipe with the names of its time.
    """

    recorded: Revision
    recorded_recipe: Json

    @property
    def steps(self) -> int:
        """The steps that the first build made."""
        return int(self.recorded.recipe["steps"])

    @property
    def stored_recipe(self) -> Json:
        """The recipe as recorded, since it is a part of the file."""
        return self.recorded_recipe

    @property
    def has_same_inputs(self) -> bool:
        """Whether all inputs are those of the first build."""
        return self.inputs_digest == self.recorded.inputs


def plan_reproduction(
    services: Services, configs: TrainingConfigs, revision: Revision
) -> ReproductionPlan | Obstacle:
    """Return what a revision was made of, or why that cannot be brought together again.

    Args:
        services: The wired parts.
        configs: The training configurations of the open base.
        revision: The revision.
    """
    store, user = services.store, revision.user
    if obstacle := _find_obstacle(services, revision):
        return obstacle
    layer, recipe = revision.layer, revision.recipe
    record = store.catalog.build_record(user, revision.id)
    parent = store.catalog.revision(user, revision.parent) if revision.parent else None
    projections = services.base.architecture.projections
    current = override_config(configs.for_layer(layer), recipe.get("overrides", {}), projections)
    config = TrainingConfig.from_stored(recipe, current)
    learned = trained_on(store, parent)
    trained = {signal for signal, role in record.roles.items() if role == SignalRole.TRAINED}
    below = Stack(revision.base, revision.below)

    def plan_at(moment: int) -> ReproductionPlan:
        """Return the plan with the ledger as it was at a moment."""
        assignments = load_assignments(store, user, until=moment)
        assignments = scrub_assignments(assignments, layer, config.scrub)
        known = lessons_for(assignments, layer)
        training = [
            add_teacher(services, user, lesson, config.scrub)
            for lesson in known
            if lesson.signal in trained and not lesson.is_test
        ]
        return ReproductionPlan(
            user=user,
            layer=layer,
            recipe=config,
            live=below,
            below=below,
            parent=parent,
            began=0.0,
            holdout=tuple(
                lesson
                for lesson in known
                if record.roles.get(lesson.signal) == SignalRole.HELD_OUT
                or (lesson.is_test and lesson.signal in trained | learned)
            ),
            other_holdout=(),
            assignments=assignments,
            new_examples=tuple(each for each in training if each.signal not in learned),
            replay=tuple(each for each in training if each.signal in learned),
            desirable_examples=liked(
                each for each in known if each.signal in trained | learned and not each.is_test
            ),
            undesirable_examples=tuple(
                each
                for each in undesirable_lessons_for(assignments, layer)
                if each.signal in trained
            ),
            embedder=services.memory.embedder.name,
            maps_weights=services.training_backend.maps_weights,
            recorded=revision,
            recorded_recipe=record.recipe,
        )

    likeliest, *others = record.moments
    plan = plan_at(likeliest)
    if not plan.has_same_inputs:
        plan = next((each for each in map(plan_at, others) if each.has_same_inputs), plan)
    lessons = (*plan.trained_lessons, *plan.desirable_examples)
    if lost := trained - {lesson.signal for lesson in lessons}:
        detail = f"{pluralize(len(lost), 'signal')} of it no longer give the lessons that they gave"
        return Obstacle(ReproductionOutcome.INPUTS_MISSING, detail)
    signals = {each.id: each for each in store.ledger.signals(user, current=False)}
    if forbidden := _forbidden(services, user, lessons, signals):
        detail = f"training on {pluralize(len(forbidden), 'signal')} of it was withdrawn since"
        return Obstacle(ReproductionOutcome.TRAINING_FORBIDDEN, detail)
    return plan


def _find_obstacle(services: Services, revision: Revision) -> Obstacle | None:
    """Return why a revision cannot be built again, as far as its record tells."""
    is_built = {"steps", "target_modules"} <= revision.recipe.keys()
    if revision.inputs == imported_inputs(revision.digest) or not is_built:
        return Obstacle(ReproductionOutcome.IMPORTED, "it was trained elsewhere")
    if "practice" in revision.recipe:
        return Obstacle(ReproductionOutcome.PRACTICED, "its tasks are not in the ledger")
    if revision.base != services.base.digest:
        return Obstacle(ReproductionOutcome.OTHER_BASE, f"it was built on {revision.base[:12]}")
    catalog, blobs = services.store.catalog, services.store.blobs
    inputs = {entry.revision: entry.digest for entry in revision.below}
    if revision.parent:
        inputs[revision.parent] = catalog.revision(revision.user, revision.parent).digest
    for name, digest in inputs.items():
        try:
            blobs.read(digest)
        except Damaged:
            detail = f"{name}, which it was built on, is missing or damaged"
            return Obstacle(ReproductionOutcome.INPUTS_MISSING, detail)
    return None


def _forbidden(
    services: Services, user: str, lessons: Collection[Lesson], signals: dict[str, Signal]
) -> set[str]:
    """Return the signals of lessons that training is not allowed on now."""
    items = {
        each.id for each in signals.values() if each.kind in PROMPT_KINDS and each.forbids_training
    }
    turn_of = cache(partial(services.store.ledger.turn, user))
    found = set()
    for lesson in lessons:
        signal = signals[lesson.signal]
        if signal.forbids_training:
            found.add(signal.id)
            continue
        has_reply = lesson.rejected or lesson.kind is SignalKind.RATING
        if signal.turn and has_reply and reply_shows(turn_of(signal.turn), turn_of, items):
            found.add(signal.id)
    return found
