"""``training_status`` shows a running learn of any process, and nothing once it ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_makers import FakeTime, correct, open_runtime

from personalpeft import Cancelled, Runtime, TrainingStatus, User
from personalpeft.learning.status import training_status

# Learns until it is killed, and prints a line in the middle of it.
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
    """Run another process that is in the middle of learning for ada."""
    correct(ada)
    command = [sys.executable, "-c", _LEARNS, str(runtime.settings.home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "learning\n"
        yield process
        process.kill()


def test_user_who_does_not_learn_has_no_training_status(ada: User) -> None:
    assert ada.training_status() is None
    correct(ada)
    ada.learn()
    assert ada.training_status() is None


def test_status_shows_layer_and_steps_from_begin_to_end(ada: User) -> None:
    correct(ada)
    seen: list[TrainingStatus | None] = []
    report = ada.learn(progress=lambda stage, done: seen.append(ada.training_status()))
    statuses = [each for each in seen if each is not None]
    assert len(statuses) == len(seen)
    assert list(dict.fromkeys(each.stage for each in statuses)) == [
        "Reading",
        "Learning",
        "Judging",
    ]
    assert {each.layer for each in statuses} == {"style"}
    steps = [each for each in statuses if each.stage == "Learning"]
    assert [each.step for each in steps] == list(range(1, report.steps + 1))
    assert {each.steps for each in steps} == {report.steps}
    assert steps[-1].done == statuses[-1].done == 1
    assert statuses[0].done == 0
    assert {each.since for each in statuses} == {statuses[0].since}


def test_users_who_learn_together_have_separate_statuses(runtime: Runtime, ada: User) -> None:
    bob = runtime.user("bob")
    correct(ada, 6)
    correct(bob, 12)
    steps: dict[str, set[int]] = {"ada": set(), "bob": set()}

    def record_steps(stage: str, done: float) -> None:
        for user in (ada, bob):
            learning = user.training_status()
            if learning is not None and learning.steps:
                steps[user.id].add(learning.steps)

    reports = runtime.learn_many(["ada", "bob"], progress=record_steps)
    assert steps == {report.user: {report.steps} for report in reports}


def test_status_of_a_practice_counts_its_rounds(ada: User) -> None:
    seen: list[TrainingStatus | None] = []
    ada.practice(
        "sums",
        verifier="sums",
        rounds=2,
        progress=lambda stage, done: seen.append(ada.training_status()),
    )
    statuses = [each for each in seen if each is not None and each.stage == "Practicing"]
    assert [(each.layer, each.step, each.steps) for each in statuses] == [
        ("skill.sums", n, 2) for n in (0, 1, 2)
    ]
    assert ada.training_status() is None


def test_stopped_learn_has_no_status(ada: User) -> None:
    correct(ada)
    with pytest.raises(Cancelled):
        ada.learn(cancelled=lambda: True)
    assert ada.training_status() is None


def test_learn_of_another_process_has_a_status_until_it_is_killed(
    ada: User, learner: subprocess.Popen[str], runtime: Runtime
) -> None:
    learning = ada.training_status()
    assert learning is not None
    assert (learning.layer, learning.stage) == ("style", "Learning")
    assert 0 < learning.step < learning.steps
    assert 0.2 < learning.done < 1
    with open_runtime(runtime.settings.home, read_only=True) as other:
        assert other.user("ada", create=False).training_status() == learning
    learner.kill()
    learner.wait()
    assert ada.training_status() is None
    ada.learn()
    assert ada.training_status() is None


@pytest.mark.exhaustive
def test_process_with_the_reused_id_of_a_killed_learner_has_no_status(
    ada: User, learner: subprocess.Popen[str], runtime: Runtime
) -> None:
    learner.kill()
    learner.wait()
    place = runtime.settings.home / "locks" / "learn-ada.holder"
    # This process gets the killed one's id. It is alive, but it began at another time.
    statuses = place.read_text().replace(f'"pid": {learner.pid}', f'"pid": {os.getpid()}')
    place.write_text(statuses)
    assert ada.training_status() is None


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"pid": "x"}', "null", " " * 1024])
def test_unreadable_lease_file_means_no_status(ada: User, runtime: Runtime, damaged: str) -> None:
    (runtime.settings.home / "locks").mkdir(exist_ok=True)
    (runtime.settings.home / "locks" / "learn-ada.holder").write_text(damaged)
    assert ada.training_status() is None


def test_status_uses_the_clock_of_the_home(tmp_path: Path) -> None:
    time = FakeTime()
    with open_runtime(tmp_path / "home", clock=time.clock()) as runtime:
        begun = time.at
        with runtime._services.store.leases.acquire("learn-ada"):
            learning = runtime.user("ada").training_status()
        assert learning is not None
        assert (learning.layer, learning.stage, learning.step, learning.steps) == (None, "", 0, 0)
        assert learning.since >= begun
        assert training_status(runtime._services.store, "ada") is None
