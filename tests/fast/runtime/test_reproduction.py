"""A revision can be built again from the ledger, to check it and to repair a home."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import (
    ask,
    correct,
    greedy,
    home_contents,
    home_unchanged,
    open_runtime,
    python_environment,
    quick_card,
    style,
)

from personalpeft import (
    Busy,
    Cancelled,
    Forgotten,
    HomeError,
    NotFound,
    Runtime,
    User,
    file_system,
)
from personalpeft.adapters.types import LoRAWeights
from personalpeft.backends.fake import FakeSession
from personalpeft.learning.outcomes import ReproductionOutcome
from personalpeft.types import Revision


@pytest.fixture(params=["fake", "torch"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    if request.param == "fake":
        return "fake"
    request.getfixturevalue("tiny_base")
    return quick_card(tmp_path)


@pytest.fixture
def runtime(home: Path, base: str | Path) -> Iterator[Runtime]:
    with open_runtime(home, base) as runtime:
        yield runtime


@pytest.fixture
def fake_runtime(home: Path) -> Iterator[Runtime]:
    with open_runtime(home) as runtime:
        yield runtime


@pytest.fixture
def fake_ada(fake_runtime: Runtime) -> User:
    return fake_runtime.user("ada")


def remember_dog(user: User) -> str:
    questions = ["What is my dog called?", "What is the name of my dog?", "Who is my dog?"]
    return user.remember("My dog is called Biscuit.", questions=questions, answer="Biscuit")


def learn_all(user: User) -> tuple[Revision, ...]:
    """Learn a style, a fact above it, and more of the style on the first."""
    signals = correct(user, 5)
    remember_dog(user)
    user.learn(accept=True)
    correct(user, 3, first=20)
    user.retract(signals[0])
    user.learn("style", accept=True)
    return user.revisions()


def test_each_revision_comes_out_equal_in_a_home_that_cannot_be_written(home: Path) -> None:
    with open_runtime(home) as runtime:
        revisions = learn_all(runtime.user("ada"))
    assert {each.layer for each in revisions} == {"style", "memory"}
    assert any(each.below for each in revisions)
    with home_unchanged(home), open_runtime(home, read_only=True) as reader:
        ada = reader.user("ada", create=False)
        reports = [ada.reproduce(each.id) for each in revisions]
    for report in reports:
        assert report.outcome is ReproductionOutcome.EQUAL, str(report)
        assert report.equal
        assert report.same_inputs
        assert report.reproduced == report.digest
        assert report.recorded == report.here
        assert report.as_json()["equal"] is True
        assert "EQUAL" in str(report)


def test_revision_on_a_parent_comes_out_equal_and_its_lost_file_comes_back(
    runtime: Runtime, home: Path
) -> None:
    ada = runtime.user("ada")
    correct(ada, 5)
    ada.learn(accept=True)
    correct(ada, 3, first=20)
    ada.learn(accept=True)
    _, second = ada.revisions()
    assert second.parent
    assert ada.reproduce(second.id).equal
    lose(home, second)
    assert [each.revision for each in runtime.repair().repaired] == [second.id]
    assert runtime.verify() == ()


def test_what_came_later_or_meanwhile_plays_no_part(fake_ada: User) -> None:
    correct(fake_ada, 5)
    reply = ask(fake_ada, "question 1")

    def interrupt(stage: str, done: float) -> None:
        if stage == "Learning" and done == 1.0:
            fake_ada.feedback(reply, edit=style("Something else."))
            remember_dog(fake_ada)

    first = fake_ada.learn(progress=interrupt)
    assert first.revision
    fake_ada.retract(*(s.id for s in fake_ada.signals() if s.kind == "edit"))
    assert fake_ada.reproduce(first.revision).equal


def test_fact_without_an_answer_comes_out_equal_after_it_was_retracted(fake_ada: User) -> None:
    fact = fake_ada.remember("My dog is called amber birch cloud dune ember fern.")
    remember_dog(fake_ada)
    for number in range(3):
        reply = ask(fake_ada, f"What is my dog called, number {number}?")
        fake_ada.feedback(reply, rating=1)
    report = fake_ada.learn("memory", accept=True)
    assert report.revision
    fake_ada.retract_item(fact)
    assert fake_ada.reproduce(report.revision).equal


def test_inputs_of_a_memory_name_facts_that_are_only_looked_up(tmp_path: Path) -> None:
    """They choose which questions the layer is taught not to answer."""
    inputs = []
    for name in ("without", "with"):
        with open_runtime(tmp_path / name) as runtime:
            ada = runtime.user("ada")
            if name == "with":
                ada.remember("The capital of my land is Wolkenheim.")
            remember_dog(ada)
            ada.learn("memory", accept=True)
            inputs.append(ada.revisions()[0].inputs)
    assert inputs[0] != inputs[1]


@pytest.mark.exhaustive
def test_imported_revision_cannot_be_reproduced(fake_ada: User, tmp_path: Path) -> None:
    correct(fake_ada, 5)
    fake_ada.learn()
    fake_ada.export_peft(tmp_path / "peft")
    imported = fake_ada.import_peft(tmp_path / "peft", layer="skill.other")
    report = fake_ada.reproduce(imported.id)
    assert report.outcome is ReproductionOutcome.IMPORTED
    assert not report.equal
    assert report.reproduced is None


def test_what_training_was_withdrawn_from_is_not_trained_on_again(fake_ada: User) -> None:
    signals = correct(fake_ada, 5)
    revision = fake_ada.learn().revision
    assert revision
    fake_ada.retract(signals[0], training_only=True)
    assert fake_ada.reproduce(revision).outcome is ReproductionOutcome.TRAINING_FORBIDDEN


def test_missing_input_is_named(fake_ada: User, home: Path) -> None:
    correct(fake_ada, 5)
    fake_ada.learn()
    below = fake_ada.stack().entries[0]
    remember_dog(fake_ada)
    memory = fake_ada.learn("memory", accept=True).revision
    assert memory
    (home / "blobs" / below.digest[:2] / below.digest).unlink()
    report = fake_ada.reproduce(memory)
    assert report.outcome is ReproductionOutcome.INPUTS_MISSING
    assert below.revision in str(report)


def test_unknown_forgotten_and_cancelled_raise(fake_ada: User) -> None:
    signals = correct(fake_ada, 5)
    revision = fake_ada.learn().revision
    assert revision
    with pytest.raises(NotFound):
        fake_ada.reproduce("style@nowhere")
    with pytest.raises(Cancelled):
        fake_ada.reproduce(revision, cancelled=lambda: True)
    fake_ada.forget(signals[0], rebuild=False)
    with pytest.raises(Forgotten):
        fake_ada.reproduce(revision)


@pytest.mark.exhaustive
def test_other_rounding_is_reported_with_how_near_it_came(
    home: Path, tmp_path: Path, tiny_base: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_runtime(home, quick_card(tmp_path)) as runtime:
        correct(runtime.user("ada"), 5)
        revision = runtime.user("ada").learn(accept=True).revision
        assert revision
    monkeypatch.setenv("PERSONALPEFT_KERNELS", "plain")
    with open_runtime(home, quick_card(tmp_path)) as runtime:
        report = runtime.user("ada").reproduce(revision)
    assert report.outcome is ReproductionOutcome.DIFFERENT
    assert report.same_inputs
    assert report.closeness is not None
    assert 0 < report.closeness.distance < 0.5
    assert report.closeness.cosine > 0.9
    assert "instruction sets" in [name for name, _, _ in report.differences]
    assert "how near" in str(report)


def lose(home: Path, revision: Revision, how: str = "missing") -> None:
    path = home / "blobs" / revision.digest[:2] / revision.digest
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(b"x" + path.read_bytes()[1:])


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["missing", "changed"])
def test_lost_files_are_built_again_in_the_order_of_the_builds(home: Path, how: str) -> None:
    with open_runtime(home) as runtime:
        revisions = learn_all(runtime.user("ada"))
        answers = greedy(runtime.user("ada"))
        contents = home_contents(home)
        assert runtime.repair().repaired == ()
    for each in revisions:
        lose(home, each, how)
    with open_runtime(home) as runtime:
        assert len(runtime.verify()) == len(revisions)
        report = runtime.repair()
        assert {each.revision for each in report.repaired} == {each.id for each in revisions}
        assert report.unrepaired == report.problems == ()
        assert "REPAIRED" in str(report)
        assert greedy(runtime.user("ada")) == answers
    # The turns of ``greedy`` are new.
    assert home_contents(home)[1] == contents[1]


def test_what_does_not_come_out_equal_is_not_replaced(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        ada.learn()
        head = ada.revisions()[0]
        lose(home, head)
        contents = home_contents(home)
        # Another version, whose builds give other bytes.
        monkeypatch.setattr(FakeSession, "weights", halved(FakeSession.weights))
        report = runtime.repair()
        assert [each.outcome for each in report.unrepaired] == [ReproductionOutcome.DIFFERENT]
        assert report.live == {f"ada/{head.id}"}
        assert "rollback style" in str(report)
        assert "from-scratch" in str(report)
        assert len(report.problems) == 1
        assert home_contents(home) == contents
        assert ada.layers()[0].head == head.id


def test_lost_file_of_an_import_is_reported(
    fake_ada: User, fake_runtime: Runtime, home: Path, tmp_path: Path
) -> None:
    correct(fake_ada, 5)
    fake_ada.learn()
    fake_ada.export_peft(tmp_path / "peft")
    lose(home, fake_ada.import_peft(tmp_path / "peft", layer="skill.other"))
    report = fake_runtime.repair()
    assert [each.outcome for each in report.unrepaired] == [ReproductionOutcome.IMPORTED]
    assert len(report.problems) == 1


@pytest.mark.exhaustive
def test_repair_that_is_killed_or_finds_no_room_leaves_a_valid_home_and_can_be_repeated(
    home: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_runtime(home) as runtime:
        correct(runtime.user("ada"), 5)
        runtime.user("ada").learn()
        (revision,) = runtime.user("ada").revisions()
    lose(home, revision)
    code = """
import os, sys, personalpeft
from personalpeft import file_system
file_system.replace = lambda source, target: os.kill(os.getpid(), 9)
with personalpeft.open(sys.argv[1], backend="fake") as runtime:
    runtime.repair()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(home)], env=python_environment(shared_cache), check=False
    )
    assert done.returncode == -9
    assert [*home.rglob("*.part")]
    with open_runtime(home) as runtime:
        assert any("missing" in each.fault for each in runtime.verify())

        def full(source: Path, target: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(file_system, "replace", full)
            with pytest.raises(HomeError):
                runtime.repair()
        assert not [*home.rglob("*.part")]
        report = runtime.repair()
        assert len(report.repaired) == 1
        assert report.problems == runtime.verify() == ()


@pytest.mark.exhaustive
def test_user_who_learns_keeps_others_from_reproducing_it(home: Path) -> None:
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        ada.learn()
        lose(home, ada.revisions()[0])
        with runtime._services.store.leases.acquire("learn-ada"), pytest.raises(Busy):
            runtime.repair()


def halved(weights: Callable[[Any], Mapping[str, LoRAWeights]]) -> Callable[[Any], Any]:
    def half(session: Any) -> dict[str, LoRAWeights]:
        return {name: LoRAWeights(p.a, p.b / 2) for name, p in weights(session).items()}

    return half
