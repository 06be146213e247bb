"""Measure a world model: exact match, baselines, consistency, and success (arXiv 2512.18832).

- Fidelity: the share of steps of real trajectories whose next state is predicted word for word.
- Baselines: the share of steps that copying the state before would get right. The share whose next
  state was seen before in the same trajectory; no copying can exceed it.
- Consistency: an agent chooses actions inside the model, and they are replayed in the real game.
  Their success is divided by the agent's success in the real game.
- Success: the share of real games that an agent wins. It measures what the model is used for.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from personalpeft_world_model.environment import Environment, Outcome
from personalpeft_world_model.imagination import ImaginedGame
from personalpeft_world_model.model import WorldModel
from personalpeft_world_model.recording import MAX_STEPS, Policy, run_policy
from personalpeft_world_model.trajectories import Trajectory


@dataclass(frozen=True, slots=True)
class Rate:
    """So many of those ``asked``."""

    right: int
    asked: int

    @property
    def value(self) -> float:
        """The share, 0 to 1; 0 where nothing was asked."""
        return self.right / self.asked if self.asked else 0.0

    def __str__(self) -> str:
        return f"{self.value:.1%} ({self.right} of {self.asked})"


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Exact matches on real trajectories: in all, by environment, by number of the step.

    ``copied`` and ``seen`` are the baselines.
    """

    matched: Rate
    copied: Rate
    seen: Rate
    by_environment: Mapping[str, Rate]
    by_step: Mapping[int, Rate]


def measure_fidelity(
    model: WorldModel,
    trajectories: Iterable[Trajectory],
    *,
    progress: Callable[[float], None] = lambda done: None,
) -> Fidelity:
    """Return how well the model predicts the steps of real trajectories.

    Args:
        model: The world model.
        trajectories: Of games that it was not trained on.
        progress: Called with the share that is done, 0 to 1.

    Raises:
        NotFound: The model has no live revision.
    """
    runs = tuple(trajectories)
    steps = [
        (run, number, transition)
        for run in runs
        for number, transition in enumerate(run.transitions, 1)
    ]
    queries = [(each.task, each.before, each.action) for _, _, each in steps]
    predicted = model.predict_many(queries, progress=progress)
    matches = [
        state.written == transition.after.written
        for state, (_, _, transition) in zip(predicted, steps, strict=True)
    ]
    by_environment: dict[str, list[bool]] = defaultdict(list)
    by_step: dict[int, list[bool]] = defaultdict(list)
    for is_match, (run, number, _) in zip(matches, steps, strict=True):
        by_environment[run.environment].append(is_match)
        by_step[number].append(is_match)
    copied, seen = measure_baselines(runs)
    return Fidelity(
        _rate(matches),
        copied,
        seen,
        {name: _rate(some) for name, some in sorted(by_environment.items())},
        {number: _rate(some) for number, some in sorted(by_step.items())},
    )


def measure_baselines(trajectories: Iterable[Trajectory]) -> tuple[Rate, Rate]:
    """Return what copying the state before, and any state seen before, would get right."""
    copied, seen = [], []
    for run in trajectories:
        history = {run.initial.written}
        for transition in run.transitions:
            after = transition.after.written
            copied.append(after == transition.before.written)
            seen.append(after in history)
            history.add(after)
    return _rate(copied), _rate(seen)


@dataclass(frozen=True, slots=True)
class Consistency:
    """Games that an agent wins in reality, and by replaying what it did inside the model."""

    real: Rate
    replayed: Rate

    @property
    def ratio(self) -> float:
        """The consistency ratio: W2R over Real; 0 where the agent wins nothing."""
        return self.replayed.value / self.real.value if self.real.value else 0.0


def measure_consistency(
    model: WorldModel,
    environments: Sequence[Environment],
    policy: Policy,
    *,
    seed: int,
    max_steps: int = MAX_STEPS,
) -> Consistency:
    """Return how consistent the model is for an agent.

    Args:
        model: The world model.
        environments: Games that it was not trained on.
        policy: The agent. It must choose by the task and the text of the state.
        seed: Decides what the agent draws; the same in both.
        max_steps: The most steps of a game.
    """
    real = measure_success(environments, policy, seed=seed, max_steps=max_steps)
    replayed = []
    for number, game in enumerate(environments):
        imagined = ImaginedGame(model, game.name, game.task, game.reset())
        plan = run_policy(imagined, policy, _game_rng(seed, number, game), max_steps=max_steps)
        replayed.append(replay(game, [step.action for step in plan.steps]) is Outcome.WON)
    return Consistency(real, _rate(replayed))


def measure_success(
    environments: Sequence[Environment],
    policy: Policy,
    *,
    seed: int,
    max_steps: int = MAX_STEPS,
) -> Rate:
    """Return how many games an agent wins: a skill, or one whose actions are verified.

    Args:
        environments: The games. Each is played once.
        policy: The agent. A ``Verification`` would count its checks over all games.
        seed: Decides what the agent draws.
        max_steps: The most steps of a game.
    """
    won = [
        run_policy(game, policy, _game_rng(seed, number, game), max_steps=max_steps).final.outcome
        is Outcome.WON
        for number, game in enumerate(environments)
    ]
    return _rate(won)


def replay(environment: Environment, actions: Iterable[str]) -> Outcome:
    """Return how a game ends in which these actions are done."""
    outcome = environment.reset().outcome
    for action in actions:
        if outcome is not Outcome.RUNNING:
            break
        outcome = environment.step(action).outcome
    return outcome


def _game_rng(seed: int, number: int, game: Environment) -> random.Random:
    return random.Random(f"{seed} {number} {game.name}")


def _rate(results: Sequence[bool]) -> Rate:
    return Rate(sum(results), len(results))
