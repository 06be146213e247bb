"""Report a build, record its revision, and make it live.

Invariants: the file is durable before its rows are written. The head moves in the transaction that
records the revision. The first reply of a new revision does not wait for its adapter.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from personalpeft.backends.error_mapping import to_serving_error
from personalpeft.errors import (
    NothingCause,
    NothingToLearn,
    PersonalPeftError,
    format_origin,
    get_error_type,
)
from personalpeft.learning.candidate import Candidate
from personalpeft.learning.data.assignment import load_assignments
from personalpeft.learning.layers import trained_on
from personalpeft.learning.outcomes import (
    DECIDED_USES,
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
from personalpeft.learning.status import pending
from personalpeft.services import Services
from personalpeft.store.store import Store
from personalpeft.types import Revision

_log = logging.getLogger(__name__)


def promote_candidate(services: Services, candidate: Candidate, report: LearnReport) -> LearnReport:
    """Record a judged candidate with its report, and make it live where it was promoted.

    It replaces the head that it was judged against. Where another one is live by now, only that is
    recorded. The checkpoint is deleted.

    Args:
        services: The wired parts.
        candidate: The candidate.
        report: Its report, with the gate's judgement and the scores to record.

    Returns:
        The report that was recorded.
    """
    store, plan = services.store, candidate.plan
    cause = MoveCause.ACCEPTED if report.accepted else plan.move_cause
    # Pinned until the head has moved, so that the first reply does not load it.
    with services.model.preloaded(candidate.stack) if report.live else nullcontext():
        is_recorded = store.catalog.add_revision(
            candidate.to_revision(report),
            candidate.blob,
            report.as_json(),
            promote=report.live,
            cause=cause,
            expected_head=report.previous_head,
        )
    if not is_recorded:
        report = record(services, _head_moved_report(store, report))
    store.delete_checkpoint(plan.user, plan.layer)
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
    store.delete_checkpoint(plan.user, plan.layer)
    return report


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
    report = LearnReport(
        user=plan.user,
        layer=plan.layer,
        outcome=outcome,
        reasons=reasons,
        at=services.clock.now(),
        seconds=round(services.clock.timer() - plan.began, 3),
        previous_head=plan.head,
        removed=plan.removed,
        capacity=plan.capacity,
        **more,
    )
    use = SignalUse.PENDING
    if report.revision is not None:
        is_live = report.live or report.revision == plan.head
        use = SignalUse.LEARNED if is_live else SignalUse.LEARNED_NOT_LIVE
    sources = _list_sources(services.store, plan, use)
    # With all signals in each report, a home would grow with the square of time.
    decided = tuple(each for each in sources if each.use_code in DECIDED_USES)
    counts = Counter(each.use_code.value for each in sources if each.use_code not in DECIDED_USES)
    return replace(report, sources=decided, source_counts=dict(counts))


def record(services: Services, report: LearnReport) -> LearnReport:
    """Record a report and return it."""
    services.store.catalog.add_report(report.user, report.as_json())
    return report


def record_judgement(
    store: Store, head: Revision, report: LearnReport, cause: MoveCause
) -> LearnReport:
    """Record a judgement of a head, and make ``report.previous_head`` live.

    Args:
        store: The open home.
        head: The live revision, with the scores to record.
        report: How the judgement ended.
        cause: Why the head moves, where it does.

    Returns:
        The report, or that another program moved the head meanwhile.
    """
    is_recorded = store.catalog.switch_heads(
        head.user,
        {head.layer: report.previous_head},
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
        previous_head=live,
    )


def failed_report(services: Services, user: str, layer: str, error: Exception) -> LearnReport:
    """Return the report of an error that one user, or one layer, has alone.

    Of an unexpected error it names the kind only: its text may hold private words.

    Args:
        services: The wired parts.
        user: The user.
        layer: The layer, or "" where the learn reached none.
        error: The error.
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
        error=get_error_type(error).__name__,
    )


def record_unusable(
    services: Services, user: str, layer: str, nothing: NothingToLearn
) -> LearnReport | None:
    """Record that a learn can use none of some signals, so that they trigger no further learn.

    Args:
        services: The wired parts.
        user: The user.
        layer: The layer.
        nothing: The error that names the signals.

    Returns:
        The report, or None if reports already list all of them.
    """
    is_full = nothing.cause is NothingCause.NO_CAPACITY
    use = SignalUse.NO_CAPACITY if is_full else SignalUse.TOO_LONG
    waiting = {trigger.key for trigger in pending(services.store, user).triggers}
    sources = tuple(
        SignalUsage(
            each.signal.id, str(each.signal.kind), signal_text(each.signal), use, each.reason
        )
        for each in load_assignments(services.store, user)
        if each.signal.id in waiting.intersection(nothing.signals)
    )
    if not sources:
        return None
    report = LearnReport(
        user=user,
        layer=layer,
        outcome=LearnOutcome.NOTHING_TO_LEARN,
        reasons=(text_reason(nothing.message),),
        at=services.clock.now(),
        sources=sources,
    )
    return record(services, report)


def _list_sources(store: Store, plan: Plan, use_of_new: SignalUse) -> tuple[SignalUsage, ...]:
    """Return the use of each signal. ``use_of_new`` is the use of newly trained signals."""
    examples = (*plan.new_examples, *plan.undesirable_examples)
    new = {each.signal for each in examples} - trained_on(store, plan.parent)
    is_pending = use_of_new is SignalUse.PENDING
    use_of_holdout = SignalUse.TO_BE_HELD_OUT if is_pending else SignalUse.HELD_OUT
    sources = []
    for each in plan.assignments:
        signal = each.signal
        if signal.id in new:
            use = use_of_new
        elif signal.id in plan.new_holdout:
            use = use_of_holdout
        elif signal.id in plan.holdout_signals:
            use = SignalUse.HELD_OUT_EARLIER
        elif signal.id in plan.excluded:
            use = SignalUse.NO_CAPACITY
        elif signal.id in plan.too_long:
            use = SignalUse.TOO_LONG
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
