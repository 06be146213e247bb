"""A round of practice: select tasks, sample replies and have them verified, turn rewards into losses.

The pass rate of a task has a Beta posterior with a flat prior. A task is solved when a pass rate
above ``SOLVED_RATE`` is more likely than not. It is hopeless when one below ``HOPELESS_RATE`` is.
Both teach nothing. Counts decay with every step, because the model that made them has changed. So a
skipped task is tried again in time.

Each reward is centred on the median of its group (MC-GRPO). With five replies the median one has no
effect. One lucky reply does not make the other four bad as a mean would. Several rewards are
normalised one by one before they are added (GDPO), so none outweighs the others by its scale.

Invariant: ``RLState`` and the session's weights hold all that the next step depends on. So a
resumed practice gives the same bytes as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import TypeAdapter

from personalpeft.backends.base import Continuation, ModelOutputs
from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import PluginError
from personalpeft.learning.options import Condition, cancelled_error
from personalpeft.learning.train.losses import BaseLoss, SFTLoss
from personalpeft.plugins import RIGHT, Attempt, CheckedVerifier, Task

State: TypeAlias = Literal["open", "solved", "hopeless"]

HOPELESS_RATE = 0.1
SOLVED_RATE = 0.9
DECAY = 0.95

_GRID = (np.arange(1000) + 0.5) / 1000

MIN_SPREAD = 0.05
"""A smaller spread of rewards is taken as this, so that tiny differences push little."""

# Bounds the KL of a token that the stack below finds this many nats likelier.
_MAX_LOG_RATIO = 5.0

PASS_THRESHOLD = 0.99
"""A reply passes from this reward "right" on."""


@dataclass(frozen=True, slots=True)
class TaskPosterior:
    """Decayed counts of the replies to one task that passed and that failed."""

    passed: float = 0.0
    failed: float = 0.0

    def update(self, passed: int, failed: int) -> TaskPosterior:
        """Return it with the replies of one more group."""
        return TaskPosterior(self.passed + passed, self.failed + failed)

    def decay(self) -> TaskPosterior:
        """Return it after one more training step."""
        return TaskPosterior(self.passed * DECAY, self.failed * DECAY)

    @property
    def state(self) -> State:
        density = _GRID**self.passed * (1 - _GRID) ** self.failed
        total = density.sum()
        if density[_GRID > SOLVED_RATE].sum() > total / 2:
            return "solved"
        return "hopeless" if density[_GRID < HOPELESS_RATE].sum() > total / 2 else "open"


UNSEEN = TaskPosterior()


def select_tasks(
    tasks: Sequence[Task],
    posteriors: Mapping[str, TaskPosterior],
    count: int,
    rng: random.Random,
    *,
    train_on_solved: bool = False,
) -> tuple[Task, ...]:
    """Return up to ``count`` tasks, those with the largest expected spread of rewards first.

    For each task a pass rate p is sampled (Thompson sampling). The variance of a reply's success is
    p (1 - p). Hopeless tasks are left out.

    Args:
        tasks: The tasks to select from.
        posteriors: What is known of each task's pass rate, by the task's id.
        count: The most tasks to return.
        rng: The source of randomness.
        train_on_solved: Whether solved tasks may be selected.
    """
    wanted = ("open", "solved") if train_on_solved else ("open",)
    spread = {}
    for task in tasks:
        posterior = posteriors.get(task.id, UNSEEN)
        # Sampled for every task, so that the state of one does not change the draw of another.
        rate = rng.betavariate(1 + posterior.passed, 1 + posterior.failed)
        if posterior.state in wanted:
            spread[task.id] = rate * (1 - rate)
    open_tasks = (task for task in tasks if task.id in spread)
    return tuple(sorted(open_tasks, key=lambda task: -spread[task.id])[:count])


def is_eval_task(task: Task) -> bool:
    """Return whether a task is held out for the gate: a quarter of all are, by their prompt."""
    return derive_seed("judged by", task.prompt) % 4 == 0


def derive_seed(*parts: object) -> int:
    """Return a seed that depends on the parts alone, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True, slots=True)
class Rollout:
    """One reply to a task. ``length`` is a share of the limit."""

    text: str
    reply: Continuation
    length: float
    rewards: Mapping[str, float]

    @property
    def attempt(self) -> Attempt:
        """The reply as a reward shaper sees it."""
        return Attempt(self.rewards[RIGHT], self.rewards[RIGHT] >= PASS_THRESHOLD, self.length)


RolloutGroup: TypeAlias = Sequence[Rollout]
"""All replies to one task in a round."""


def count_passed(group: RolloutGroup) -> int:
    """Return the number of replies that passed."""
    return sum(rollout.attempt.passed for rollout in group)


def sample_rollouts(
    engine: Engine,
    requests: Sequence[tuple[Task, Request]],
    verifier: CheckedVerifier,
    *,
    num_generations: int = 1,
    cancelled: Condition,
    paused: Condition,
) -> list[RolloutGroup]:
    """Generate replies to tasks and verify them. Each has its own seed, so none depends on others.

    Chats of users go first.

    Args:
        engine: Generates the replies.
        requests: The tasks, and how each is asked; the seeds of sampling are replaced.
        verifier: Scores each reply.
        num_generations: How many replies to each task.
        cancelled: Returns whether to stop.
        paused: Returns whether to wait.

    Returns:
        The replies of each task, in the order of ``requests``.

    Raises:
        Cancelled: ``cancelled`` returned True.
        PluginError: The verifier failed.
        PromptTooLong: A task exceeds the base's context.
    """
    # Each task gets its first reply before any second one, so later prompts are cached.
    order = [
        (task, _with_seed(request, task, number))
        for number in range(num_generations)
        for task, request in requests
    ]
    replies = engine.stream(
        [request for _, request in order], cancelled=cancelled, paused=paused
    ).read()
    if any(reply.finish == "cancelled" for reply in replies):
        raise cancelled_error("while sampling")
    rollouts = []
    for (task, request), reply in zip(order, replies, strict=True):
        # The model picked the end of turn too, but no chunk carries it.
        ending = engine.backend.end_of_turn if reply.finish == "stop" else ()
        continuation = Continuation(reply.prompt, (*reply.tokens, *ending))
        length = len(reply.tokens) / request.sampling.max_tokens
        rewards = verifier.verify(task, reply.text)
        rollouts.append(Rollout(reply.text, continuation, length, rewards))
    names = {frozenset(each.rewards) for each in rollouts}
    if len(names) > 1:
        raise PluginError(
            f"The verifier {verifier.name} returned rewards of other names for other replies: "
            f"{', '.join(sorted(set().union(*names)))}.",
            hint="Report it to the plugin's authors. Nothing was changed.",
        )
    return [rollouts[index :: len(requests)] for index in range(len(requests))]


def _with_seed(request: Request, task: Task, number: int) -> Request:
    seed = derive_seed(request.sampling.seed, task.id, number)
    return replace(request, sampling=replace(request.sampling, seed=seed))


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
    columns = [_normalise([each[name] for each in rewards]) for name in rewards[0]]
    return tuple(sum(column) for column in zip(*columns, strict=True))


def _normalise(values: Sequence[float]) -> tuple[float, ...]:
    centre = median(values)
    spread = fmean((value - centre) ** 2 for value in values) ** 0.5
    return tuple((value - centre) / max(spread, MIN_SPREAD) for value in values)


StepLosses: TypeAlias = tuple[SFTLoss | PolicyGradientLoss, ...]
"""The losses of one step."""


@dataclass(slots=True)
class RLState:
    """The state of a practice. The running loop owns it.

    ``passed`` are the different replies that passed, in order of discovery. ``pending`` are the
    remaining steps of the last round.
    """

    posteriors: dict[str, TaskPosterior] = field(default_factory=dict)
    rounds: int = 0
    steps: int = 0
    replies: int = 0
    pass_rates: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    passed: list[Continuation] = field(default_factory=list)
    pending: tuple[StepLosses, ...] = ()

    def record_round(self, tasks: Sequence[Task], groups: Sequence[RolloutGroup]) -> None:
        """Add the replies of one round."""
        for task, group in zip(tasks, groups, strict=True):
            passed_now = count_passed(group)
            posterior = self.posteriors.get(task.id, UNSEEN)
            self.posteriors[task.id] = posterior.update(passed_now, len(group) - passed_now)
        replies = [rollout for group in groups for rollout in group]
        passed = [rollout.reply for rollout in replies if rollout.attempt.passed]
        self.rounds += 1
        self.replies += len(replies)
        self.pass_rates.append(round(len(passed) / len(replies), 4))
        self.lengths.append(round(sum(each.length for each in replies) / len(replies), 4))
        self.passed = list(dict.fromkeys((*self.passed, *passed)))

    def record_step(self) -> None:
        """Remove the step that was made. The counts of the tasks decay."""
        self.steps += 1
        self.pending = self.pending[1:]
        self.posteriors = {task: each.decay() for task, each in self.posteriors.items()}

    def summary(self) -> dict[str, Any]:
        """Return the counts, and pass rate and length by round, as a report stores them."""
        states = [posterior.state for posterior in self.posteriors.values()]
        return {
            "rounds": self.rounds,
            "steps": self.steps,
            "replies": self.replies,
            "tasks": {state: states.count(state) for state in ("open", "solved", "hopeless")},
            "pass_rate": self.pass_rates,
            "length": self.lengths,
        }


STORED_STATE = TypeAdapter(RLState)
"""The state as a checkpoint holds it."""
