"""Make the report of a learn from its plan, and record it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from personalpeft.learning.layers import trained_on
from personalpeft.learning.outcomes import (
    DECIDED_USES,
    LearnOutcome,
    Placement,
    Reason,
    ReasonCode,
    SignalUse,
)
from personalpeft.learning.plan import Plan
from personalpeft.learning.report import LearnReport, signal_usage
from personalpeft.services import Services
from personalpeft.store.store import Store


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
    use_of_new, use_of_holdout = SignalUse.PENDING, SignalUse.TO_BE_HELD_OUT
    if report.revision is not None:
        is_live = report.live or report.revision == plan.head
        use_of_new = SignalUse.LEARNED if is_live else SignalUse.LEARNED_NOT_LIVE
        use_of_holdout = SignalUse.HELD_OUT
    learned = trained_on(services.store, plan.parent)
    new = {each.signal for each in (*plan.new_examples, *plan.undesirable_examples)} - learned
    held_out = plan.holdout_signals
    sources, counts = [], Counter[str]()
    for each in plan.assignments:
        signal = each.signal.id
        if signal in new:
            use = use_of_new
        elif signal in plan.new_holdout:
            use = use_of_holdout
        elif signal in held_out:
            use = SignalUse.HELD_OUT_EARLIER
        elif signal in plan.excluded:
            use = SignalUse.NO_CAPACITY
        elif signal in plan.too_long:
            use = SignalUse.TOO_LONG
        elif each.layer == plan.layer:
            use = SignalUse.LEARNED_EARLIER
        elif each.place is Placement.LAYER:
            use = SignalUse.OTHER_LAYER
        elif each.place is Placement.UNUSED:
            use = SignalUse.UNUSED
        else:
            use = SignalUse.IN_PROMPT
        # With all signals in each report, a home would grow with the square of time.
        if use in DECIDED_USES:
            sources.append(signal_usage(each.signal, use, each.reason))
        else:
            counts[use.value] += 1
    return replace(report, sources=tuple(sources), source_counts=dict(counts))


def record(services: Services, report: LearnReport) -> LearnReport:
    """Record a report and return it."""
    services.store.catalog.add_report(report.user, report.as_json())
    return report


def head_moved_report(store: Store, report: LearnReport) -> LearnReport:
    """Return the report of a learn during which another program moved the head.

    Nothing is changed then, and the next learn starts from the new head. It is not recorded here.
    """
    heads = {layer.name: layer.head for layer in store.catalog.layers(report.user)}
    live = heads.get(report.layer)
    return LearnReport(
        report.user,
        report.layer,
        LearnOutcome.HEAD_MOVED,
        (Reason(ReasonCode.HEAD_MOVED, {"live": live or "the base"}),),
        report.at,
        report.seconds,
        previous_head=live,
    )
