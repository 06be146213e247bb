"""The included verifiers: right answers pass, wrong ones fail, and a seed determines the tasks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from personalpeft import InvalidInput, MissingPackage, NotFound, PluginError
from personalpeft.plugins import VERIFIERS, Attempt, CheckedVerifier, Plugins, Task


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


@pytest.mark.exhaustive
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


@pytest.mark.parametrize("family", ["prime_factorization", "boxnet", "game_of_life"])
def test_reply_that_a_scorer_cannot_read_is_wrong(family: str) -> None:
    pytest.importorskip("reasoning_gym")
    verifier = Plugins().verifier("reasoning-gym", family)
    (task,) = verifier.tasks(1, 1)
    for reply in ("I do not know.", '{"a": [1]}', "7", "[1]"):
        assert verifier.verify(task, reply)["right"] < 0.1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")
@pytest.mark.parametrize("family", ["chain_sum,min_terms=30000000,max_terms=30000000"])
def test_tasks_without_end_stop_at_a_limit_and_the_next_ones_are_made(family: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(InvalidInput, match="chain_sum") as refused:
        Plugins().verifier("reasoning-gym", family).tasks(1, 50)
    assert refused.value.hint
    assert len(Plugins().verifier("reasoning-gym", "chain_sum").tasks(1, 3)) == 3


UNSAFE = (
    "binary_matrix coin_flip countdown intermediate_integration n_queens polynomial_multiplication "
    "propositional_logic puzzle24 rubiks_cube rush_hour simple_integration spiral_matrix "
    "string_insertion"
)


@pytest.mark.parametrize("family", [*UNSAFE.split(), "string_insertion,min_string_length=6"])
def test_families_that_run_the_reply_or_may_never_score_it_are_refused(family: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(InvalidInput, match=family.split(",")[0]) as refused:
        Plugins().verifier("reasoning-gym", family)
    assert refused.value.hint


def test_scorers_of_another_version_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr("personalpeft.verifiers.reasoning_gym.version", lambda _: "0.1.26")
    with pytest.raises(MissingPackage, match="is installed") as refused:
        Plugins().verifier("reasoning-gym", "chain_sum")
    assert refused.value.hint


@pytest.mark.exhaustive
def test_no_offered_scorer_runs_a_reply() -> None:
    """A new interpreter, since an audit hook cannot be removed. Scorers may run their own tasks."""
    pytest.importorskip("reasoning_gym")
    program = f"""
import sys
from personalpeft.plugins import Plugins
from reasoning_gym.factory import DATASETS
ran = []
sys.addaudithook(lambda event, what: event == "compile" and ran.append(str(what[0])))
for family in sorted(set(DATASETS) - set({UNSAFE!r}.split()) - {{"composite"}}):
    verifier = Plugins().verifier("reasoning-gym", family)
    task = verifier.tasks(1, 1)[0]
    for reply in ("7654321 + 1", "[7654321]", "F+7654321", "7654321 - x"):
        verifier.verify(task, reply)
assert not [text for text in ran if "7654321" in text], ran
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_verifier_that_exits_ends_as_a_plugin_error() -> None:
    class Exiting:
        def tasks(self, seed: int, count: int) -> list[Task]:
            return []

        def verify(self, task: Task, reply: str) -> float:
            sys.exit(3)

    with pytest.raises(PluginError, match="SystemExit"):
        Plugins().verifier(Exiting()).verify(Task("1", "?", {}), "!")


@pytest.mark.parametrize(
    "tasks",
    [
        [Task("1", "half a \ud800 pair", {})],
        [Task("\ud800", "What is 1 + 1?", {})],
        [Task(("a", object()), "What is 1 + 1?", {})],  # type: ignore[arg-type]
        [Task("1", "What is 1 + 1?", {}), Task("1", "What is 2 + 2?", {})],
    ],
)
def test_tasks_that_cannot_be_stored_end_as_a_plugin_error(tasks: list[Task]) -> None:
    class Setting:
        def tasks(self, seed: int, count: int) -> list[Task]:
            return tasks

        def verify(self, task: Task, reply: str) -> float:
            return 1.0

    with pytest.raises(PluginError):
        Plugins().verifier(Setting()).tasks(0, 4)


@pytest.mark.parametrize("reward", [10**400, float("nan"), "1", None, {"brief": 1.0}])
def test_reward_that_is_none_ends_as_a_plugin_error(reward: Any) -> None:
    class Judging:
        def tasks(self, seed: int, count: int) -> list[Task]:
            return []

        def verify(self, task: Task, reply: str) -> Any:
            return reward

    with pytest.raises(PluginError):
        Plugins().verifier(Judging()).verify(Task("1", "What is 1 + 1?", {}), "2")


class Shaping:
    def __init__(self, reward: float, error: Exception | None = None) -> None:
        self._reward, self._error = reward, error

    @property
    def train_on_solved(self) -> bool:
        if self._error:
            raise self._error
        return False

    def shape(self, attempts: Sequence[Attempt], pass_rate: float) -> list[float]:
        return [self._reward] * len(attempts)


@pytest.mark.parametrize("reward", [10**400, 1e200, float("inf")])
def test_shaped_reward_that_training_could_not_square_ends_as_a_plugin_error(
    reward: float,
) -> None:
    shaping = Plugins().shaping(Shaping(reward))
    with pytest.raises(PluginError):
        shaping.shape([Attempt(1.0, True, 0.5)], 1.0)


def test_property_of_a_shaping_that_fails_ends_as_a_plugin_error() -> None:
    with pytest.raises(PluginError):
        _ = Plugins().shaping(Shaping(1.0, RuntimeError("a bug"))).train_on_solved
