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

from personalpeft.adapters.compose import in_half
from personalpeft.adapters.formats.packed import pack
from personalpeft.adapters.types import Adapter, LoRAWeights, Manifest
from personalpeft.backends.error_mapping import to_serving_error
from personalpeft.errors import PersonalPeftError, format_origin, get_error_type
from personalpeft.learning.environment import (
    ENVIRONMENT,
    describe_environment,
    recorded_environment,
)
from personalpeft.learning.gate.gate import Judgement
from personalpeft.learning.layers import VALID_ON, replace_layer, trained_on, valid_stacks
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
from personalpeft.learning.report import LearnReport, SignalUsage, signal_text
from personalpeft.services import Services
from personalpeft.store.store import Store
from personalpeft.types import (
    Json,
    Revision,
    Stack,
    StackEntry,
    Verdict,
    canonical_digest,
)

_log = logging.getLogger(__name__)


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

    def to_revision(
        self,
        verdict: Verdict,
        reason: str,
        scores: Mapping[str, Any],
        *,
        at: datetime,
        seconds: float,
        probation: bool = False,
    ) -> Revision:
        """Return the revision to record, with its judgement."""
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
            inputs=plan.inputs,
            signals=plan.signal_roles,
            scores=scores,
            verdict=verdict,
            reason=reason,
            probation=probation,
            at=at,
            seconds=seconds,
        )


def build_adapter(plan: Plan, weights: Mapping[str, LoRAWeights], recipe: Json) -> Adapter:
    """Return the layer of a plan with these weights, in half precision as it is stored."""
    manifest = Manifest(
        base=plan.live.base,
        layer=plan.layer,
        rank=plan.recipe.rank,
        scaling=plan.recipe.scaling,
        targets=plan.recipe.target_modules,
        recipe=recipe,
        signals=plan.data_digest,
        below=tuple(entry.digest for entry in plan.below.entries),
        parent=plan.parent.digest if plan.parent else None,
    )
    return Adapter(manifest, in_half(weights))


def store_candidate(
    services: Services, plan: Plan, weights: Mapping[str, LoRAWeights]
) -> Candidate:
    """Make the file of a trained layer durable, and return it as a candidate."""
    blob = pack(build_adapter(plan, weights, plan.stored_recipe))
    digest = services.store.blobs.put(plan.user, blob)
    scores = {ENVIRONMENT: describe_environment(services.learning_engine.backend)}
    return Candidate(plan, layer_entry(services.store, plan.user, plan.layer, digest), blob, scores)


def find_candidate(store: Store, plan: Plan) -> Candidate | None:
    """Return the recorded build of a plan's inputs, so that nothing is trained twice."""
    inputs, blobs = plan.inputs, store.blobs
    for known in store.catalog.revisions(plan.user):
        if known.inputs == inputs and blobs.is_intact(blobs.expected_path(known.digest)):
            entry = layer_entry(store, plan.user, plan.layer, known.digest)
            scores = {ENVIRONMENT: recorded_environment(known.scores)}
            return Candidate(plan, entry, blobs.read(known.digest), scores)
    return None


def layer_entry(store: Store, user: str, layer: str, digest: str) -> StackEntry:
    """Return the stack entry of a file, with the weight that its layer has."""
    weights = {each.name: each.weight for each in store.catalog.layers(user)}
    return StackEntry(layer, f"{layer}@{digest[:12]}", digest, weights.get(layer, 1.0))


def publish_candidate(
    services: Services, candidate: Candidate, judgement: Judgement, report: LearnReport
) -> LearnReport:
    """Record a judged candidate with its report, and make it live where it was promoted.

    It replaces the head that it was judged against. Where another one is live by now, only that is
    recorded. The checkpoint is deleted. Returns the report that was recorded.
    """
    store, plan = services.store, candidate.plan
    revision = candidate.to_revision(
        judgement.verdict,
        judgement.reason,
        report.scores,
        at=report.at,
        seconds=report.seconds,
        probation=judgement.probation,
    )
    cause = MoveCause.ACCEPTED if judgement.accepted else plan.move_cause
    # Pinned until the head has moved, so that the first reply does not load it.
    with services.model.preloaded(candidate.stack) if report.live else nullcontext():
        is_recorded = store.catalog.add_revision(
            revision,
            candidate.blob,
            report.as_json(),
            promote=report.live,
            cause=cause,
            expected_head=report.before,
        )
    if not is_recorded:
        report = record(services, _head_moved_report(store, report))
    store.delete_session(plan.user, plan.layer)
    return report


def record_unchanged(services: Services, candidate: Candidate) -> LearnReport:
    """Record a build that equals the live revision. The revision's judgement stays."""
    store, plan = services.store, candidate.plan
    known = store.catalog.revision(plan.user, candidate.entry.revision)
    report = report_of(
        services,
        plan,
        LearnOutcome.UNCHANGED,
        Reason(ReasonCode.SAME_AS_LIVE),
        revision=known.id,
        probation=known.probation,
        steps=plan.steps,
    )
    # Recorded again, so that what this build holds out stays held out.
    again = replace(known, signals=plan.signal_roles)
    store.catalog.add_revision(
        again, candidate.blob, report.as_json(), promote=False, cause=MoveCause.LEARN
    )
    store.delete_session(plan.user, plan.layer)
    return report


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
        user: The owner.
        layer: The layer.
        digest: SHA-256 of the packed file.
        base: Digest of the base.
        recipe: How it was made, as JSON data.
        reason: Why it is live, in words.
        at: When it was recorded.
        below: The layers that it was built on.
        seconds: How long it took.
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
    services: Services, plan: Plan, outcome: LearnOutcome, *reasons: Reason, **more: Any
) -> LearnReport:
    """Return the report of a plan, with the use of each signal. It is not recorded yet.

    Args:
        services: The wired parts.
        plan: The plan.
        outcome: How it ended.
        reasons: Why.
        more: Further fields of the report.
    """
    capacity = plan.capacity
    report = LearnReport(
        user=plan.user,
        layer=plan.layer,
        outcome=outcome,
        reasons=reasons,
        at=services.clock.now(),
        seconds=round(services.clock.timer() - plan.began, 3),
        before=plan.head,
        removed=plan.removed,
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


def report_of_head(
    services: Services, head: Revision, began: float, outcome: LearnOutcome, *reasons: Reason
) -> LearnReport:
    """Return the report of a head that was judged again. It is not recorded yet.

    Args:
        services: The wired parts.
        head: The live revision, which stays so unless the caller says otherwise.
        began: When the learn of its layer began, on the timer.
        outcome: How it ended.
        reasons: Why.
    """
    return LearnReport(
        user=head.user,
        layer=head.layer,
        outcome=outcome,
        reasons=reasons,
        at=services.clock.now(),
        seconds=round(services.clock.timer() - began, 3),
        revision=head.id,
        before=head.id,
        probation=head.probation,
    )


def mark_valid(
    services: Services, head: Revision, below: Stack, began: float, *reasons: Reason
) -> LearnReport:
    """Record that a head is valid on the stack that is below it now. Arguments: ``report_of_head``."""
    report = report_of_head(services, head, began, LearnOutcome.UNCHANGED, *reasons)
    # Stored in its scores, so that it is not judged again on the same stack.
    stacks = [*valid_stacks(head), below.digest]
    valid = replace(head, scores={**head.scores, VALID_ON: stacks})
    return record_judgement(services.store, valid, report, MoveCause.REVALIDATED)


def record_judgement(
    store: Store, head: Revision, report: LearnReport, cause: MoveCause
) -> LearnReport:
    """Record a judgement of a head, make ``report.before`` live, and return what was recorded."""
    is_recorded = store.catalog.switch_heads(
        head.user,
        {head.layer: report.before},
        expected={head.layer: head.id},
        judged=[(head, report.as_json())],
        base=head.base,
        cause=cause,
    )
    return report if is_recorded else _head_moved_report(store, report)


def _head_moved_report(store: Store, report: LearnReport) -> LearnReport:
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


def _list_sources(store: Store, plan: Plan, use_of_new: SignalUse) -> tuple[SignalUsage, ...]:
    """Return the use of each signal. ``use_of_new`` is the use of newly trained signals."""
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
        sources.append(SignalUsage(signal.id, str(signal.kind), text, use, each.reason, layer))
    return tuple(sources)
