"""The numbers of practice: what a reply is worth, which task comes next, and what the objective does to a model."""

from __future__ import annotations

import random
from statistics import fmean, median

import pytest
from backend_makers import after, spec
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.backends.base import Backend, Continuation
from personalpeft.learning.rl.advantages import MIN_SPREAD, PolicyGradientLoss, compute_advantages
from personalpeft.learning.rl.loop import rejection_sampling
from personalpeft.learning.rl.rollouts import TaskPosterior, select_tasks
from personalpeft.learning.train.config import RLConfig
from personalpeft.plugins import Task

REWARDS = st.lists(st.floats(0, 1), min_size=1, max_size=9)


def one(values: list[float]) -> list[dict[str, float]]:
    return [{"right": value} for value in values]


@given(values=REWARDS)
def test_what_is_above_the_median_is_said_more_and_what_is_below_less(values: list[float]) -> None:
    middle = median(values)
    for value, advantage in zip(values, compute_advantages(one(values)), strict=True):
        assert (advantage > 0) == (value > middle)
        assert (advantage < 0) == (value < middle)


def test_in_a_group_of_four_and_one_a_lucky_reply_makes_no_bad_ones_of_the_others() -> None:
    lucky = compute_advantages(one([0, 0, 1, 0, 0]))
    assert lucky[2] > 0
    assert {each for index, each in enumerate(lucky) if index != 2} == {0.0}


@given(value=st.floats(0, 1), count=st.integers(1, 9))
def test_a_group_without_spread_says_nothing(value: float, count: int) -> None:
    assert set(compute_advantages(one([value] * count))) == {0.0}


@given(
    rewards=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=9),
)
def test_several_rewards_are_each_set_against_the_group_before_they_are_added(
    rewards: list[tuple[float, float]],
) -> None:
    both = compute_advantages([{"right": right, "brief": brief} for right, brief in rewards])
    right = compute_advantages(one([each[0] for each in rewards]))
    brief = compute_advantages([{"brief": each[1]} for each in rewards])
    assert both == pytest.approx([a + b for a, b in zip(right, brief, strict=True)])


@given(
    values=st.lists(st.integers(0, 4), min_size=3, max_size=9), size=st.floats(MIN_SPREAD * 10, 1)
)
def test_how_large_a_reward_is_does_not_decide_how_much_it_counts(
    values: list[int], size: float
) -> None:
    small = compute_advantages(one([size * value / 4 for value in values]))
    if (
        len(set(values)) > 1
        and fmean((v - median(values)) ** 2 for v in values) ** 0.5 * size / 4 > MIN_SPREAD
    ):
        assert small == pytest.approx(compute_advantages(one([float(value) for value in values])))


@given(difference=st.floats(1e-6, MIN_SPREAD / 10))
def test_what_hardly_differs_pushes_hardly(difference: float) -> None:
    assert max(map(abs, compute_advantages(one([0.5, 0.5 + difference, 0.5 - difference])))) <= 0.11


def seen(passed: int, failed: int) -> TaskPosterior:
    return TaskPosterior().update(passed, failed)


def test_a_task_is_solved_or_hopeless_once_that_is_more_likely_than_not_and_one_group_does_not_show_it() -> (
    None
):
    assert seen(0, 0).state == seen(5, 0).state == seen(0, 5).state == seen(5, 5).state == "open"
    assert seen(10, 0).state == "solved"
    assert seen(0, 10).state == "hopeless"
    assert seen(9, 1).state == seen(1, 9).state == "open"


@given(passed=st.integers(0, 60), failed=st.integers(0, 60))
def test_what_was_seen_fades_until_the_task_is_open_again(passed: int, failed: int) -> None:
    standing = seen(passed, failed)
    for _ in range(60):
        standing = standing.decay()
    assert standing.state == "open"


@given(passed=st.integers(0, 40), failed=st.integers(0, 40))
def test_solved_and_hopeless_are_mirrored(passed: int, failed: int) -> None:
    mirrored = {"open": "open", "solved": "hopeless", "hopeless": "solved"}
    assert seen(failed, passed).state == mirrored[seen(passed, failed).state]


TASKS = [Task(f"t{n}", f"Task {n}.", {}) for n in range(20)]


def test_solved_and_hopeless_tasks_are_skipped_and_solved_ones_only_where_nothing_is_to_be_said_of_them() -> (
    None
):
    standings = {"t0": seen(20, 0), "t1": seen(0, 20)}
    chosen = {task.id for task in select_tasks(TASKS, standings, 20, random.Random(1))}
    assert chosen == {task.id for task in TASKS} - {"t0", "t1"}
    assert "t0" in {
        task.id
        for task in select_tasks(TASKS, standings, 20, random.Random(1), train_on_solved=True)
    }
    assert select_tasks(TASKS[:2], standings, 20, random.Random(1)) == ()


@given(seed=st.integers(), count=st.integers(1, 20))
def test_a_choice_is_named_by_its_seed_and_has_no_task_twice(seed: int, count: int) -> None:
    standings = {"t3": seen(3, 2)}
    chosen = select_tasks(TASKS, standings, count, random.Random(seed))
    assert chosen == select_tasks(TASKS, standings, count, random.Random(seed))
    assert len({task.id for task in chosen}) == len(chosen) == count


def test_tasks_that_pass_half_the_time_come_first_more_often_than_those_that_nearly_never_do() -> (
    None
):
    standings = {task.id: seen(1, 8) for task in TASKS} | {"t7": seen(8, 8)}
    first = [
        select_tasks(TASKS[5:10], standings, 1, random.Random(seed))[0].id for seed in range(100)
    ]
    assert first.count("t7") > 60


@examples(5)
@given(advantage=st.sampled_from([-2.0, -0.5, 0.5, 2.0]))
def test_a_step_makes_what_went_well_likelier_and_what_went_badly_less(
    torch_tiny: Backend, advantage: float
) -> None:
    said = after(torch_tiny, "Say it.", "Ahoy!")
    session = torch_tiny.session(spec(torch_tiny))
    term = PolicyGradientLoss(said, advantage, max_length=8, beta=0.01)
    session.precompute_ref_log_probs([term])
    first = session.step([term], 1e-2)
    losses = [session.step([term], 1e-2) for _ in range(4)]
    assert losses[-1] < first
    session.close()


def test_held_firmly_to_what_lies_below_it_moves_less(torch_tiny: Backend) -> None:
    from personalpeft.learning.train.losses import SFTLoss

    likelihoods = []
    said = after(torch_tiny, "Say it.", "Ahoy!")
    for kl in (0.0, 10.0):
        session = torch_tiny.session(spec(torch_tiny))
        term = PolicyGradientLoss(said, 1.0, max_length=8, beta=kl)
        session.precompute_ref_log_probs([term])
        for _ in range(8):
            session.step([term], 1e-2)
        # The loss of this term is the mean negative log-likelihood, read before the step.
        likelihoods.append(-session.step([SFTLoss(said)], 0.0))
        session.close()
    assert likelihoods[0] > likelihoods[1]


@given(count=st.integers(0, 30), batch=st.integers(1, 9), repeats=st.integers(1, 5))
def test_imitation_draws_from_all_that_has_passed_and_weighs_it_alike(
    count: int, batch: int, repeats: int
) -> None:
    passed = [Continuation((1,), (number,)) for number in range(count)]
    steps = rejection_sampling(
        passed, RLConfig(batch_size=batch, rejection_steps=repeats), random.Random(0)
    )
    assert len(steps) == (repeats if passed else 0)
    for step in steps:
        said = [term.continuations[0] for term in step]
        assert len(said) == len(set(said)) == min(batch, count)
        assert set(said) <= set(passed)
        assert sum(term.weight for term in step) == pytest.approx(1)  # type: ignore[attr-defined]
