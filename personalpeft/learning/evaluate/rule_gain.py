"""Find the rules that a style layer follows by itself.

A rule stands in every prompt from the next turn on. Once a layer follows it without, the rule in
the prompt does harm: the layer was trained without it, so it moves the model away from what it was
regularised to, general answers above all.

The gain of a rule is what held-out replies become likelier by with the rule in the prompt, in nats
a token. A rule is internalized where it has a gain under the bare base, and under the layer at most
a quarter of that. A rule that has nothing to do with the held-out replies has no gain and stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from personalpeft.types import Revision

MIN_GAIN = 0.05
MAX_REMAINING_SHARE = 0.25
MAX_RULES, MAX_RULE_LESSONS = 3, 6


@dataclass(frozen=True, slots=True)
class RuleGain:
    """The gain of one rule under the bare base and under the layer. The field names are stored."""

    base: float
    layer: float

    @property
    def internalized(self) -> bool:
        return self.base >= MIN_GAIN and self.layer <= MAX_REMAINING_SHARE * self.base


def logprob_gain(plain: Mapping[str, float], with_rule: Mapping[str, float]) -> float:
    """Return the mean gain in log-prob per token of the same lessons by a rule in the prompt."""
    return round(sum(with_rule[key] - plain[key] for key in plain) / len(plain), 4)


def internalized_rules(style: Revision) -> frozenset[str]:
    """Return the rules that a style revision had internalized when it was judged."""
    gains = {rule: RuleGain(**gain) for rule, gain in style.scores.get("rules", {}).items()}
    return frozenset(rule for rule, gain in gains.items() if gain.internalized)
