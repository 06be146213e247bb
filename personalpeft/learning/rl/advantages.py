"""From the rewards of a group of replies to one task to how much likelier each is to be made. Pure.

Each reply is compared with the median of its group (MC-GRPO, Median-Centered Group Relative Policy Optimization): in
groups of four and one, the one in the middle says nothing, and one lucky reply does not turn the other four into bad
ones as a mean would. Several rewards are each set against the group on their own before they are added up (GDPO), so
that the one with the largest spread does not drown the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

# A spread below this counts as this much: what hardly differs is to push hardly.
LEAST_SPREAD = 0.05


def advantages(rewards: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """One number for each reply of a group, above 0 for what is to be said more. ``rewards`` are those of each reply by
    name; all replies have the same names. All are 0 where nothing sets the replies apart.
    """
    if not rewards:
        return ()
    apart = [_against_median([each[name] for each in rewards]) for name in rewards[0]]
    return tuple(sum(column) for column in zip(*apart, strict=True))


def _against_median(values: Sequence[float]) -> tuple[float, ...]:
    middle = median(values)
    spread = fmean((value - middle) ** 2 for value in values) ** 0.5
    return tuple((value - middle) / max(spread, LEAST_SPREAD) for value in values)
