"""The included verifiers: right answers pass, wrong ones fail, and a seed determines the tasks."""

from __future__ import annotations

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from personalpeft import InvalidInput, NotFound
from personalpeft.plugins import VERIFIERS, CheckedVerifier, Plugins


@pytest.fixture(
    params=[("sums", ""), ("sums", "2"), ("reasoning-gym", "chain_sum,max_terms=2,max_digits=1")]
)
def verifier(request: pytest.FixtureRequest) -> CheckedVerifier:
    name, family = request.param
    if name == "reasoning-gym":
        pytest.importorskip("reasoning_gym")
    return Plugins().verifier(name, family)


def test_included_verifiers_are_installed_like_plugins() -> None:
    assert {"sums", "reasoning-gym"} <= set(Plugins().names(VERIFIERS))


def test_right_answer_passes_alone_or_in_a_sentence_and_a_wrong_one_fails(
    verifier: CheckedVerifier,
) -> None:
    for task in verifier.tasks(7, 20):
        answer = str(task.about["answer"])
        assert verifier.verify(task, answer)["right"] == 1.0
        assert verifier.verify(task, f"The answer is {answer}.")["right"] == 1.0
        assert verifier.verify(task, str(int(answer) + 1))["right"] < 0.99
        assert verifier.verify(task, "")["right"] < 0.99
        assert verifier.verify(task, "I do not know.")["right"] < 0.99


def test_seed_determines_the_tasks(verifier: CheckedVerifier) -> None:
    assert verifier.tasks(1, 8) == verifier.tasks(1, 8)
    assert verifier.tasks(1, 8) != verifier.tasks(2, 8)


SUMS = Plugins().verifier("sums")


@examples(20)
@given(seed=st.integers(0, 2**31), count=st.integers(0, 400))
def test_sums_are_distinct_and_as_many_as_requested(seed: int, count: int) -> None:
    tasks = SUMS.tasks(seed, count)
    assert len({task.prompt for task in tasks}) == len(tasks) == min(count, 200)


def test_unknown_family_or_setting_lists_the_existing_ones() -> None:
    with pytest.raises(InvalidInput, match="'9' digits") as wrong:
        Plugins().verifier("sums", "9")
    assert wrong.value.hint
    pytest.importorskip("reasoning_gym")
    with pytest.raises(NotFound, match="'chain_sun'") as missing:
        Plugins().verifier("reasoning-gym", "chain_sun")
    assert "chain_sum" in missing.value.hint
    for family in ("chain_sum,max_terms=0", "chain_sum,nonsense=1", "chain_sum,max_terms"):
        with pytest.raises(InvalidInput) as wrong:
            Plugins().verifier("reasoning-gym", family)
        assert wrong.value.hint
