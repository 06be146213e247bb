"""Gymnasium's text environments are recorded like any other."""

from __future__ import annotations

import re

import pytest

from personalpeft import InvalidInput
from personalpeft_world_model import Outcome, record
from personalpeft_world_model.gymnasium_texts import GymnasiumGame

gymnasium = pytest.importorskip("gymnasium", reason="needs the extra [gymnasium]")


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


@pytest.mark.exhaustive
def test_different_states_of_a_taxi_have_different_texts() -> None:
    (taxi,) = (name for name in gymnasium.registry if name.startswith("Taxi-"))
    itself = gymnasium.make(taxi)
    numbers: dict[str, set[int]] = {}
    for seed in range(200):
        number, _ = itself.reset(seed=seed)
        numbers.setdefault(GymnasiumGame(taxi, seed).reset().text, set()).add(number)
    assert len(numbers) > 100
    assert all(len(each) == 1 for each in numbers.values())
    states = "".join(numbers)
    assert {"(R)", "<R>", "[R]", "<[R]>", "([R])"} <= set(re.findall(r"[(<\[]+R[)>\]]+", states))
    assert "\x1b" not in states


def test_a_taxi_with_its_passenger_has_a_sign_of_its_own() -> None:
    (taxi,) = (name for name in gymnasium.registry if name.startswith("Taxi-"))
    games = (GymnasiumGame(taxi, seed) for seed in range(200))
    game = next(each for each in games if "([" in each.reset().text)
    assert re.search(r"\{[RGYB]\}", game.step("pick up").text)


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
