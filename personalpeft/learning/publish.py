"""The last steps of every way to a revision: assemble it, record it, and make it live.

Invariants: the file is durable before its rows are written. The head moves in the transaction that
records the revision. The first reply of a new revision does not wait for its adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from personalpeft.adapters.types import LoRAWeights
from personalpeft.backends.base import SessionSpec
from personalpeft.learning.gate.gate import Judgement
from personalpeft.learning.outcomes import (
    LearnOutcome,
    MoveCause,
    Reason,
    ReasonCode,
    text_reason,
)
from personalpeft.learning.report import LearnReport
from personalpeft.learning.staleness import replace_layer
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.services import Services
from personalpeft.store.store import Store
from personalpeft.types import Json, Revision, Stack, StackEntry, Verdict, canonical_digest


@dataclass(frozen=True, slots=True)
class Candidate:
    """A trained layer, and what its revision records about the build."""

    user: str
    entry: StackEntry
    blob: bytes
    live: Stack
    below: Stack
    parent: Revision | None
    recipe: Json
    inputs: str
    signals: Mapping[str, str] = field(default_factory=dict)

    @property
    def stack(self) -> Stack:
        """The live stack with the candidate in place."""
        return replace_layer(self.live, self.entry)


def make_session_spec(
    config: TrainingConfig, below: str | None, start: Mapping[str, LoRAWeights] | None
) -> SessionSpec:
    """Return what a training session needs.

    Args:
        config: How the layer is trained.
        below: Key of the resident stack that it is trained on.
        start: Weights of the parent, or None to start from nothing.
    """
    return SessionSpec(
        rank=config.rank,
        scaling=config.scaling,
        target_modules=config.target_modules,
        seed=config.seed,
        base_key=below,
        initial_weights=start,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )


def make_entry(store: Store, user: str, layer: str, digest: str) -> StackEntry:
    """Return the stack entry of a new adapter, with the weight that the layer has."""
    weights = {each.name: each.weight for each in store.catalog.layers(user)}
    return StackEntry(layer, f"{layer}@{digest[:12]}", digest, weights.get(layer, 1.0))


def publish_candidate(
    services: Services, candidate: Candidate, judgement: Judgement, report: LearnReport
) -> LearnReport:
    """Record a judged candidate with its report, and make it live where it was promoted.

    It replaces the head that it was judged against. Where another one is live by now, only that is
    recorded. Returns the report that was recorded.
    """
    store = services.store
    revision = assemble_revision(
        candidate.user,
        candidate.entry,
        candidate.live.base,
        judgement,
        recipe=candidate.recipe,
        inputs=candidate.inputs,
        at=report.at,
        parent=candidate.parent,
        below=candidate.below.entries,
        signals=candidate.signals,
        scores=report.scores,
        seconds=report.seconds,
    )
    cause = MoveCause.ACCEPTED if judgement.accepted else MoveCause.LEARN
    # Pinned until the head has moved, so that the first reply does not load it.
    with services.engine.pin(candidate.stack) if report.live else nullcontext():
        is_recorded = store.catalog.add_revision(
            revision,
            candidate.blob,
            report.as_json(),
            promote=report.live,
            cause=cause,
            expected_head=report.before,
        )
    if is_recorded:
        return report
    moved = head_moved_report(store, report)
    store.catalog.add_report(moved.user, moved.as_json())
    return moved


def assemble_revision(
    user: str,
    entry: StackEntry,
    base: str,
    judgement: Judgement,
    *,
    recipe: Json,
    inputs: str,
    at: datetime,
    parent: Revision | None = None,
    below: tuple[StackEntry, ...] = (),
    signals: Mapping[str, str] | None = None,
    scores: Mapping[str, Any] | None = None,
    seconds: float = 0.0,
) -> Revision:
    """Return a revision. Every way to one ends here.

    Args:
        user: Owner.
        entry: Its layer, id and digest.
        base: Digest of the base.
        judgement: The gate's, or the user's for an import.
        recipe: How it was built.
        inputs: Digest of everything that the build depended on.
        at: When it was built.
        parent: What it was built on.
        below: The entries of the stack below it.
        signals: The role of each signal of the build.
        scores: What was measured.
        seconds: How long the build took.
    """
    return Revision(
        id=entry.revision,
        user=user,
        layer=entry.layer,
        digest=entry.digest,
        base=base,
        parent=parent.id if parent else None,
        below=below,
        recipe=recipe,
        inputs=inputs,
        signals=signals or {},
        scores=scores or {},
        verdict=judgement.verdict,
        reason=judgement.reason,
        probation=judgement.probation,
        at=at,
        seconds=seconds,
    )


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
) -> Revision:
    """Return a revision that no learn built: live by the user's decision, without signals.

    Args:
        user: Owner.
        layer: Name of the layer.
        digest: Digest of the adapter.
        base: Digest of the base.
        recipe: Shape of the adapter.
        reason: Where it comes from.
        at: When it was imported.
        below: The entries of the stack below it.
        seconds: How long the import took.
    """
    return assemble_revision(
        user,
        StackEntry(layer, f"{layer}@{digest[:12]}", digest, 1.0),
        base,
        Judgement(Verdict.PROMOTED, (text_reason(reason),)),
        recipe=recipe,
        inputs=imported_inputs(digest),
        at=at,
        below=below,
        seconds=seconds,
    )


def imported_inputs(digest: str) -> str:
    """Return the ``inputs`` of an imported adapter, by which imports are known."""
    return canonical_digest({"imported": digest})


def head_moved_report(store: Store, report: LearnReport) -> LearnReport:
    """Return the report of a learn during which another program moved the head.

    Nothing is changed then, and the next learn starts from the new head. It is not recorded here.
    """
    layers = store.catalog.layers(report.user)
    live = next((layer.head for layer in layers if layer.name == report.layer), None)
    return LearnReport(
        report.user,
        report.layer,
        LearnOutcome.HEAD_MOVED,
        (Reason(ReasonCode.HEAD_MOVED, {"live": live or "the base"}),),
        report.at,
        report.seconds,
        before=live,
    )
