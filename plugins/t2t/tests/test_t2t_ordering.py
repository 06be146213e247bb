"""Shaped rewards keep right replies above wrong ones; the pass rate sets the pressure on length."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.plugins import SHAPINGS, Attempt, Plugins, Shaping
from personalpeft_t2t import ThickeningToThinning

STRENGTHS = st.floats(0, 0.5, exclude_max=True)
ATTEMPTS = st.builds(
    lambda passed, length: Attempt(float(passed), passed, length),
    st.booleans(),
    st.floats(0, 1, allow_nan=False),
)
GROUPS = st.lists(ATTEMPTS, min_size=1, max_size=9)


def rate(group: list[Attempt]) -> float:
    return fmean(each.passed for each in group)


@given(strength=STRENGTHS, groups=st.lists(GROUPS, min_size=1, max_size=4))
def test_every_right_reply_outranks_every_wrong_one_within_and_across_groups(
    strength: float, groups: list[list[Attempt]]
) -> None:
    shaping = ThickeningToThinning(strength)
    right, wrong = [], []
    for group in groups:
        for each, reward in zip(group, shaping.shape(group, rate(group)), strict=True):
            (right if each.passed else wrong).append(reward)
    assert not right or not wrong or min(right) > max(wrong)


@given(
    strength=st.floats(0.01, 0.49),
    passed=st.lists(st.booleans(), min_size=1, max_size=9).filter(any),
    length=st.floats(0, 0.5),
    more=st.floats(0.01, 0.5),
)
def test_the_net_pressure_on_length_is_the_strength_times_one_minus_twice_the_pass_rate(
    strength: float, passed: list[bool], length: float, more: float
) -> None:
    shaping = ThickeningToThinning(strength)
    p = fmean(passed)
    short, long = (
        fmean(shaping.shape([Attempt(float(each), each, size) for each in passed], p))
        for size in (length, length + more)
    )
    assert (long - short) / more == pytest.approx(strength * (1 - 2 * p), abs=1e-9)


@given(strength=STRENGTHS, lengths=st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_a_group_without_a_right_reply_has_no_reward_differences(
    strength: float, lengths: list[float]
) -> None:
    group = [Attempt(0.0, False, length) for length in lengths]
    assert set(ThickeningToThinning(strength).shape(group, 0.0)) == {0.0}


@pytest.mark.parametrize("strength", [-0.1, 0.5, 2.0, float("nan")])
def test_a_strength_that_could_invert_the_order_is_refused(strength: float) -> None:
    with pytest.raises(ValueError, match=r"below 0\.5"):
        ThickeningToThinning(strength)


def test_the_plugin_is_found_by_name_and_implements_the_protocol() -> None:
    assert "t2t" in Plugins().names(SHAPINGS)
    found = Plugins().shaping("t2t").shaping
    assert found == ThickeningToThinning()
    assert isinstance(found, Shaping)
