"""Decide by later feedback whether a revision stays that went live on thin evidence.

Two sequential tests run. For the revision: each liked reply multiplies the e-value of its lessons
by 1.5 and each other by 0.5; at ``CONFIRMATION_E_VALUE`` (20) the probation ends. Against it, one
test each for disliked and for corrected replies: their share is compared with the share before the
revision, where the alternative is that half of the rest goes wrong too. At 20 the revision is
withdrawn. Where the true share has not grown, that happens to at most one revision of twenty by
each test, so to at most one of ten, however often one looks (Ville 1939). A share counts as 25 % at
least, so it takes four dislikes, and a user who corrects every reply says nothing by going on.

Invariants: only a user's own acts count, one for each turn. Of several revisions that gave a reply
together it counts for the one built last, since a change for the worse follows the last change. A
choice between two revisions counts for these alone. Only a revision that a learn made live is
withdrawn, never one that the user chose. The same ledger gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from personalpeft.learning.data.ratings import rating_value
from personalpeft.learning.gate.gate import (
    CONFIRMATION_E_VALUE,
    IMPROVED_FACTOR,
    REGRESSED_FACTOR,
    Judgement,
)
from personalpeft.learning.outcomes import LearnOutcome, MoveCause, Reason, ReasonCode, reason
from personalpeft.learning.report import LearnReport
from personalpeft.store.store import Store
from personalpeft.types import USER_SOURCE, HeadMove, Revision, Signal, SignalKind, Verdict

_MIN_SHARE = 0.25
_MAX_SIGNALS = 400


class FeedbackOutcome(StrEnum):
    """What the user's feedback says about one reply."""

    LIKED = "liked"
    DISLIKED = "disliked"
    CORRECTED = "corrected"


@dataclass(frozen=True, slots=True)
class ProbationResult:
    """The end of a probation: WITHDRAWN or CONFIRMED, and why."""

    outcome: LearnOutcome
    reason: Reason


def sequential_test(
    before: Sequence[FeedbackOutcome], since: Sequence[FeedbackOutcome], e_value: float = 1.0
) -> ProbationResult | None:
    """Return the end of a probation, or None while it goes on.

    ``before`` is feedback from before the revision was live, ``since`` on its own replies, oldest
    first, and ``e_value`` that of its lessons.
    """
    kinds = (FeedbackOutcome.DISLIKED, FeedbackOutcome.CORRECTED)
    # After each reply, so that the result does not depend on when one looks.
    for count, outcome in enumerate(since, 1):
        for kind in kinds:
            if withdrawal_e_value(before, since[:count], kind) >= CONFIRMATION_E_VALUE:
                earlier = f", {before.count(kind)} of {len(before)} before it" if before else ""
                bad = since[:count].count(kind)
                counts = {"bad": bad, "replies": count, "kind": str(kind), "earlier": earlier}
                why = Reason(ReasonCode.WITHDRAWN, counts)
                return ProbationResult(LearnOutcome.WITHDRAWN, why)
        e_value *= IMPROVED_FACTOR if outcome is FeedbackOutcome.LIKED else REGRESSED_FACTOR
        if e_value >= CONFIRMATION_E_VALUE:
            liked = since[:count].count(FeedbackOutcome.LIKED)
            why = reason(ReasonCode.CONFIRMED, liked=liked, replies=count)
            return ProbationResult(LearnOutcome.CONFIRMED, why)
    return None


def withdrawal_e_value(
    before: Sequence[FeedbackOutcome], since: Sequence[FeedbackOutcome], kind: FeedbackOutcome
) -> float:
    """Return the e-value for a larger share of ``kind`` than before.

    With the share p before and q = (1 + p) / 2, it is (q / p)^k ((1 - q) / (1 - p))^(n - k) for k
    of n replies. One reply of each sort is added to those before, since few say little of a share.
    """
    share = max(_MIN_SHARE, (before.count(kind) + 1) / (len(before) + 2))
    feared = (1 + share) / 2
    bad = since.count(kind)
    return (feared / share) ** bad * ((1 - feared) / (1 - share)) ** (len(since) - bad)


def review_probation_locked(
    store: Store, user: str, now: Callable[[], datetime]
) -> tuple[LearnReport, ...]:
    """Review probations under the user's learn lease. Raises ``Busy`` while a learn runs."""
    if not _heads_on_probation(store, user):
        return ()
    with store.leases.acquire(f"learn-{user}"):
        return review_probation(store, user, now)


def review_probation(
    store: Store, user: str, now: Callable[[], datetime]
) -> tuple[LearnReport, ...]:
    """Review probations for a caller who holds the lease, and record those that end."""
    reports = []
    for revision in _heads_on_probation(store, user):
        history = store.catalog.head_moves(user, layer=revision.layer)
        moves = [move for move in history if move.after == revision.id]
        learned = [move for move in moves if move.cause == MoveCause.LEARN]
        causes = [move.cause for move in moves if move.cause != MoveCause.ROLLBACK_UNDONE]
        if not learned or causes[-1] not in (MoveCause.LEARN, MoveCause.WITHDRAWN):
            continue
        before, since = _load_feedback(store, revision, learned[0].at)
        result = sequential_test(before, since, float(revision.scores.get("bet", 1.0)))
        if result is None:
            continue
        report = _end_probation(store, revision, result, learned[-1].before, now())
        reports += [report] if report is not None else []
    return tuple(reports)


def refuse_withdrawn(store: Store, user: str, revision: str, judgement: Judgement) -> Judgement:
    """Return the judgement, refused where this very revision was withdrawn before."""
    is_withdrawn = any(
        move.before == revision and move.cause == MoveCause.WITHDRAWN
        for move in store.catalog.head_moves(user)
    )
    if judgement.verdict is Verdict.PROMOTED and is_withdrawn:
        return Judgement(Verdict.REFUSED, (Reason(ReasonCode.WITHDRAWN_BEFORE),))
    return judgement


def _heads_on_probation(store: Store, user: str) -> list[Revision]:
    heads = [layer.head for layer in store.catalog.layers(user) if layer.head is not None]
    revisions = [store.catalog.revision(user, head) for head in heads]
    return [revision for revision in revisions if revision.probation]


def _end_probation(
    store: Store, revision: Revision, result: ProbationResult, previous: str | None, at: datetime
) -> LearnReport | None:
    """Record the end; return None where the head has moved meanwhile."""
    is_withdrawn = result.outcome is LearnOutcome.WITHDRAWN
    if previous and store.catalog.revision(revision.user, previous).base != revision.base:
        previous = None
    report = LearnReport(
        user=revision.user,
        layer=revision.layer,
        outcome=result.outcome,
        reasons=(result.reason,),
        at=at,
        seconds=0.0,
        revision=revision.id,
        before=previous,
    )
    judged = replace(revision, verdict=report.verdict, reason=report.reason, probation=False)
    after = previous if is_withdrawn else revision.id
    move = HeadMove(revision.user, revision.layer, revision.id, after, MoveCause.WITHDRAWN, at)
    return report if store.catalog.add_judgement(judged, report.as_json(), move=move) else None


def _load_feedback(
    store: Store, revision: Revision, live_since: datetime
) -> tuple[list[FeedbackOutcome], list[FeedbackOutcome]]:
    """Return the feedback on replies before the revision, and on its own; one for each turn."""
    kinds = (SignalKind.RATING, SignalKind.EDIT, SignalKind.PREFERENCE, SignalKind.REWARD)
    by_turn: dict[str, list[Signal]] = {}
    for signal in store.ledger.signals(revision.user, kinds=kinds)[-_MAX_SIGNALS:]:
        if signal.turn is not None and signal.source == USER_SOURCE:
            by_turn.setdefault(signal.turn, []).append(signal)
    before, since = [], []
    order = {each.id: n for n, each in enumerate(store.catalog.revisions(revision.user))}
    for turn_id, on_turn in by_turn.items():
        signals = [
            each for each in on_turn if each.payload.get("layer", revision.layer) == revision.layer
        ]
        turn = store.ledger.turn(revision.user, turn_id)
        was_chosen = any(each.payload.get("revision") == revision.id for each in signals)
        was_compared = any("revision" in each.payload for each in signals)
        gave = [
            entry.revision
            for entry in turn.stack.entries
            if entry.weight and entry.revision in order
        ]
        newest = max(gave, key=order.__getitem__, default=None)
        is_own = revision.id in gave if was_compared else revision.id == newest
        outcome = FeedbackOutcome.LIKED if was_chosen else _outcome_of(signals)
        if outcome is None:
            continue
        if is_own or was_chosen:
            since.append(outcome)
        elif turn.at < live_since and turn.stack.base == revision.base:
            before.append(outcome)
    return before, since


def _outcome_of(signals: Sequence[Signal]) -> FeedbackOutcome | None:
    """Return what the feedback on one reply says.

    A dislike outweighs a correction, and that a like. To choose another revision's reply in a blind
    comparison is a dislike.
    """
    values = [rating_value(signal) for signal in signals]
    if min(values, default=0) < 0 or any("revision" in signal.payload for signal in signals):
        return FeedbackOutcome.DISLIKED
    if any(signal.kind in (SignalKind.EDIT, SignalKind.PREFERENCE) for signal in signals):
        return FeedbackOutcome.CORRECTED
    return FeedbackOutcome.LIKED if max(values, default=0) > 0 else None
