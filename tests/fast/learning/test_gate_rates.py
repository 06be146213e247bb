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
from personalpeft.learning.gate.probation import FeedbackOutcome, sequential_test
from personalpeft.types import Revision, Verdict

RUNS = 200
LAYERS = scale(40)
# Each learn reads all earlier ones, so twice as many take four times as long.
LEARNS = min(50, scale(25))
MARGINS = Margins()
LIKED, DISLIKED, CORRECTED = (
    FeedbackOutcome.LIKED,
    FeedbackOutcome.DISLIKED,
    FeedbackOutcome.CORRECTED,
)


@dataclass
class Layer:
    """A layer over many learns.

    Each learn brings held-out lessons whose score changes by ``effect`` plus noise. Lessons of one
    learn share a part of the noise, since one candidate scores them: ``correlation`` is its share
    of the variance.
    """

    rng: random.Random
    effect: float
    noise: float
    correlation: float = 0.2
    head: Revision | None = None
    num_live: int = 0
    confirmed: bool = False
    confirmed_by_feedback: bool = False

    def __post_init__(self) -> None:
        self.candidates: list[Revision] = []
        self.held_out: list[str] = []
        self.feedback = self.rate(100)

    def rate(self, count: int) -> list[FeedbackOutcome]:
        """Return feedback on replies, of which as many are liked whatever is live."""
        return self.rng.choices((DISLIKED, CORRECTED, LIKED), (0.2, 0.3, 0.5), k=count)

    def review(self, num_replies: int) -> None:
        """Rate replies of the revision that went live last."""
        assert self.head is not None
        since = self.rate(num_replies)
        e_value = self.head.scores["e_value"]
        result = sequential_test(self.feedback, since, e_value, self.num_live)
        self.confirmed_by_feedback |= result is not None and result.outcome == "confirmed"
        self.feedback += since

    def learn(self, num_held_out: int) -> Verdict:
        number = len(self.candidates)
        self.held_out += [f"{number}.{n}" for n in range(num_held_out)]
        history = eval_history([self.head] if self.head else [], "style", self.candidates)
        undecided, retention = [], []
        shared = self.rng.gauss(self.effect, self.noise * self.correlation**0.5)
        for signal in self.held_out:
            change = self.rng.gauss(shared, self.noise * (1 - self.correlation) ** 0.5)
            item = EvalItem(signal, -3.0, -3.0 + change, -3.0)
            (retention if signal in history.decided_items else undecided).append(item)
        evidence = Evidence(tuple(undecided), (), (), ProbeResults(), 0.0, history)
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


def simulate_layers(
    effect: float,
    noise: float,
    num_held_out: int,
    correlation: float = 0.2,
    num_layers: int = LAYERS,
) -> list[Layer]:
    found = []
    for run in range(num_layers):
        rng = random.Random(f"{effect} {noise} {num_held_out} {correlation} {run}")
        layer = Layer(rng, effect, noise, correlation)
        for _ in range(LEARNS):
            layer.learn(num_held_out)
        found.append(layer)
    return found


@pytest.mark.parametrize(
    ("noise", "num_held_out", "correlation"),
    [
        (0.1, 3, 0.2),
        *(
            pytest.param(noise, held_out, correlation, marks=pytest.mark.exhaustive)
            for noise, held_out in ((0.03, 1), (0.03, 3), (0.1, 1), (0.5, 1), (0.5, 3), (0.1, 6))
            for correlation in (0.0, 0.2)
        ),
    ],
)
def test_learns_without_effect_are_confirmed_in_at_most_one_layer_of_twenty(
    noise: float, num_held_out: int, correlation: float
) -> None:
    layers = simulate_layers(0.0, noise, num_held_out, correlation)
    assert sum(layer.confirmed for layer in layers) <= 0.05 * LAYERS


@pytest.mark.exhaustive
def test_held_out_lessons_that_always_move_together_confirm_in_one_layer_of_twenty() -> None:
    layers = simulate_layers(0.0, 0.1, 6, 1.0, num_layers=5 * LAYERS)
    assert sum(layer.confirmed for layer in layers) <= 0.05 * len(layers)


@pytest.mark.parametrize(
    ("noise", "num_replies"),
    [(0.5, 20), *(pytest.param(n, 60, marks=pytest.mark.exhaustive) for n in (0.1, 0.5))],
)
def test_learns_without_effect_are_seldom_confirmed_by_feedback_after_each_of_them(
    noise: float, num_replies: int
) -> None:
    confirmed = 0
    for run in range(LAYERS):
        layer = Layer(random.Random(f"{noise} {num_replies} {run}"), 0.0, noise)
        for _ in range(LEARNS):
            num_live = layer.num_live
            layer.learn(3)
            if layer.confirmed or layer.confirmed_by_feedback:
                confirmed += 1
                break
            if layer.num_live > num_live:
                layer.review(num_replies)
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
    for num_held_out, most in ((1, 0.2), (3, 0.1), (6, 0.06)):
        verdicts = [Layer(rng, 0.0, 0.1).learn(num_held_out) for _ in range(RUNS)]
        assert verdicts.count(Verdict.PROMOTED) <= most * RUNS


@pytest.mark.parametrize("loss", [-0.1, -2.5])
def test_candidate_that_made_one_of_few_held_out_lessons_worse_does_not_go_live(
    loss: float,
) -> None:
    changes = [0.9] * 8 + [loss]
    items = tuple(EvalItem(str(n), -3.0, -3.0 + each, -3.0) for n, each in enumerate(changes))
    seen = Evidence(items, (), (), ProbeResults(), 0.0)
    assert judge(seen, MARGINS).verdict is Verdict.ABSTAINED
    # Of twenty, one is a tenth or less.
    more = tuple(EvalItem(f"more {n}", -3.0, -2.0, -3.0) for n in range(11))
    assert judge(replace(seen, undecided=(*items, *more)), MARGINS).probation
