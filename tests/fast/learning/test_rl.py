"""Advantages, task selection and the policy-gradient loss of practice."""

from __future__ import annotations

import random
from statistics import fmean, median

import pytest
from backend_makers import continuation, session_spec
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.backends.base import Backend, Continuation
from personalpeft.learning.rl.loop import rejection_sampling
from personalpeft.learning.rl.rollouts import (
    MIN_SPREAD,
    PolicyGradientLoss,
    TaskPosterior,
    compute_advantages,
    select_tasks,
)
from personalpeft.learning.train.config import RLConfig
from personalpeft.plugins import Task

REWARDS = st.lists(st.floats(0, 1), min_size=1, max_size=9)


def single_reward(values: list[float]) -> list[dict[str, float]]:
    return [{"right": value} for value in values]


@given(values=REWARDS)
def test_advantage_has_the_sign_of_the_distance_from_the_median(values: list[float]) -> None:
    middle = median(values)
    for value, advantage in zip(values, compute_advantages(single_reward(values)), strict=True):
        assert (advantage > 0) == (value > middle)
        assert (advantage < 0) == (value < middle)


def test_one_lucky_reply_in_five_gives_the_others_no_negative_advantage() -> None:
    lucky = compute_advantages(single_reward([0, 0, 1, 0, 0]))
    assert lucky[2] > 0
    assert {each for index, each in enumerate(lucky) if index != 2} == {0.0}


@given(value=st.floats(0, 1), count=st.integers(1, 9))
def test_group_without_spread_has_zero_advantage(value: float, count: int) -> None:
    assert set(compute_advantages(single_reward([value] * count))) == {0.0}


@given(
    rewards=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=9),
)
def test_each_reward_is_normalized_in_its_group_before_the_sum(
    rewards: list[tuple[float, float]],
) -> None:
    both = compute_advantages([{"right": right, "brief": brief} for right, brief in rewards])
    right = compute_advantages(single_reward([each[0] for each in rewards]))
    brief = compute_advantages([{"brief": each[1]} for each in rewards])
    assert both == pytest.approx([a + b for a, b in zip(right, brief, strict=True)])


@given(
    values=st.lists(st.integers(0, 4), min_size=3, max_size=9), size=st.floats(MIN_SPREAD * 10, 1)
)
def test_scale_of_a_reward_does_not_change_the_advantage(values: list[int], size: float) -> None:
    small = compute_advantages(single_reward([size * value / 4 for value in values]))
    if (
        len(set(values)) > 1
        and fmean((v - median(values)) ** 2 for v in values) ** 0.5 * size / 4 > MIN_SPREAD
    ):
        assert small == pytest.approx(
            compute_advantages(single_reward([float(value) for value in values]))
        )


@given(difference=st.floats(1e-6, MIN_SPREAD / 10))
def test_tiny_differences_give_tiny_advantages(difference: float) -> None:
    assert (
        max(map(abs, compute_advantages(single_reward([0.5, 0.5 + difference, 0.5 - difference]))))
        <= 0.11
    )


def posterior(passed: int, failed: int) -> TaskPosterior:
    return TaskPosterior().update(passed, failed)


def test_task_is_solved_or_hopeless_only_when_more_likely_than_not() -> None:
    assert (
        posterior(0, 0).state
        == posterior(5, 0).state
        == posterior(0, 5).state
        == posterior(5, 5).state
        == "open"
    )
    assert posterior(10, 0).state == "solved"
    assert posterior(0, 10).state == "hopeless"
    assert posterior(9, 1).state == posterior(1, 9).state == "open"


@given(passed=st.integers(0, 60), failed=st.integers(0, 60))
def test_posterior_decays_until_the_task_is_open_again(passed: int, failed: int) -> None:
    current = posterior(passed, failed)
    for _ in range(60):
        current = current.decay()
    assert current.state == "open"


@given(passed=st.integers(0, 40), failed=st.integers(0, 40))
def test_solved_and_hopeless_are_symmetric(passed: int, failed: int) -> None:
    mirrored = {"open": "open", "solved": "hopeless", "hopeless": "solved"}
    assert posterior(failed, passed).state == mirrored[posterior(passed, failed).state]


TASKS = [Task(f"t{n}", f"Task {n}.", {}) for n in range(20)]


def test_solved_and_hopeless_tasks_are_skipped_unless_solved_ones_are_requested() -> None:
    posteriors = {"t0": posterior(20, 0), "t1": posterior(0, 20)}
    chosen = {task.id for task in select_tasks(TASKS, posteriors, 20, random.Random(1))}
    assert chosen == {task.id for task in TASKS} - {"t0", "t1"}
    assert "t0" in {
        task.id
        for task in select_tasks(TASKS, posteriors, 20, random.Random(1), train_on_solved=True)
    }
    assert select_tasks(TASKS[:2], posteriors, 20, random.Random(1)) == ()


@given(seed=st.integers(), count=st.integers(1, 20))
def test_selection_depends_on_the_seed_alone_and_has_no_duplicates(seed: int, count: int) -> None:
    posteriors = {"t3": posterior(3, 2)}
    chosen = select_tasks(TASKS, posteriors, count, random.Random(seed))
    assert chosen == select_tasks(TASKS, posteriors, count, random.Random(seed))
    assert len({task.id for task in chosen}) == len(chosen) == count


def test_tasks_that_pass_half_the_time_are_selected_first() -> None:
    posteriors = {task.id: posterior(1, 8) for task in TASKS} | {"t7": posterior(8, 8)}
    first = [
        select_tasks(TASKS[5:10], posteriors, 1, random.Random(seed))[0].id for seed in range(100)
    ]
    assert first.count("t7") > 60


@examples(5)
@given(advantage=st.sampled_from([-2.0, -0.5, 0.5, 2.0]))
def test_policy_gradient_step_follows_the_sign_of_the_advantage(
    torch_tiny: Backend, advantage: float
) -> None:
    reply = continuation(torch_tiny, "Say it.", "Ahoy!")
    session = torch_tiny.session(session_spec(torch_tiny))
    term = PolicyGradientLoss(reply, advantage, max_length=8, beta=0.01)
    session.precompute_ref_log_probs([term])
    first = session.step([term], 1e-2)
    losses = [session.step([term], 1e-2) for _ in range(4)]
    assert losses[-1] < first
    session.close()


def test_large_beta_keeps_the_layer_closer_to_the_stack_below(torch_tiny: Backend) -> None:
    from personalpeft.learning.train.losses import SFTLoss

    likelihoods = []
    reply = continuation(torch_tiny, "Say it.", "Ahoy!")
    for kl in (0.0, 10.0):
        session = torch_tiny.session(session_spec(torch_tiny))
        term = PolicyGradientLoss(reply, 1.0, max_length=8, beta=kl)
        session.precompute_ref_log_probs([term])
        for _ in range(8):
            session.step([term], 1e-2)
        # The SFT loss is the mean negative log-likelihood before the step.
        likelihoods.append(-session.step([SFTLoss(reply)], 0.0))
        session.close()
    assert likelihoods[0] > likelihoods[1]


@given(count=st.integers(0, 30), batch=st.integers(1, 9), repeats=st.integers(1, 5))
def test_rejection_sampling_draws_evenly_from_all_passed_replies(
    count: int, batch: int, repeats: int
) -> None:
    passed = [Continuation((1,), (number,)) for number in range(count)]
    steps = rejection_sampling(
        passed, RLConfig(batch_size=batch, rejection_steps=repeats), random.Random(0)
    )
    assert len(steps) == (repeats if passed else 0)
    for step in steps:
        reply = [term.continuations[0] for term in step]
        assert len(reply) == len(set(reply)) == min(batch, count)
        assert set(reply) <= set(passed)
        assert sum(term.weight for term in step) == pytest.approx(1)  # type: ignore[attr-defined]
