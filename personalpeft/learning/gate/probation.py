"""Decide by later feedback whether a revision that went live on thin evidence stays live.

Withdrawal: two anytime-valid tests (``rate_increase_e_values``) compare rates with those before the
revision. One takes the rate of disliked replies, the other that of corrected ones. The mean of
their e-values is tested. So they withdraw an equally good revision with a probability of at most
1/20. With fewer than ``MIN_HISTORY`` earlier replies there is too little to compare with. Then a
policy, and no test, compares dislikes with a fixed share.
``tests/fast/learning/test_probation_rates.py`` measures its error rates.

Confirmation: the e-value of the lessons, times the e-value that the rate of liked replies rose.
Likes alone confirm nothing: a user may like most replies of a worse revision too.

A blind comparison multiplies the side that it favours by 1.5 and the other side by 0.5. An e-value
of ``CONFIRMATION_E_VALUE`` decides.

Invariants: only a user's own acts count, one for each turn, and only those that training is allowed
on. If several revisions gave a reply together, its feedback counts for the one built last. The last
change explains a change for the worse. A choice between two revisions counts for these alone. A
revision is withdrawn only if a learn made it live, never if the user chose it. The same ledger
gives the same result.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from personalpeft.learning.gate.evidence import (
    CONFIRMATION_E_VALUE,
    IMPROVED_FACTOR,
    REGRESSED_FACTOR,
)
from personalpeft.learning.outcomes import LearnOutcome, MoveCause, Reason, ReasonCode, reason
from personalpeft.learning.report import LearnReport
from personalpeft.store.locks import learn_lease
from personalpeft.store.store import Store
from personalpeft.types import USER_SOURCE, Revision, Signal, SignalKind, Verdict

MIN_HISTORY = 20
"""Earlier replies with feedback, from which on rates can be compared."""
ODDS_RATIO = 4.0
"""The alternative: the odds of the outcome are this many times the odds before."""
NUM_BLOCKS = 60
"""The number of outcomes since the change over which those before it are spread."""
_PRIOR_TRUE, _PRIOR_FALSE = 1.0, 5.0
_MIN_SHARE = 0.25
_MAX_SIGNALS = 400


class FeedbackOutcome(StrEnum):
    """What the user's feedback says about one reply."""

    LIKED = "liked"
    DISLIKED = "disliked"
    CORRECTED = "corrected"
    WON = "won"
    """Chosen in a blind comparison."""
    LOST = "lost"


_COMPARED = frozenset({FeedbackOutcome.WON, FeedbackOutcome.LOST})


@dataclass(frozen=True, slots=True)
class ProbationResult:
    """The end of a probation: WITHDRAWN or CONFIRMED, and why."""

    outcome: LearnOutcome
    reason: Reason


def sequential_test(
    before: Sequence[FeedbackOutcome], since: Sequence[FeedbackOutcome], e_value: float = 1.0
) -> ProbationResult | None:
    """Return the end of a probation, or None while it goes on.

    Args:
        before: Feedback from before the revision was live, oldest first.
        since: Feedback on its own replies, oldest first.
        e_value: The e-value of its lessons.
    """
    rated_before = [each for each in before if each not in _COMPARED]
    rated: list[FeedbackOutcome] = []
    against, better = [1.0], [1.0]
    won = lost = 0
    if rated_since := [each for each in since if each not in _COMPARED]:
        against += withdrawal_e_values(rated_before, rated_since)
        better += rate_increase_e_values(
            [each is FeedbackOutcome.LIKED for each in rated_before],
            [each is FeedbackOutcome.LIKED for each in rated_since],
        )
    # After each reply, so that the result does not depend on when one looks.
    for outcome in since:
        won += outcome is FeedbackOutcome.WON
        lost += outcome is FeedbackOutcome.LOST
        if outcome not in _COMPARED:
            rated.append(outcome)
        if against[len(rated)] * _comparison_e_value(lost, won) >= CONFIRMATION_E_VALUE:
            return ProbationResult(LearnOutcome.WITHDRAWN, _withdrawal(rated_before, rated, lost))
        if e_value * better[len(rated)] * _comparison_e_value(won, lost) >= CONFIRMATION_E_VALUE:
            liked = rated.count(FeedbackOutcome.LIKED) + won
            why = reason(ReasonCode.CONFIRMED, liked=liked, replies=len(rated) + won + lost)
            return ProbationResult(LearnOutcome.CONFIRMED, why)
    return None


def withdrawal_e_values(
    before: Sequence[FeedbackOutcome], since: Sequence[FeedbackOutcome]
) -> list[float]:
    """Return the e-value against a revision after each of its rated replies."""
    if len(before) < MIN_HISTORY:
        return _policy_e_values(before, since)
    by_kind = [
        rate_increase_e_values([each is kind for each in before], [each is kind for each in since])
        for kind in (FeedbackOutcome.DISLIKED, FeedbackOutcome.CORRECTED)
    ]
    return [sum(values) / len(values) for values in zip(*by_kind, strict=True)]


def rate_increase_e_values(before: Sequence[bool], since: Sequence[bool]) -> list[float]:
    """Return the e-value for a higher rate since the change, after each outcome since.

    Outcomes are oldest first. Each new one forms a block with a fixed number of outcomes from
    before the change. Under equal rates, a block's likelihood ratio has mean 1 or less (Turner et al.
    2021, arXiv 2106.02693, equation 2.4). So the product over blocks reaches 20 with a probability
    of at most 1/20, however often one looks (Ville 1939).

    Once the outcomes from before are used up, the e-value stays.
    """
    per_block = max(1, len(before) // NUM_BLOCKS)
    # The newest first: they compare best with what comes next.
    newest_first = before[::-1]
    blocks = [newest_first[at : at + per_block] for at in range(0, len(before), per_block)]
    num_true, num_false = _PRIOR_TRUE, _PRIOR_FALSE
    e_value, e_values = 1.0, []
    for outcome, block in itertools.zip_longest(since, blocks[: len(since)], fillvalue=()):
        if block:
            # The rates of the alternative depend on earlier blocks alone. Otherwise the mean of the
            # ratio could exceed 1 unnoticed.
            old = num_true / (num_true + num_false)
            new = ODDS_RATIO * old / (1 - old + ODDS_RATIO * old)
            null = (len(block) * old + new) / (len(block) + 1)
            e_value *= new / null if outcome else (1 - new) / (1 - null)
            hits = sum(block)
            misses = len(block) - hits
            e_value *= (old / null) ** hits * ((1 - old) / (1 - null)) ** misses
            num_true += hits
            num_false += misses
        e_values.append(e_value)
    return e_values


def _comparison_e_value(num_for: int, num_against: int) -> float:
    """Return the e-value against the hypothesis that blind comparisons are tosses of a coin."""
    return IMPROVED_FACTOR**num_for * REGRESSED_FACTOR**num_against


def _policy_e_values(
    before: Sequence[FeedbackOutcome], since: Sequence[FeedbackOutcome]
) -> list[float]:
    """Return (q / p)^k ((1 - q) / (1 - p))^(n - k) for k dislikes of n replies, q = (1 + p) / 2.

    p is the share of dislikes before, with one reply of each sort added, and at least a quarter.
    """
    disliked = before.count(FeedbackOutcome.DISLIKED)
    share = max(_MIN_SHARE, (disliked + 1) / (len(before) + 2))
    alternative = (1 + share) / 2
    factors = [
        alternative / share if each is FeedbackOutcome.DISLIKED else (1 - alternative) / (1 - share)
        for each in since
    ]
    return list(itertools.accumulate(factors, operator.mul))


def _withdrawal(
    before: Sequence[FeedbackOutcome], since: Sequence[FeedbackOutcome], lost: int
) -> Reason:
    """Return the reason: the kind of feedback that rose more, lost comparisons as dislikes."""

    def rise(kind: FeedbackOutcome) -> float:
        return since.count(kind) / max(1, len(since)) - before.count(kind) / max(1, len(before))

    kind = max(FeedbackOutcome.DISLIKED, FeedbackOutcome.CORRECTED, key=rise)
    bad = since.count(kind) + (lost if kind is FeedbackOutcome.DISLIKED else 0)
    earlier = f", {before.count(kind)} of {len(before)} before it" if before else ""
    counts = {"bad": bad, "replies": len(since) + lost, "kind": str(kind), "earlier": earlier}
    return Reason(ReasonCode.WITHDRAWN, counts)


def review_probation_with_lease(
    store: Store, user: str, now: Callable[[], datetime]
) -> tuple[LearnReport, ...]:
    """Take the user's learn lease, and ``review_probation``.

    Args:
        store: The open home.
        user: The user.
        now: Returns the time.

    Raises:
        Busy: A learn of the user runs.
    """
    if not _heads_on_probation(store, user):
        return ()
    with store.leases.acquire(learn_lease(user)):
        return review_probation(store, user, now)


def review_probation(
    store: Store, user: str, now: Callable[[], datetime]
) -> tuple[LearnReport, ...]:
    """Record the probations that end. The caller holds the user's learn lease.

    Args:
        store: The open home.
        user: The user.
        now: Returns the time.

    Returns:
        The reports of those that ended.
    """
    reports = []
    for revision in _heads_on_probation(store, user):
        history = store.catalog.head_moves(user, layer=revision.layer)
        moves = [move for move in history if move.after == revision.id]
        learned = [move for move in moves if move.cause == MoveCause.LEARN]
        causes = [move.cause for move in moves if move.cause != MoveCause.ROLLBACK_UNDONE]
        if not learned or causes[-1] not in (MoveCause.LEARN, MoveCause.WITHDRAWN):
            continue
        before, since = _load_feedback(store, revision, learned[0].at)
        result = sequential_test(before, since, float(revision.scores.get("e_value", 1.0)))
        if result is None:
            continue
        report = _end_probation(store, revision, result, learned[-1].before, now())
        reports += [report] if report is not None else []
    return tuple(reports)


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
        previous_head=previous,
    )
    verdict = Verdict.REFUSED if is_withdrawn else Verdict.PROMOTED
    judged = replace(revision, verdict=verdict, reason=report.reason, probation=False)
    is_recorded = store.catalog.switch_heads(
        revision.user,
        {revision.layer: previous if is_withdrawn else revision.id},
        expected={revision.layer: revision.id},
        judged=[(judged, report.as_json())],
        base=revision.base,
        cause=MoveCause.WITHDRAWN,
    )
    return report if is_recorded else None


def _load_feedback(
    store: Store, revision: Revision, live_since: datetime
) -> tuple[list[FeedbackOutcome], list[FeedbackOutcome]]:
    """Return the feedback on replies before the revision, and on its own; one for each turn."""
    kinds = (SignalKind.RATING, SignalKind.EDIT, SignalKind.PREFERENCE, SignalKind.REWARD)
    by_turn: dict[str, list[Signal]] = {}
    for signal in store.ledger.signals(revision.user, kinds=kinds)[-_MAX_SIGNALS:]:
        if signal.turn is not None and signal.source == USER_SOURCE and signal.is_trainable:
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
        outcome = FeedbackOutcome.WON if was_chosen else _outcome_of(signals)
        if outcome is None:
            continue
        if is_own or was_chosen:
            since.append(outcome)
        elif turn.at < live_since and turn.stack.base == revision.base:
            before.append(outcome)
    return before, since


def _outcome_of(signals: Sequence[Signal]) -> FeedbackOutcome | None:
    """Return what the feedback on one reply says.

    A lost blind comparison outweighs a dislike, that a correction, and that a like.
    """
    if any("revision" in signal.payload for signal in signals):
        return FeedbackOutcome.LOST
    values = [signal.rating for signal in signals]
    if min(values, default=0) < 0:
        return FeedbackOutcome.DISLIKED
    if any(signal.kind in (SignalKind.EDIT, SignalKind.PREFERENCE) for signal in signals):
        return FeedbackOutcome.CORRECTED
    return FeedbackOutcome.LIKED if max(values, default=0) > 0 else None
