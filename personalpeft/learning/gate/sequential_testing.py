"""Decide by feedback whether a revision is worse, or better, than what was before. Pure.

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
from dataclasses import dataclass
from enum import StrEnum

from personalpeft.learning.gate.evidence import (
    CONFIRMATION_E_VALUE,
    IMPROVED_FACTOR,
    REGRESSED_FACTOR,
)
from personalpeft.learning.outcomes import LearnOutcome, Reason, ReasonCode, reason

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
    of_run = against if run is None else _run_e_values(run)
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


def _run_e_values(run: RunFeedback) -> list[float]:
    """Return the e-value against a run before and after each rated reply of the live revision."""
    values = [1.0, *withdrawal_e_values(run.before, run.since)]
    return [1.0, *(values[seen] for seen in run.seen)]


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
