"""The benchmark of skills asks the same unseen tasks at each stage, and prints what it measured under the names that the
documentation gives: on the fake base, where the figures themselves mean nothing.
"""

from __future__ import annotations

import json

import pytest
from app_makers import Place
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.skill import DEMONSTRATIONS, FAMILY, _drawn, interval
from personalpeft.learning.rl.rollouts import is_eval_task
from personalpeft.verifiers.reasoning_gym import ReasoningGym

pytestmark = pytest.mark.exhaustive

_SHORT = ("bench", "skill", "--unseen", "20", "--rounds", "1")
_STAGES = ["demonstrations", "rejection sampling", "policy gradient"]


def test_each_stage_is_asked_the_same_number_of_unseen_tasks(place: Place) -> None:
    told = json.loads(place.run(*_SHORT, "--json").stdout)
    assert (told["bench"], told["family"], told["demonstrations"]) == (
        "skill",
        FAMILY,
        DEMONSTRATIONS,
    )
    assert [stage["name"] for stage in told["stages"]] == _STAGES
    assert {told["before"]["asked"], *(stage["unseen"]["asked"] for stage in told["stages"])} == {
        20
    }
    assert {"points_shown", "points_practised"} <= set(told)
    shown = place.run(*_SHORT).stdout
    assert all(name in shown for name in _STAGES)
    assert "95 %" in shown


def test_what_is_asked_is_never_shown_or_practised() -> None:
    shown, asked = _drawn(ReasoningGym(FAMILY), 100)
    assert (len(shown), len(asked)) == (DEMONSTRATIONS, 100)
    assert not {task.prompt for task in shown} & {task.prompt for task in asked}
    assert all(is_eval_task(task) for task in asked)
    assert not any(is_eval_task(task) for task in shown)


def test_a_family_with_too_few_tasks_is_refused(place: Place) -> None:
    result = place.run(*_SHORT, "--family", "coin_flip,min_trials=1,max_trials=1")
    assert result.exit_code == 2
    assert "coin_flip" in result.stderr or "tasks" in result.stderr


@given(asked=st.integers(1, 500), share=st.floats(0, 1))
def test_the_interval_holds_the_rate_and_narrows_with_more_tasks(asked: int, share: float) -> None:
    passed = round(share * asked)
    least, most = interval(passed, asked)
    assert 0 <= least <= passed / asked + 1e-9
    assert passed / asked - 1e-9 <= most <= 1
    wider = interval(4 * passed, 4 * asked)
    assert wider[1] - wider[0] < most - least


def test_the_interval_is_wilsons() -> None:
    # Newcombe 1998, table I: 81 of 263 and 15 of 148.
    assert interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
