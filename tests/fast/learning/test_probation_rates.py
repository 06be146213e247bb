"""Rates at which feedback withdraws or confirms a revision, by simulation.

The docs promise them.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from example_counts import all_cases
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.learning.gate.probation import (
    MIN_HISTORY,
    FeedbackOutcome,
    RunFeedback,
    rate_increase_e_values,
    sequential_test,
)

LIKED, DISLIKED, CORRECTED = (
    FeedbackOutcome.LIKED,
    FeedbackOutcome.DISLIKED,
    FeedbackOutcome.CORRECTED,
)
RUNS = 400
REPLIES = 60


def draw(
    rng: random.Random, count: int, disliked: float, corrected: float
) -> list[FeedbackOutcome]:
    weights = (disliked, corrected, 1 - disliked - corrected)
    return rng.choices((DISLIKED, CORRECTED, LIKED), weights, k=count)


def simulate(
    before: tuple[float, float], since: tuple[float, float], history: int
) -> Counter[str | None]:
    """Return how many of the simulated probations ended in each way within the replies."""
    rng = random.Random(f"{before} {since} {history}")
    found: Counter[str | None] = Counter()
    for _ in range(RUNS):
        result = sequential_test(draw(rng, history, *before), draw(rng, REPLIES, *since))
        found[str(result.outcome) if result else None] += 1
    return found


def test_revision_that_raises_dislikes_from_10_to_30_percent_is_withdrawn() -> None:
    found = simulate((0.1, 0.1), (0.3, 0.1), 200)
    assert found["withdrawn"] >= 0.75 * RUNS
    assert found["confirmed"] <= 0.05 * RUNS


@pytest.mark.parametrize("history", [MIN_HISTORY, 60, 200])
@pytest.mark.parametrize(
    "rates", [(0.1, 0.1), (0.3, 0.3), (0.6, 0.2), (0.0, 1.0), (0.05, 0.9)], ids=str
)
def test_revision_as_good_as_before_is_seldom_withdrawn_or_confirmed(
    history: int, rates: tuple[float, float]
) -> None:
    found = simulate(rates, rates, history)
    assert found["withdrawn"] <= 0.05 * RUNS
    assert found["confirmed"] <= 0.05 * RUNS


def simulate_nightly(since: float, history: int, each: int) -> int:
    """Return how many runs of revisions, with ``each`` rated replies a revision, are withdrawn."""
    rng = random.Random(f"{since} {history} {each}")
    withdrawn = 0
    for _ in range(RUNS):
        before, replies = draw(rng, history, 0.1, 0.1), draw(rng, REPLIES, since, 0.1)
        for first in range(0, REPLIES, each):
            seen = range(first + 1, first + each + 1)
            run = RunFeedback(before, replies[: first + each], seen) if first else None
            own = replies[first : first + each]
            result = sequential_test([*before, *replies[:first]], own, run=run)
            if result is not None and result.outcome == "withdrawn":
                withdrawn += 1
                break
    return withdrawn


@pytest.mark.parametrize("each", all_cases([2, 6, 20], usual=[6]))
def test_learns_in_between_do_not_reset_the_evidence_against_a_run(each: int) -> None:
    assert simulate_nightly(0.3, 200, each) >= 0.7 * RUNS
    assert simulate_nightly(0.1, 200, each) <= 0.05 * RUNS


@pytest.mark.parametrize("history", [0, 5, 19])
@pytest.mark.parametrize("rates", [(0.0, 1.0), (0.1, 0.5), (0.2, 0.2)], ids=str)
def test_little_history_policy_spares_users_who_dislike_a_fifth_or_less(
    history: int, rates: tuple[float, float]
) -> None:
    assert simulate(rates, rates, history)["withdrawn"] <= 0.05 * RUNS


@pytest.mark.parametrize("history", [5, MIN_HISTORY, 60, 200])
def test_revision_whose_replies_are_all_disliked_is_withdrawn_soon(history: int) -> None:
    result = sequential_test([LIKED] * history, [DISLIKED] * 12)
    assert result is not None
    assert result.outcome == "withdrawn"


@given(
    before=st.lists(st.booleans(), max_size=130),
    since=st.lists(st.booleans(), max_size=8),
    rate=st.floats(0.01, 0.99),
)
def test_e_value_is_a_supermartingale_where_the_rates_are_equal(
    before: list[bool], since: list[bool], rate: float
) -> None:
    """Given the past, the mean e-value over the outcomes of the next block is at most 1."""
    per_block = max(1, len(before) // 60)
    used = per_block * len(since)
    if used + per_block > len(before):
        return
    # Newest first: the next block comes before the used ones.
    at = len(before) - used - per_block
    now = rate_increase_e_values(before, since)[-1] if since else 1.0
    mean = 0.0
    for block in range(2**per_block):
        bits = [bool(block >> n & 1) for n in range(per_block)]
        drawn = [*before[:at], *bits, *before[at + per_block :]]
        chance = rate ** sum(bits) * (1 - rate) ** (per_block - sum(bits))
        for outcome in (True, False):
            likelihood = chance * (rate if outcome else 1 - rate)
            mean += likelihood * rate_increase_e_values(drawn, [*since, outcome])[-1]
    assert mean <= now * (1 + 1e-9)
