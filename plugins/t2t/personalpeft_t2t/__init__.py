"""Thickening-to-Thinning reward shaping (arXiv 2602.04265) for skills that are practiced.

Let p be the share of a group that passed. Let l be a reply's length divided by the longest. A right
reply is rewarded with 1 - a p l and a wrong one with a (1 - p) l. The net pressure on length in a
group is a (1 - 2p). It favours longer replies while most fail, and shorter ones once most pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from personalpeft.plugins import Attempt


@dataclass(frozen=True, slots=True)
class ThickeningToThinning:
    """``strength`` is a, from 0 to below 0.5, so that right replies are worth more than wrong ones.

    Raises ``ValueError`` for another strength.
    """

    strength: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.strength < 0.5:
            raise ValueError(f"strength must be from 0 to below 0.5, got {self.strength}")

    @property
    def train_on_solved(self) -> bool:
        """Solved tasks are sampled too, because their replies are to become shorter."""
        return True

    def shape(self, attempts: Sequence[Attempt], pass_rate: float) -> tuple[float, ...]:
        """Return the shaped rewards of a group; 0 if all are wrong, since only length counts."""
        if not any(each.passed for each in attempts):
            return (0.0,) * len(attempts)
        a, p = self.strength, pass_rate
        return tuple(
            1 - a * p * each.length if each.passed else a * (1 - p) * each.length
            for each in attempts
        )
