"""Compare the rate of an outcome before and after a change, with a test that may stop at any time.

Outcomes since the change arrive one by one. Each forms a block with a fixed number of outcomes from
before it. Under the null hypothesis of equal rates, the likelihood ratio of a block has mean 1 or
less (Turner, Ly and Grünwald 2021, "Generic E-variables for exact sequential k-sample tests that
allow for optional stopping", eq. 2.4). So the product over blocks reaches 20 with a probability of
at most 1/20, however often one looks (Ville 1939).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

ODDS_RATIO = 4.0
"""The alternative: the odds of the outcome are this many times the odds before."""
NUM_BLOCKS = 60
"""The number of outcomes since the change over which those before it are spread."""
_PRIOR_TRUE, _PRIOR_FALSE = 1.0, 5.0


def rate_increase_e_values(before: Sequence[bool], since: Sequence[bool]) -> list[float]:
    """Return the e-value for a higher rate since the change, after each outcome since.

    Outcomes are oldest first. Once those before are used up, the e-value stays: a change of rate
    cannot be told without something to compare with.
    """
    per_block = max(1, len(before) // NUM_BLOCKS)
    # The newest first: they compare best with what comes next.
    newest_first = before[::-1]
    blocks = [newest_first[at : at + per_block] for at in range(0, len(before), per_block)]
    num_true, num_false = _PRIOR_TRUE, _PRIOR_FALSE
    e_value, e_values = 1.0, []
    for outcome, block in itertools.zip_longest(since, blocks[: len(since)], fillvalue=()):
        if block:
            # The rates of the alternative depend on earlier blocks alone; otherwise the mean of
            # the ratio could exceed 1, and no figure would show it.
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
