"""Candidates: trained layers whose files are durable, and what their bytes depend on.

Equal inputs give equal bytes on one kind of processor, with the same versions of libraries. The
scores of a candidate describe both, so that a reproduction elsewhere can tell why its bytes differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from personalpeft.adapters.compose import in_half
from personalpeft.adapters.formats.packed import pack
from personalpeft.adapters.types import Adapter, LoRAWeights, Manifest
from personalpeft.backends.base import Backend
from personalpeft.backends.processor import instruction_sets
from personalpeft.errors import Busy, HomeError
from personalpeft.learning.data.lesson_assignment import lessons_for, scrub_assignments
from personalpeft.learning.data.lesson_selection import MAX_HOLDOUT
from personalpeft.learning.gate.evidence import TRAINED_ELSEWHERE, Leakage
from personalpeft.learning.layers import LayerState, held_out_signals, replace_layer
from personalpeft.learning.outcomes import MoveCause
from personalpeft.learning.plan import Plan
from personalpeft.learning.report import LearnReport
from personalpeft.learning.train.config import BUILD_FORMAT, TrainingConfig
from personalpeft.services import Services
from personalpeft.store.gc import delete_unnamed_blob
from personalpeft.store.store import Store
from personalpeft.types import (
    Json,
    Revision,
    SignalRole,
    Stack,
    StackEntry,
    Verdict,
    canonical_digest,
)

ENVIRONMENT = "environment"
"""Key in a revision's scores."""

# The key of a copy's recipe.
_COPIED = "copied"
_PACKAGES = ("personalpeft", "numpy", "tokenizers", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A trained layer: the plan that it was built by, its place in the stack and its file.

    ``scores`` say where it was trained, if a build here trained it.
    """

    plan: Plan
    entry: StackEntry
    blob: bytes
    scores: Json = field(default_factory=dict)

    @property
    def stack(self) -> Stack:
        """The live stack with the candidate in place."""
        return replace_layer(self.plan.live, self.entry)

    def to_revision(self, report: LearnReport) -> Revision:
        """Return the revision to record, with the judgement and scores of its report."""
        plan = self.plan
        return Revision(
            id=self.entry.revision,
            user=plan.user,
            layer=plan.layer,
            digest=self.entry.digest,
            base=plan.live.base,
            parent=plan.parent.id if plan.parent else None,
            below=plan.below.entries,
            recipe=plan.stored_recipe,
            inputs=plan.inputs_digest,
            signals=plan.signal_roles,
            scores=report.scores,
            verdict=Verdict(report.outcome),
            reason=report.reason,
            probation=report.probation,
            at=report.at,
            seconds=report.seconds,
        )


def build_adapter(plan: Plan, weights: Mapping[str, LoRAWeights]) -> Adapter:
    """Return the layer of a plan with these weights, in half precision as it is stored."""
    manifest = Manifest(
        base=plan.live.base,
        layer=plan.layer,
        rank=plan.recipe.rank,
        scaling=plan.recipe.scaling,
        targets=plan.recipe.target_modules,
        recipe=plan.stored_recipe,
        signals=plan.data_digest,
        below=tuple(entry.digest for entry in plan.below.entries),
        parent=plan.parent.digest if plan.parent else None,
    )
    return Adapter(manifest, in_half(weights))


def store_candidate(
    services: Services, plan: Plan, weights: Mapping[str, LoRAWeights]
) -> Candidate:
    """Make the file of a trained layer durable, and return it as a candidate.

    Args:
        services: The wired parts.
        plan: What was built.
        weights: A and B by projection.
    """
    blob = pack(build_adapter(plan, weights))
    digest = services.store.blobs.put(plan.user, blob)
    scores = {ENVIRONMENT: describe_environment(services.learning_engine.backend)}
    return Candidate(
        plan, _layer_entry(services.store, plan.user, plan.layer, digest), blob, scores
    )


@contextmanager
def deleting_unrecorded(store: Store, candidates: Iterable[Candidate]) -> Iterator[None]:
    """Delete the files of candidates that were not recorded in the block.

    It may have failed, or the head moved meanwhile. A later erasure would not find these files.
    """
    try:
        yield
    finally:
        for each in candidates:
            # The garbage collection is the second chance.
            with suppress(Busy, HomeError):
                delete_unnamed_blob(store, each.entry.digest)


def find_candidate(store: Store, plan: Plan) -> Candidate | None:
    """Return the recorded build of a plan's inputs, so that nothing is trained twice."""
    digest, blobs = plan.inputs_digest, store.blobs
    for known in store.catalog.revisions(plan.user):
        if known.inputs == digest and blobs.is_intact(blobs.expected_path(known.digest)):
            entry = _layer_entry(store, plan.user, plan.layer, known.digest)
            scores = {ENVIRONMENT: recorded_environment(known.scores)}
            return Candidate(plan, entry, blobs.read(known.digest), scores)
    return None


def _layer_entry(store: Store, user: str, layer: str, digest: str) -> StackEntry:
    """Return the stack entry of a file, with the weight that its layer has."""
    weights = {each.name: each.weight for each in store.catalog.layers(user)}
    return StackEntry(layer, f"{layer}@{digest[:12]}", digest, weights.get(layer, 1.0))


def imported_revision(
    user: str,
    layer: str,
    digest: str,
    base: str,
    recipe: Json,
    *,
    reason: str,
    at: datetime,
    below: tuple[StackEntry, ...] = (),
    seconds: float = 0.0,
    leakage: Leakage = TRAINED_ELSEWHERE,
) -> Revision:
    """Return a revision that no learn built: live by the user's decision, without signals.

    Args:
        user: The owner.
        layer: The layer.
        digest: SHA-256 of the packed file.
        base: Digest of the base.
        recipe: How it was made, as JSON data.
        reason: Why it is live, in words.
        at: When it was recorded.
        below: The layers that it was built on.
        seconds: How long it took.
        leakage: The leakage score, known of a copy only.
    """
    return Revision(
        id=f"{layer}@{digest[:12]}",
        user=user,
        layer=layer,
        digest=digest,
        base=base,
        parent=None,
        below=below,
        recipe=recipe,
        inputs=imported_inputs(digest),
        signals={},
        scores={"leakage": asdict(leakage)},
        verdict=Verdict.PROMOTED,
        reason=reason,
        probation=False,
        at=at,
        seconds=seconds,
    )


def imported_inputs(digest: str) -> str:
    """Return the ``inputs`` of an imported adapter, by which imports are known."""
    return canonical_digest({"imported": digest})


def copied_recipe(recipe: Json, source: str) -> Json:
    """Return the recipe of a copy of a revision in another layer."""
    return {**recipe, _COPIED: source}


def copied_from(revision: Revision) -> str | None:
    """Return the id of the revision of another layer that this one is a copy of."""
    source = revision.recipe.get(_COPIED)
    return source if isinstance(source, str) else None


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


def propose(
    services: Services, state: LayerState, recipe: TrainingConfig, adapter: Adapter, began: float
) -> Candidate:
    """Make the file of an adapter that was trained elsewhere durable, and return it as a candidate.

    It is judged on the lessons of the layer that the live stack has not learned either: those that
    are held out, and those that came since. The gate's other measures are those of a learn.

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
        other_holdout=state.holdout_beside,
        new_holdout=tuple(lesson.signal for lesson in unseen if lesson.signal not in held_out),
        # Other lessons of the layer play no part.
        assignments=tuple(
            each for each in assignments if each.layer != layer or each.signal.id in signals
        ),
        embedder=services.memory.embedder.name,
        digest=digest,
        made_by=adapter.manifest.stored_recipe,
        move_cause=MoveCause.IMPORT,
    )
    return Candidate(plan, _layer_entry(store, user, layer, digest), blob)


def describe_environment(backend: Backend) -> dict[str, str]:
    """Return the environment of builds on a backend, as a revision's scores record it."""
    return {"backend": f"{backend.name}: {backend.description}", **describe_installation()}


def describe_installation() -> dict[str, str]:
    """Return the part of the environment that is known without a model."""
    instructions = hashlib.sha256(instruction_sets().encode()).hexdigest()[:12]
    return {
        "build format": str(BUILD_FORMAT),
        "instruction sets": instructions,
        **{name: _version(name) for name in _PACKAGES},
    }


def recorded_environment(scores: Json) -> dict[str, str]:
    """Return the environment in a revision's scores. Earlier versions recorded none."""
    return dict(scores.get(ENVIRONMENT, {}))


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
