"""Gymnasium's text environments (FrozenLake, Taxi, CliffWalking): what they draw as text.

Discrete actions have names, in the order of their numbers. What is coloured stands in brackets: the
player in ``[]``. In Taxi the passenger is in ``()``, the destination in ``<>``, and a taxi with the
passenger in ``{}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from personalpeft import InvalidInput, MissingPackage
from personalpeft_world_model.environment import Outcome, State

ACTION_NAMES: Mapping[str, Sequence[str]] = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pick up", "drop off"),
}
# In CliffWalking each step costs 1, the last one too, and only the goal ends it.
_IS_WON: Mapping[str, Callable[[float], bool]] = {"CliffWalking": lambda reward: True}
# By code of the colour. Taxi needs them all, or different states would have the same text.
_SIGNS = {"34": ("(", ")"), "35": ("<", ">"), "42": ("{", "}")}
# Without another one inside: what has several colours is replaced from the inside out.
_COLOURED = re.compile(r"\x1b\[([0-9]+)[0-9;]*m([^\x1b]*)\x1b\[0m")


class GymnasiumGame:
    """One environment of Gymnasium that can be drawn as text.

    Args:
        env_id: Its id, such as "FrozenLake-v1".
        seed: Decides its first state.
        actions: The names of its actions; known for the environments of ``ACTION_NAMES``.
        is_won: Returns whether the reward of the last step means success. By default a positive one
            does; in CliffWalking any. A time limit is neither success nor failure.
        options: What ``gymnasium.make`` takes, such as ``is_slippery=False``.

    Raises:
        MissingPackage: Gymnasium is not installed.
        InvalidInput: There is no such environment, or its actions are not discrete or have no names.
    """

    def __init__(
        self,
        env_id: str,
        seed: int,
        *,
        actions: Sequence[str] | None = None,
        is_won: Callable[[float], bool] | None = None,
        **options: Any,
    ) -> None:
        try:
            import gymnasium
        except ImportError as error:
            raise MissingPackage(
                "Its environments need the package gymnasium.",
                hint="pip install 'personalpeft-world-model[gymnasium]'",
            ) from error
        try:
            self._game = gymnasium.make(env_id, render_mode="ansi", **options)
        except (gymnasium.error.Error, TypeError) as error:
            raise InvalidInput(
                f"{env_id} cannot be made as text: {error}.",
                hint=f"Text environments are {', '.join(ACTION_NAMES)}.",
            ) from error
        kind = env_id.partition("-")[0]
        self.name, self.task = f"{env_id}-{seed}", f"{kind}."
        self._seed = seed
        self._is_won = is_won or _IS_WON.get(kind, lambda reward: reward > 0)
        names = actions or ACTION_NAMES.get(kind, ())
        if len(names) != getattr(self._game.action_space, "n", None):
            raise InvalidInput(
                f"The actions of {env_id} need names: {self._game.action_space}.",
                hint="Give a name for each number: actions=[...]",
            )
        self._numbers = {name: number for number, name in enumerate(names)}

    def reset(self) -> State:
        """Restart, and return the first state. The seed decides it."""
        self._game.reset(seed=self._seed)
        return self._state(Outcome.RUNNING)

    def step(self, action: str) -> State:
        """Do an action, and return the next state. Raises ``InvalidInput`` for an unknown one."""
        if action not in self._numbers:
            raise InvalidInput(
                f"There is no action {action!a}.", hint=f"Choose one of {', '.join(self._numbers)}."
            )
        _, reward, is_over, _, _ = self._game.step(self._numbers[action])
        won = self._is_won(float(reward))
        return self._state((Outcome.WON if won else Outcome.LOST) if is_over else Outcome.RUNNING)

    def _state(self, outcome: Outcome) -> State:
        drawn = str(self._game.render())
        # The first line of some names the last action. It is no part of the state.
        grid = [line for line in drawn.splitlines() if not re.fullmatch(r"\s*\(.*\)\s*", line)]
        text, found = "\n".join(grid), 1
        while found:
            text, found = _COLOURED.subn(_with_sign, text)
        return State(text, outcome, tuple(self._numbers))


def _with_sign(found: re.Match[str]) -> str:
    before, after = _SIGNS.get(found[1], ("[", "]"))
    return f"{before}{found[2]}{after}"
