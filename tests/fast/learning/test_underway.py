"""What is being learned now is told while it is learned, by whatever program, and no longer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_makers import Time, correct, opened

from personalpeft import Cancelled, Runtime, TrainingStatus, User
from personalpeft.learning.training_status import training_status

# Learns until it is ended, and says so when it is in the middle of it.
_LEARNS = """
import sys, time
import personalpeft
def heard(stage, done):
    if stage == "Learning" and done > 0.2:
        print("learning", flush=True)
        time.sleep(60)
with personalpeft.open(sys.argv[1], backend="fake") as runtime:
    runtime.user("ada").learn(progress=heard)
"""


@pytest.fixture
def learner(runtime: Runtime, ada: User) -> Iterator[subprocess.Popen[str]]:
    """Another program that is in the middle of learning for ada."""
    correct(ada)
    command = [sys.executable, "-c", _LEARNS, str(runtime.settings.home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "learning\n"
        yield process
        process.kill()


def test_nothing_is_being_learned_of_who_does_not_learn(ada: User) -> None:
    assert ada.training_status() is None
    correct(ada)
    ada.learn()
    assert ada.training_status() is None


def test_a_learn_tells_its_layer_and_its_steps_from_its_beginning_to_its_end(ada: User) -> None:
    correct(ada)
    seen: list[TrainingStatus | None] = []
    report = ada.learn(progress=lambda stage, done: seen.append(ada.training_status()))
    told = [each for each in seen if each is not None]
    assert len(told) == len(seen)
    assert list(dict.fromkeys(each.stage for each in told)) == ["Reading", "Learning", "Judging"]
    assert {each.layer for each in told} == {"style"}
    steps = [each for each in told if each.stage == "Learning"]
    assert [each.step for each in steps] == list(range(1, report.steps + 1))
    assert {each.steps for each in steps} == {report.steps}
    assert steps[-1].done == told[-1].done == 1
    assert told[0].done == 0
    assert {each.since for each in told} == {told[0].since}


def test_each_of_several_who_learn_together_is_told_of_alone(runtime: Runtime, ada: User) -> None:
    bob = runtime.user("bob")
    correct(ada, 6)
    correct(bob, 12)
    steps: dict[str, set[int]] = {"ada": set(), "bob": set()}

    def heard(stage: str, done: float) -> None:
        for user in (ada, bob):
            learning = user.training_status()
            if learning is not None and learning.steps:
                steps[user.id].add(learning.steps)

    reports = runtime.learn_many(["ada", "bob"], progress=heard)
    assert steps == {report.user: {report.steps} for report in reports}


def test_a_practice_tells_its_rounds(ada: User) -> None:
    seen: list[TrainingStatus | None] = []
    ada.practice(
        "sums",
        verifier="sums",
        rounds=2,
        progress=lambda stage, done: seen.append(ada.training_status()),
    )
    told = [each for each in seen if each is not None and each.stage == "Practising"]
    assert [(each.layer, each.step, each.steps) for each in told] == [
        ("skill.sums", n, 2) for n in (0, 1, 2)
    ]
    assert ada.training_status() is None


def test_a_learn_that_was_stopped_is_not_told_of_any_more(ada: User) -> None:
    correct(ada)
    with pytest.raises(Cancelled):
        ada.learn(cancelled=lambda: True)
    assert ada.training_status() is None


def test_what_another_program_learns_is_told_until_it_is_killed(
    ada: User, learner: subprocess.Popen[str], runtime: Runtime
) -> None:
    learning = ada.training_status()
    assert learning is not None
    assert (learning.layer, learning.stage) == ("style", "Learning")
    assert 0 < learning.step < learning.steps
    assert 0.2 < learning.done < 1
    with opened(runtime.settings.home, read_only=True) as other:
        assert other.user("ada", create=False).training_status() == learning
    learner.kill()
    learner.wait()
    assert ada.training_status() is None
    ada.learn()
    assert ada.training_status() is None


def test_a_process_that_got_the_number_of_a_killed_learner_is_not_taken_for_it(
    ada: User, learner: subprocess.Popen[str], runtime: Runtime
) -> None:
    learner.kill()
    learner.wait()
    place = runtime.settings.home / "locks" / "learn-ada.holder"
    # As if this very process had that number: it is alive, and began at another time.
    told = place.read_text().replace(f'"pid": {learner.pid}', f'"pid": {os.getpid()}')
    place.write_text(told)
    assert ada.training_status() is None


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"pid": "x"}', "null", " " * 1024])
def test_what_stands_beside_a_lease_and_cannot_be_read_is_nothing(
    ada: User, runtime: Runtime, damaged: str
) -> None:
    (runtime.settings.home / "locks").mkdir(exist_ok=True)
    (runtime.settings.home / "locks" / "learn-ada.holder").write_text(damaged)
    assert ada.training_status() is None


def test_since_is_by_the_clock_of_the_home(tmp_path: Path) -> None:
    time = Time()
    with opened(tmp_path / "home", clock=time.clock()) as runtime:
        begun = time.at
        with runtime._services.store.leases.acquire("learn-ada"):
            learning = runtime.user("ada").training_status()
        assert learning is not None
        assert (learning.layer, learning.stage, learning.step, learning.steps) == (None, "", 0, 0)
        assert learning.since >= begun
        assert training_status(runtime._services.store, "ada") is None
