"""Report a build, record its revision, and make it live.

Invariants: the file is durable before its rows are written. The head moves in the transaction that
records the revision. The first reply of a new revision does not wait for its adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from personalpeft.adapters.types import LoRAWeights
from personalpeft.backends.base import SessionSpec
from personalpeft.backends.error_mapping import to_serving_error
from personalpeft.errors import PersonalPeftError, format_origin, get_error_type
from personalpeft.learning.gate.gate import Judgement
from personalpeft.learning.layers import replace_layer
from personalpeft.learning.outcomes import (
    LearnOutcome,
    MoveCause,
    Placement,
    Reason,
    ReasonCode,
    SignalUse,
    text_reason,
)
from personalpeft.learning.plan import Plan
from personalpeft.learning.report import LearnReport, Source, signal_text
from personalpeft.learning.staleness import trained_on
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.services import Services
from personalpeft.store.store import Store
from personalpeft.types import Json, Revision, Stack, StackEntry, Verdict, canonical_digest

_log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class BuildJob:
    """One plan to be built. ``began``: when its learn began, on the timer."""

    plan: Plan
    began: float


def make_session_spec(
    config: TrainingConfig, below: str | None, start: Mapping[str, LoRAWeights] | None
) -> SessionSpec:
    """Return what a training session needs. ``below``: key of the resident stack below."""
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
    store, entry = services.store, candidate.entry
    revision = Revision(
        id=entry.revision,
        user=candidate.user,
        layer=entry.layer,
        digest=entry.digest,
        base=candidate.live.base,
        parent=candidate.parent.id if candidate.parent else None,
        below=candidate.below.entries,
        recipe=candidate.recipe,
        inputs=candidate.inputs,
        signals=candidate.signals,
        scores=report.scores,
        verdict=judgement.verdict,
        reason=judgement.reason,
        probation=judgement.probation,
        at=report.at,
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
    return record(services, head_moved_report(store, report))


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
    """Return a revision that no learn built: live by the user's decision, without signals."""
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
        scores={},
        verdict=Verdict.PROMOTED,
        reason=reason,
        probation=False,
        at=at,
        seconds=seconds,
    )


def imported_inputs(digest: str) -> str:
    """Return the ``inputs`` of an imported adapter, by which imports are known."""
    return canonical_digest({"imported": digest})


def report_of(
    services: Services, job: BuildJob, outcome: LearnOutcome, *reasons: Reason, **more: Any
) -> LearnReport:
    """Return the report of a plan, with the use of each signal. It is not recorded yet."""
    plan, capacity = job.plan, job.plan.capacity
    report = LearnReport(
        user=plan.user,
        layer=plan.layer,
        outcome=outcome,
        reasons=reasons,
        at=services.clock.now(),
        seconds=round(services.clock.timer() - job.began, 3),
        before=plan.head,
        room={
            "parameters": capacity.parameters,
            "tokens": capacity.tokens,
            "most": capacity.max_tokens,
            "advised": capacity.recommended_tokens,
        }
        if capacity
        else {},
        **more,
    )
    use = SignalUse.PENDING
    if report.revision is not None:
        is_live = report.live or report.revision == plan.head
        use = SignalUse.LEARNED if is_live else SignalUse.LEARNED_NOT_LIVE
    return replace(report, sources=_list_sources(services.store, plan, use))


def record(services: Services, report: LearnReport) -> LearnReport:
    """Record a report and return it."""
    services.store.catalog.add_report(report.user, report.as_json())
    return report


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


def failed_report(services: Services, user: str, layer: str, error: Exception) -> LearnReport:
    """Return the report of an error that one user, or one layer, has alone.

    Of an unexpected error it names the kind only: its text may hold private words.
    """
    if not isinstance(error, PersonalPeftError):
        kind = type(error).__name__
        _log.error("A learn ended with an unexpected %s", format_origin(error))
        error = to_serving_error(
            f"An unexpected {kind} ended this learn.",
            error,
            hint="Run personalpeft verify. The log says where it was raised; the next learn"
            " continues.",
        )
    return LearnReport(
        user=user,
        layer=layer,
        outcome=LearnOutcome.FAILED,
        reasons=(text_reason(f"{error.message} {error.hint}".strip()),),
        at=services.clock.now(),
        seconds=0.0,
        error=get_error_type(error).__name__,
    )


def _list_sources(store: Store, plan: Plan, use_of_new: SignalUse) -> tuple[Source, ...]:
    """Return the use of each signal; that of those that this build trains on is given."""
    examples = (*plan.new_examples, *plan.undesirable_examples)
    new = {each.signal for each in examples} - trained_on(store, plan.parent)
    held_out = {lesson.signal for lesson in plan.holdout}
    is_pending = use_of_new is SignalUse.PENDING
    use_of_holdout = SignalUse.TO_BE_HELD_OUT if is_pending else SignalUse.HELD_OUT
    sources = []
    for each in plan.assignments:
        signal = each.signal
        if signal.id in new:
            use = use_of_new
        elif signal.id in plan.new_holdout:
            use = use_of_holdout
        elif signal.id in held_out:
            use = SignalUse.HELD_OUT_EARLIER
        elif signal.id in plan.excluded:
            use = SignalUse.NO_CAPACITY
        elif each.layer == plan.layer:
            use = SignalUse.LEARNED_EARLIER
        elif each.place is Placement.LAYER:
            use = SignalUse.OTHER_LAYER
        else:
            is_unused = each.place is Placement.UNUSED
            use = SignalUse.UNUSED if is_unused else SignalUse.IN_PROMPT
        layer = each.layer if use is SignalUse.OTHER_LAYER else None
        text = signal_text(signal)
        sources.append(Source(signal.id, str(signal.kind), text, use, each.reason, layer))
    return tuple(sources)
