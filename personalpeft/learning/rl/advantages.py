"""Turns the rewards of a group of replies into advantages and the policy-gradient loss. Pure.

Each reward is centred on the median of its group (MC-GRPO): with five replies the median one has no
effect, and one lucky reply does not make the other four bad as a mean would. Several rewards are
normalised one by one before they are added (GDPO), so that the widest does not drown the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from personalpeft.backends.base import Continuation, ModelOutputs
from personalpeft.learning.rl.rollouts import RolloutGroup
from personalpeft.learning.train.config import RLConfig
from personalpeft.learning.train.losses import BaseLoss
from personalpeft.plugins import RIGHT, CheckedRewardShaper

MIN_SPREAD = 0.05
"""A smaller spread of rewards is taken as this, so that tiny differences push little."""

# Bounds the KL of a token that the stack below finds this many nats likelier.
_MAX_LOG_RATIO = 5.0


@dataclass(frozen=True, slots=True)
class PolicyGradientLoss(BaseLoss):
    """Policy gradient of one reply (Williams 1992) with a KL penalty from the stack below.

    ``(beta * sum(KL) - advantage * sum(log p)) / max_length``. The reply was sampled from this very
    model, so there is no importance ratio. KL is estimator k3 of Schulman (2020, "Approximating KL
    divergence"). Dividing by a constant, not by the reply's length, keeps long replies from being
    forgiven their mistakes (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783).
    """

    reply: Continuation
    advantage: float
    max_length: int
    beta: float
    weight: float = 1.0

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.reply,)

    def loss(self, outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> Any:
        log_probs = outputs[0].token_logp
        log_ratio = (references[0].token_logp - log_probs).clamp(max=_MAX_LOG_RATIO)
        kl = (log_ratio.exp() - log_ratio - 1).sum()
        objective = self.beta * kl - self.advantage * log_probs.sum()
        return self.weight * objective / self.max_length


def compute_advantages(rewards: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """Return the advantage of each reply of a group; all are 0 if no reward tells them apart.

    All replies have rewards of the same names.
    """
    if not rewards:
        return ()
    columns = [_normalise([each[name] for each in rewards]) for name in rewards[0]]
    return tuple(sum(column) for column in zip(*columns, strict=True))


def _normalise(values: Sequence[float]) -> tuple[float, ...]:
    centre = median(values)
    spread = fmean((value - centre) ** 2 for value in values) ** 0.5
    return tuple((value - centre) / max(spread, MIN_SPREAD) for value in values)


def policy_gradient_step(
    groups: Sequence[RolloutGroup], shaping: CheckedRewardShaper | None, config: RLConfig
) -> tuple[PolicyGradientLoss, ...]:
    """Return the losses of a round: one for each reply whose advantage is not 0."""
    used: list[tuple[Continuation, float]] = []
    for group in groups:
        rewards = [dict(rollout.rewards) for rollout in group.rollouts]
        if shaping is not None:
            attempts = [rollout.attempt for rollout in group.rollouts]
            shaped = shaping.shape(attempts, group.pass_rate)
            for each, reward in zip(rewards, shaped, strict=True):
                each[RIGHT] = reward
        advantages = zip(group.rollouts, compute_advantages(rewards), strict=True)
        used += [(rollout.reply, advantage) for rollout, advantage in advantages if advantage]
    return tuple(
        PolicyGradientLoss(
            reply, advantage, config.max_completion_length, config.beta, 1 / len(used)
        )
        for reply, advantage in used
    )
