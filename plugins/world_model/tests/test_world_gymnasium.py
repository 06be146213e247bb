"""Gymnasium's text environments are recorded like any other."""

from __future__ import annotations

import pytest

from personalpeft import InvalidInput
from personalpeft_world_model import Outcome, record
from personalpeft_world_model.gymnasium_texts import GymnasiumGame

pytest.importorskip("gymnasium", reason="needs the extra [gymnasium]")


def lake(seed: int = 0) -> GymnasiumGame:
    return GymnasiumGame("FrozenLake-v1", seed, is_slippery=False)


def test_a_state_shows_where_the_player_is() -> None:
    game = lake()
    assert game.reset().text.splitlines()[0] == "[S]FFF"
    assert game.step("right").text.splitlines()[0] == "S[F]FF"
    assert game.step("down").outcome is Outcome.LOST


def test_the_goal_is_a_success() -> None:
    game = lake()
    game.reset()
    for action in ("down", "down", "right", "right", "down"):
        assert game.step(action).outcome is Outcome.RUNNING
    assert game.step("right").written.endswith("[SUCCESS]")


def test_the_goal_is_a_success_where_its_reward_is_a_cost() -> None:
    game = GymnasiumGame("CliffWalking-v1", 0)
    game.reset()
    for action in ("up", *["right"] * 11):
        assert game.step(action).outcome is Outcome.RUNNING
    assert game.step("down").outcome is Outcome.WON


def test_a_time_limit_is_no_loss() -> None:
    game = GymnasiumGame("FrozenLake-v1", 0, is_slippery=False, max_episode_steps=2)
    game.reset()
    assert [game.step("up").outcome for _ in range(2)] == [Outcome.RUNNING] * 2


def test_recordings_repeat() -> None:
    first, second = (
        [run.to_chat() for run in record([lake()], seed=5, steps=30)] for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GymnasiumGame("NoSuchLake-v1", 0), "NoSuchLake"),
        (lambda: GymnasiumGame("FrozenLake-v1", 0, actions=["left"]), "names"),
        (lambda: lake().step("jump"), "'jump'"),
    ],
)
def test_a_wrong_name_is_an_error(make: object, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        make()  # type: ignore[operator]
