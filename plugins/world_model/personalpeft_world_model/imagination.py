"""Use a world model: check actions, imagine trajectories, and start a skill from what it knows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

from personalpeft import InvalidInput, User
from personalpeft.types import Revision
from personalpeft_world_model.environment import Environment, Outcome, State
from personalpeft_world_model.model import AT_ONCE, WorldModel
from personalpeft_world_model.recording import MAX_STEPS, Policy, run_policy
from personalpeft_world_model.trajectories import Trajectory

IMAGINED = "imagined"


@dataclass
class ImaginedGame:
    """A game inside a world model, from a real first state on.

    ``actions_of`` returns the actions that a state accepts, for policies that choose among them.
    """

    model: WorldModel
    name: str
    task: str
    initial: State
    actions_of: Callable[[State], Sequence[str]] = lambda state: ()

    def __post_init__(self) -> None:
        self._state = self.initial

    def reset(self) -> State:
        """Return the real first state."""
        self._state = self.initial
        return self.initial

    def step(self, action: str) -> State:
        """Return the state that the model expects."""
        expected = self.model.predict(self.task, self._state, action)
        self._state = replace(expected, actions=tuple(self.actions_of(expected)))
        return self._state


def imagine(
    model: WorldModel,
    environments: Sequence[Environment],
    policy: Policy,
    count: int,
    *,
    seed: int,
    max_steps: int = MAX_STEPS,
    actions_of: Callable[[State], Sequence[str]] = lambda state: (),
) -> Iterator[Trajectory]:
    """Yield synthetic trajectories: only the first states are real.

    Several are imagined at a time, and all come out in their order.

    Args:
        model: The world model.
        environments: Where the trajectories begin, by turns.
        policy: What chooses the actions. Several threads call it at once.
        count: How many trajectories.
        seed: Decides what the policy draws.
        max_steps: The most steps of a trajectory.
        actions_of: As for ``ImaginedGame``.
    """

    def play(start: tuple[int, ImaginedGame]) -> Trajectory:
        number, imagined = start
        rng = random.Random(f"{seed} {imagined.name} {number}")
        run = run_policy(imagined, policy, rng, name=IMAGINED, max_steps=max_steps)
        if run.final.outcome is Outcome.UNKNOWN:  # Half a state teaches nothing right.
            run = replace(run, steps=run.steps[:-1])
        return run

    starts = (
        (number, ImaginedGame(model, game.name, game.task, game.reset(), actions_of))
        for number, game in enumerate(islice(cycle(environments), count))
    )
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        yield from pool.map(play, starts)
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass
class Verification:
    """Checks the irreversible actions of an agent before they are taken.

    It is a policy: call it, or give it to ``run_policy``. An action that the model expects to lose
    the game, or whose end it cannot predict, is not taken; the agent is asked again. If it repeats a refused action, another one
    that the state accepts is drawn, and without one the game is given up.

    Attributes:
        model: Predicts what an action does.
        policy: The agent.
        is_irreversible: Returns whether an action needs a check.
        budget: The most checks of a game, 2 to 10 in the paper. Later actions are not checked.
        checks: The checks of this game so far.
    """

    model: WorldModel
    policy: Policy
    is_irreversible: Callable[[str], bool]
    budget: int = 10
    checks: int = 0
    _loses: dict[tuple[str, str, str], bool] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise InvalidInput(
                f"The budget must be 0 or more checks, got {self.budget}.", hint="2 to 10 are best."
            )

    def __call__(self, task: str, state: State, rng: random.Random) -> str | None:
        """Return the agent's action, or another one where the first would lose the game."""
        refused: set[str] = set()
        action = self.policy(task, state, rng)
        while action is not None and self._is_refused(task, state, action):
            refused.add(action)
            action = self.policy(task, state, rng)
            if action in refused:
                others = [each for each in state.actions if each not in refused]
                action = rng.choice(others) if others else None
        return action

    def _is_refused(self, task: str, state: State, action: str) -> bool:
        """Return whether an action may lose. The same one is checked once a game."""
        key = (task, state.text, action)
        if key not in self._loses and self.is_irreversible(action) and self.checks < self.budget:
            self.checks += 1
            expected = self.model.predict(task, state, action).outcome
            self._loses[key] = expected in (Outcome.LOST, Outcome.UNKNOWN)
        return self._loses.get(key, False)


def begins_with(words: Iterable[str]) -> Callable[[str], bool]:
    """Return whether an action begins with one of some words, such as "cook" and "eat"."""
    first = frozenset(words)
    return lambda action: action.partition(" ")[0] in first


def warm_start(model: WorldModel, user: User, skill: str) -> Revision:
    """Begin a skill with what a world model learned, and return its first revision.

    The skill's own demonstrations are then learned on top of it. What the world model forgets, the
    skill forgets too.

    Args:
        model: The world model.
        user: The owner of the skill and of the model.
        skill: A skill without a live revision.

    Raises:
        InvalidInput: The skill has a live revision, or the model belongs to another user.
        NotFound: The model has no live revision.
    """
    layer = f"skill.{skill}"
    if user.id != model.user.id:
        raise InvalidInput(
            f"The world model belongs to {model.user.id}, and a skill of {user.id} would keep what "
            f"{model.user.id} forgets.",
            hint=f"Begin the skill as {model.user.id}.",
        )
    if any(each.name == layer and each.head for each in user.layers()):
        raise InvalidInput(
            f"{layer} has a live revision already.", hint="Roll it back to the base first."
        )
    return model.user.copy_layer(model.layer, layer)
