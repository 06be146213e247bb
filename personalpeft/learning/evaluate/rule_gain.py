"""Rules that a style has taken over. A rule is said in every prompt from the next turn on; once a layer answers in that way
by itself, saying it as well does harm: the layer was trained without it, so what lies in the prompt takes the model away
from what it was held to, general answers above all.

What a rule explains of the answers held back, in nats a token, is what they become likelier by where it is heard. It is taken
over where it explained something to the bare base, and to the layer at most a quarter of that. A rule that the answers held
back say nothing of explains nothing to either, so it stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from personalpeft.types import Revision

MIN_GAIN = 0.05
MAX_REMAINING_SHARE = 0.25
MOST_RULES, MOST_LESSONS = 3, 6


@dataclass(frozen=True, slots=True)
class RuleGain:
    """What one rule explains to the bare base and to the layer."""

    base: float
    layer: float

    @property
    def internalized(self) -> bool:
        return self.base >= MIN_GAIN and self.layer <= MAX_REMAINING_SHARE * self.base


def logprob_gain(plain: Mapping[str, float], heard: Mapping[str, float]) -> float:
    """What a rule explains: the mean log-prob a token of the same lessons where it is ``heard``, less that where it is not."""
    return round(sum(heard[key] - plain[key] for key in plain) / len(plain), 4)


def internalized_rules(style: Revision) -> frozenset[str]:
    """The rules that a style was found to have taken over when it was judged."""
    found: Mapping[str, Mapping[str, Any]] = style.scores.get("rules", {})
    return frozenset(
        rule for rule, said in found.items() if RuleGain(said["base"], said["layer"]).internalized
    )
