"""Rates at which the gate confirms null learns, keeps harmful ones and finds real ones, by
simulation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
from example_counts import scale
from test_eval_history import REVISION

from personalpeft.learning.gate.evidence import EvalItem, Evidence, ProbeResults, eval_history
from personalpeft.learning.gate.gate import Margins, judge
from personalpeft.types import Revision, Verdict

RUNS = 200
LAYERS = scale(40)
# Each learn reads all earlier ones, so twice as many take four times as long.
LEARNS = min(50, scale(25))
MARGINS = Margins()


@dataclass
class Layer:
    """A layer over many learns.

    Each learn brings held-out lessons whose score changes by ``effect`` plus noise.
    """

    rng: random.Random
    effect: float
    noise: float
    head: Revision | None = None
    num_live: int = 0
    confirmed: bool = False

    def __post_init__(self) -> None:
        self.candidates: list[Revision] = []
        self.held_out: list[str] = []

    def learn(self, num_held_out: int) -> Verdict:
        number = len(self.candidates)
        self.held_out += [f"{number}.{n}" for n in range(num_held_out)]
        history = eval_history([self.head] if self.head else [], "style", self.candidates)
        target, retention = [], []
        for signal in self.held_out:
            change = self.rng.gauss(self.effect, self.noise)
            item = EvalItem(signal, -3.0, -3.0 + change, -3.0)
            (retention if signal in history.decided_items else target).append(item)
        evidence = Evidence(
            tuple(target),
            (),
            (),
            ProbeResults(),
            0.0,
            history.prior_e_value,
            history.spent_items,
            history.decided_items,
        )
        judgement = judge(evidence, MARGINS)
        candidate = replace(
            REVISION,
            scores=evidence.as_json(),
            verdict=judgement.verdict,
            probation=judgement.probation,
            at=REVISION.at + timedelta(number),
        )
        self.candidates.append(candidate)
        if judgement.live:
            self.head = candidate
            self.num_live += 1
            self.confirmed |= not judgement.probation
        return judgement.verdict


def simulate_layers(effect: float, noise: float, num_held_out: int) -> list[Layer]:
    found = []
    for run in range(LAYERS):
        layer = Layer(random.Random(f"{effect} {noise} {num_held_out} {run}"), effect, noise)
        for _ in range(LEARNS):
            layer.learn(num_held_out)
        found.append(layer)
    return found


@pytest.mark.parametrize(
    ("noise", "num_held_out"),
    [
        (0.1, 3),
        *(
            pytest.param(noise, held_out, marks=pytest.mark.exhaustive)
            for noise, held_out in ((0.03, 1), (0.03, 3), (0.1, 1), (0.5, 1), (0.5, 3))
        ),
    ],
)
def test_learns_without_effect_are_confirmed_in_at_most_one_layer_of_twenty(
    noise: float, num_held_out: int
) -> None:
    confirmed = sum(layer.confirmed for layer in simulate_layers(0.0, noise, num_held_out))
    assert confirmed <= 0.05 * LAYERS


@pytest.mark.parametrize(
    ("effect", "noise"),
    [
        (-0.3, 0.3),
        pytest.param(-0.1, 0.1, marks=pytest.mark.exhaustive),
        pytest.param(-1.0, 0.5, marks=pytest.mark.exhaustive),
    ],
)
def test_harmful_learns_are_confirmed_in_at_most_one_layer_of_a_hundred(
    effect: float, noise: float
) -> None:
    confirmed = sum(layer.confirmed for layer in simulate_layers(effect, noise, 3))
    assert confirmed <= 0.01 * LAYERS


@pytest.mark.parametrize("effect", [1.0, 2.0])
def test_learn_of_twelve_edits_with_a_style_effect_goes_live(effect: float) -> None:
    rng = random.Random(f"{effect}")
    live = sum(Layer(rng, effect, 0.3).learn(3) is Verdict.PROMOTED for _ in range(RUNS))
    assert live >= 0.9 * RUNS


def test_noise_below_the_least_effect_seldom_goes_live() -> None:
    rng = random.Random("noise")
    for num_held_out, most in ((1, 0.2), (3, 0.06), (6, 0.03)):
        verdicts = [Layer(rng, 0.0, 0.1).learn(num_held_out) for _ in range(1000)]
        assert verdicts.count(Verdict.PROMOTED) <= most * 1000
