"""Decide by later feedback whether a revision that went live on thin evidence stays live.

Invariants: only a user's own acts count, one for each turn, and only those that training is allowed
on. If several revisions gave a reply together, its feedback counts for the one built last. The last
change explains a change for the worse. A choice between two revisions counts for these alone. A
revision is withdrawn only if a learn made it live, never if the user chose it. The same ledger
gives the same result.

Withdrawal: two anytime-valid tests (``rate_increase_e_values``) compare rates with those before the
revision. One takes the rate of disliked replies, the other that of corrected ones. The mean of
their e-values is tested. So they withdraw an equally good revision with a probability of at most
1/20. With fewer than ``MIN_HISTORY`` earlier replies there is too little to compare with. Then a
policy, and no test, compares dislikes with a fixed share. A user who learns each night rates few
replies of each revision. So all replies since the last head that was final are compared as well,
with those before, and the mean of both e-values counts (``RunFeedback``).
``tests/fast/learning/test_probation_rates.py`` measures the error rates.

Confirmation: the e-value of the lessons, times the e-value that the rate of liked replies rose.
Likes alone confirm nothing: a user may like most replies of a worse revision too. Each learn gives
a layer another chance, so its limit grows (``confirmation_limit``).

A blind comparison with the revision before multiplies the side that it favours by 1.5 and the other
side by 0.5. An e-value of ``CONFIRMATION_E_VALUE`` withdraws.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
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
from personalpeft.services import Services
from personalpeft.store.locks import learn_lease
from personalpeft.store.store import Store
from personalpeft.types import USER_SOURCE, HeadMove, Revision, Signal, SignalKind, Turn, Verdict

_MAX_SIGNALS = 400
"""How many signals are read before the revision went live, and how many since."""
MIN_HISTORY = 20
"""Earlier replies with feedback, from which on rates can be compared."""
ODDS_RATIO = 4.0
"""The alternative: the odds of the outcome are this many times the odds before."""
NUM_BLOCKS = 60
"""The number of outcomes since the change over which those before it are spread."""
_PRIOR_TRUE, _PRIOR_FALSE = 1.0, 5.0
_MIN_SHARE = 0.25


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
    is_of_run: bool = False  # whether the replies of the whole run decided


@dataclass(frozen=True, slots=True)
class RunFeedback:
    """Feedback on all revisions that followed one another on probation, up to the live one.

    Attributes:
        before: Feedback from before the first of them was live, oldest first.
        since: Feedback on their replies, oldest first.
        seen: For each rated reply of the live one, how many of ``since`` there were with it.
    """

    before: Sequence[FeedbackOutcome] = ()
    since: Sequence[FeedbackOutcome] = ()
    seen: Sequence[int] = ()


def review_probation_with_lease(services: Services, user: str) -> tuple[LearnReport, ...]:
    """Take the user's learn lease, and ``review_probation``. Raises ``Busy`` if a learn runs."""
    store = services.store
    if not _heads_on_probation(store, user):
        return ()
    with store.leases.acquire(learn_lease(user)):
        return review_probation(services, user)


def review_probation(services: Services, user: str) -> tuple[LearnReport, ...]:
    """Record the probations of a user that end, and return their reports.

    The caller holds the user's learn lease.
    """
    store = services.store
    reports = []
    for revision in _heads_on_probation(store, user):
        history = store.catalog.head_moves(user, layer=revision.layer)
        moves = [move for move in history if move.after == revision.id]
        learned = [move for move in moves if move.cause == MoveCause.LEARN]
        causes = [move.cause for move in moves if move.cause != MoveCause.ROLLBACK_UNDONE]
        if not learned or causes[-1] not in (MoveCause.LEARN, MoveCause.WITHDRAWN):
            continue
        before, rated, since = _load_feedback(store, revision, {revision.id}, learned[0])
        run, began = _probation_run(store, revision, history)
        of_run = None
        if len(run) > 1:
            before_run, rated_in_run, _ = _load_feedback(store, revision, run, began)
            numbers = {turn: number for number, turn in enumerate(rated_in_run, 1)}
            # Feedback beyond the limit of a run changes its e-value no more.
            seen = [numbers.get(turn, len(rated_in_run)) for turn in rated]
            of_run = RunFeedback(before_run, list(rated_in_run.values()), seen)
        e_value = float(revision.scores.get("e_value", 1.0))
        number = _probation_number(store, revision, history)
        result = sequential_test(before, since, e_value, number, of_run)
        if result is None:
            continue
        previous = began.before if result.is_of_run else learned[-1].before
        report = _end_probation(store, revision, result, previous, services.clock.now())
        reports += [report] if report is not None else []
    return tuple(reports)


def _heads_on_probation(store: Store, user: str) -> list[Revision]:
    heads = [layer.head for layer in store.catalog.layers(user) if layer.head is not None]
    revisions = [store.catalog.revision(user, head) for head in heads]
    return [revision for revision in revisions if revision.probation]


def _probation_run(
    store: Store, revision: Revision, history: Sequence[HeadMove]
) -> tuple[set[str], HeadMove]:
    """Return the revisions on probation that led to one, itself included, and the first's move."""
    run: set[str] = set()
    learned = {move.after: move for move in reversed(history) if move.cause == MoveCause.LEARN}
    at, began = revision, learned[revision.id]
    while True:
        run.add(at.id)
        began = learned[at.id]
        if began.before is None or began.before not in learned or began.before in run:
            return run, began
        at = store.catalog.revision(revision.user, began.before)
        if not at.probation or at.base != revision.base:
            return run, began


def _probation_number(store: Store, revision: Revision, history: Sequence[HeadMove]) -> int:
    """Return which probation of its layer a revision is on since the last confirmed one, from 1."""
    revisions = store.catalog.revisions(revision.user, layer=revision.layer)
    final = {
        each.id for each in revisions if each.verdict is Verdict.PROMOTED and not each.probation
    }
    learned = list(dict.fromkeys(x.after for x in history if x.cause == MoveCause.LEARN))
    number = 0
    for each in learned[: learned.index(revision.id) + 1]:
        number = 0 if each in final else number + 1
    return number


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
    store: Store, revision: Revision, run: set[str], learned: HeadMove
) -> tuple[list[FeedbackOutcome], dict[str, FeedbackOutcome], list[FeedbackOutcome]]:
    """Return the feedback on replies before a run of revisions, and on their own by turn.

    The third part adds the blind comparisons of ``revision``, the live one, to the second. What
    came before is fixed when the first revision goes live. A window that slid would be another test
    each time that one looks.
    """
    kinds = (SignalKind.RATING, SignalKind.EDIT, SignalKind.PREFERENCE, SignalKind.REWARD)
    signals = store.ledger.signals(revision.user, kinds=kinds)
    first = sum(each.at < learned.at for each in signals)
    by_turn: dict[str, list[Signal]] = {}
    for signal in signals[max(0, first - _MAX_SIGNALS) : first + _MAX_SIGNALS]:
        if signal.turn is not None and signal.source == USER_SOURCE and signal.is_trainable:
            by_turn.setdefault(signal.turn, []).append(signal)
    before: list[FeedbackOutcome] = []
    rated: dict[str, FeedbackOutcome] = {}
    since: list[FeedbackOutcome] = []
    order = {each.id: n for n, each in enumerate(store.catalog.revisions(revision.user))}
    for turn_id, on_turn in by_turn.items():
        turn = store.ledger.turn(revision.user, turn_id)
        if choices := [each for each in on_turn if "revision" in each.payload]:
            outcome = _outcome_of_choice(revision, learned.before, choices[-1], turn)
            since += [outcome] if outcome is not None else []
            continue
        outcome = _outcome_of(on_turn)
        if outcome is None:
            continue
        gave = [
            entry.revision
            for entry in turn.stack.entries
            if entry.weight and entry.revision in order
        ]
        if max(gave, key=order.__getitem__, default=None) in run:
            rated[turn_id] = outcome
            since.append(outcome)
        elif on_turn[0].at < learned.at and turn.stack.base == revision.base:
            before.append(outcome)
    return before, rated, since


def _outcome_of_choice(
    revision: Revision, previous: str | None, choice: Signal, turn: Turn
) -> FeedbackOutcome | None:
    """Return what a blind comparison says; None unless it is with the revision before.

    A win over the bare base, or over a refused revision, does not say that the layer got better.
    """
    if choice.payload.get("layer", revision.layer) != revision.layer:
        return None
    rejected = [each.revision for each in turn.stack.entries if each.layer == revision.layer]
    # Where the layer was left out, the bare base answered.
    chosen = choice.payload["revision"]
    before = [previous] if previous is not None else []
    if chosen == revision.id and rejected == before:
        return FeedbackOutcome.WON
    is_before = chosen == previous if previous else "@" not in chosen
    return FeedbackOutcome.LOST if rejected == [revision.id] and is_before else None


def _outcome_of(signals: Sequence[Signal]) -> FeedbackOutcome | None:
    """Return what the feedback on one reply says.

    A dislike outweighs a correction, and that a like.
    """
    values = [signal.rating for signal in signals]
    if min(values, default=0) < 0:
        return FeedbackOutcome.DISLIKED
    if any(signal.kind in (SignalKind.EDIT, SignalKind.PREFERENCE) for signal in signals):
        return FeedbackOutcome.CORRECTED
    return FeedbackOutcome.LIKED if max(values, default=0) > 0 else None


def confirmation_limit(number: int) -> float:
    """Return the e-value that confirms in a layer's probation of a number, counted from 1.

    In one probation without benefit, the e-value reaches a limit L with a probability of at most
    1/L (Ville 1939). The inverses of these limits add up to 1/20 over all probations of a layer.
    """
    return CONFIRMATION_E_VALUE * number * (number + 1)


def sequential_test(
    before: Sequence[FeedbackOutcome],
    since: Sequence[FeedbackOutcome],
    e_value: float = 1.0,
    number: int = 1,
    run: RunFeedback | None = None,
) -> ProbationResult | None:
    """Return the end of a probation, or None while it goes on.

    Args:
        before: Feedback from before the revision was live, oldest first.
        since: Feedback on its own replies, oldest first.
        e_value: The e-value of its lessons.
        number: The number of the probation in its layer since the last confirmation, from 1.
        run: The same feedback, if revisions on probation came before it. None for the first one.
    """
    limit = confirmation_limit(number)
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
    of_run = against
    if run is not None:
        values = [1.0, *withdrawal_e_values(run.before, run.since)]
        of_run = [1.0, *(values[seen] for seen in run.seen)]
    # After each reply, so that the result does not depend on when one looks.
    for outcome in since:
        won += outcome is FeedbackOutcome.WON
        lost += outcome is FeedbackOutcome.LOST
        if outcome not in _COMPARED:
            rated.append(outcome)
        own, whole = against[len(rated)], of_run[len(rated)]
        if (own + whole) / 2 * _comparison_e_value(lost, won) >= CONFIRMATION_E_VALUE:
            if run is not None and whole > own:
                seen = run.since[: run.seen[len(rated) - 1]]
                why = _withdrawal(run.before, seen, lost)
                return ProbationResult(LearnOutcome.WITHDRAWN, why, is_of_run=True)
            return ProbationResult(LearnOutcome.WITHDRAWN, _withdrawal(rated_before, rated, lost))
        if e_value * better[len(rated)] * _comparison_e_value(won, lost) >= limit:
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
