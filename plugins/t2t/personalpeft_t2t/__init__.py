"""Thickening-to-Thinning reward shaping (arXiv 2602.04265) for skills that are practised.

With p the share of a group that passed and l the length of a reply as a share of the longest, a right reply is rewarded
with 1 - a p l and a wrong one with a (1 - p) l. The net pressure on length in a group is a (1 - 2p): while most replies
fail, longer ones are encouraged, to find a way; once most pass, shorter ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from personalpeft.plugins import Attempt


@dataclass(frozen=True, slots=True)
class ThickeningToThinning:
    """``strength`` is a, from 0 to below 0.5: so every right reply is worth more than every wrong one, whatever their
    lengths and groups. Raises ``ValueError`` for another.
    """

    strength: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.strength < 0.5:
            raise ValueError(f"a strength of {self.strength} is not from 0 to below 0.5")

    @property
    def train_on_solved(self) -> bool:
        """Solved tasks are sampled too, because their replies are to become shorter."""
        return True

    def shape(self, attempts: Sequence[Attempt], pass_rate: float) -> tuple[float, ...]:
        """The shaped rewards of a group. Nothing where all are wrong: there, length alone would be rewarded."""
        if not any(each.passed for each in attempts):
            return (0.0,) * len(attempts)
        a, p = self.strength, pass_rate
        return tuple(
            1 - a * p * each.length if each.passed else a * (1 - p) * each.length
            for each in attempts
        )
