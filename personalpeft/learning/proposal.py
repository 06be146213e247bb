"""Judge an adapter that was trained elsewhere as a candidate of a user's layer.

It is judged on the lessons of the layer that the live stack has not learned either: those that are
held out, and those that came since. The gate's other measures are those of a learn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from personalpeft.adapters.formats.packed import pack
from personalpeft.adapters.types import Adapter
from personalpeft.learning.candidate import Candidate, imported_inputs, layer_entry
from personalpeft.learning.data.lesson_scrubbing import scrub_assignments
from personalpeft.learning.data.training_examples import lessons_for
from personalpeft.learning.layers import LayerState, held_out_signals, holdout_beside
from personalpeft.learning.outcomes import MoveCause
from personalpeft.learning.plan import MAX_HOLDOUT, Plan
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.services import Services
from personalpeft.types import Json, SignalRole


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalPlan(Plan):
    """The plan of a candidate that no build here trained.

    ``digest`` is that of its packed file, and ``made_by`` says how it was trained.
    """

    digest: str
    made_by: Json = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """No step was made here."""
        return 0

    @property
    def stored_recipe(self) -> Json:
        """How the adapter was made, as a revision stores it."""
        return self.made_by

    @property
    def inputs_digest(self) -> str:
        """By which imports are known."""
        return imported_inputs(self.digest)

    @property
    def signal_roles(self) -> dict[str, SignalRole]:
        """No signal: nothing was trained on, and later learns hold out lessons of their own."""
        return {}

    @property
    def move_cause(self) -> MoveCause:
        """Why the head moves, where it does."""
        return MoveCause.IMPORT


def propose(
    services: Services, state: LayerState, recipe: TrainingConfig, adapter: Adapter, began: float
) -> Candidate:
    """Make the file of an adapter durable, and return it as a candidate.

    Args:
        services: The wired parts.
        state: The layer that it is for, as it is now.
        recipe: The training configuration of the layer.
        adapter: The adapter, for this layer and base.
        began: When the judgement began, on the timer.
    """
    store, user, layer = services.store, state.user, state.layer
    blob = pack(adapter)
    digest = store.blobs.put(user, blob)
    assignments = scrub_assignments(state.assignments, layer, recipe.scrub)
    held_out = held_out_signals(store, user, layer, assignments)
    considered = store.catalog.used_signals(user, layer)
    unseen = [
        lesson
        for lesson in lessons_for(assignments, layer)
        if lesson.signal in held_out or lesson.signal not in considered
    ][-MAX_HOLDOUT:]
    signals = {lesson.signal for lesson in unseen}
    plan = ProposalPlan(
        user=user,
        layer=layer,
        recipe=recipe,
        live=state.live,
        below=state.below,
        parent=None,
        began=began,
        holdout=tuple(unseen),
        other_holdout=holdout_beside(store, state),
        new_holdout=tuple(lesson.signal for lesson in unseen if lesson.signal not in held_out),
        # Other lessons of the layer play no part.
        assignments=tuple(
            each for each in assignments if each.layer != layer or each.signal.id in signals
        ),
        embedder=services.memory.embedder.name,
        digest=digest,
        made_by=adapter.manifest.stored_recipe,
    )
    return Candidate(plan, layer_entry(store, user, layer, digest), blob)
