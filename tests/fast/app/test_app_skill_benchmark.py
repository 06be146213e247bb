"""The skill benchmark asks the same unseen tasks at each stage.

It runs on the fake base, so its figures mean nothing.
"""

from __future__ import annotations

import json

import pytest
from app_makers import Shell
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.skill import DEMONSTRATIONS, FAMILY, _drawn, interval
from personalpeft.learning.rl.rollouts import is_eval_task
from personalpeft.verifiers.reasoning_gym import ReasoningGym

pytestmark = pytest.mark.exhaustive

_SHORT = ("bench", "skill", "--unseen", "20", "--rounds", "1")
_STAGES = ["demonstrations", "rejection sampling", "policy gradient"]


def test_each_stage_answers_the_same_number_of_unseen_tasks(shell: Shell) -> None:
    told = json.loads(shell.run(*_SHORT, "--json").stdout)
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
    shown = shell.run(*_SHORT).stdout
    assert all(name in shown for name in _STAGES)
    assert "95 %" in shown


def test_evaluation_tasks_are_never_demonstrated_or_trained_on() -> None:
    shown, tasks = _drawn(ReasoningGym(FAMILY), 100)
    assert (len(shown), len(tasks)) == (DEMONSTRATIONS, 100)
    assert not {task.prompt for task in shown} & {task.prompt for task in tasks}
    assert all(is_eval_task(task) for task in tasks)
    assert not any(is_eval_task(task) for task in shown)


def test_a_family_with_too_few_tasks_is_refused(shell: Shell) -> None:
    result = shell.run(*_SHORT, "--family", "coin_flip,min_trials=1,max_trials=1")
    assert result.exit_code == 2
    assert "coin_flip" in result.stderr or "tasks" in result.stderr


@given(tasks=st.integers(1, 500), share=st.floats(0, 1))
def test_the_interval_contains_the_rate_and_narrows_with_more_tasks(
    tasks: int, share: float
) -> None:
    passed = round(share * tasks)
    least, most = interval(passed, tasks)
    assert 0 <= least <= passed / tasks + 1e-9
    assert passed / tasks - 1e-9 <= most <= 1
    wider = interval(4 * passed, 4 * tasks)
    assert wider[1] - wider[0] < most - least


def test_the_interval_is_wilsons() -> None:
    # Newcombe 1998, table I: 81 of 263 and 15 of 148.
    assert interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
