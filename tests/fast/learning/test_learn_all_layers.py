"""A learn goes through all layers from the lowest up.

Layers on a changed stack are revalidated, and rebuilt where they no longer hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import correct, home_unchanged, open_runtime, style

from personalpeft import Cancelled, LearnReport, NothingToLearn, User
from personalpeft.learning import learner
from personalpeft.learning.gate import gate
from personalpeft.learning.gate.gate import Judgement
from personalpeft.learning.outcomes import LearnOutcome, Reason, ReasonCode, reason, text_reason
from personalpeft.learning.report import from_json
from personalpeft.types import Stack, Verdict


@pytest.fixture(scope="module")
def learned_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("learned") / "home"
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        correct(ada, 6)
        teach(ada, 6)
        report = ada.learn()
        assert [each.live for each in (report, *report.above)] == [True, True]
    return home


@pytest.fixture
def layered(learned_home: Path, ada: User) -> User:
    """Return a user whose style and skill are both live."""
    return ada


def checked(valid: int, asked: int) -> Reason:
    return reason(ReasonCode.STACK_BELOW_CHECKED, valid=valid, asked=asked)


def teach(user: User, count: int, *, first: int = 0, skill: str = "email") -> None:
    for number in range(first, first + count):
        user.teach(f"Write to {number}.", f"Dear {number}", skill=skill)


def layers(report: LearnReport) -> list[str]:
    return [each.layer for each in (report, *report.above)]


def heads(user: User) -> Mapping[str, str]:
    return {entry.layer: entry.revision for entry in user.stack().entries}


def test_learn_trains_all_new_lessons_from_the_lowest_layer_up(ada: User) -> None:
    teach(ada, 5, skill="sql")
    correct(ada, 5)
    teach(ada, 5)
    report = ada.learn()
    assert layers(report) == ["style", "skill.sql", "skill.email"]
    assert [entry.layer for entry in ada.stack().entries] == layers(report)
    built = {revision.layer: revision for revision in ada.revisions()}
    assert built["skill.email"].below == ada.stack().entries[:1]
    assert [from_json(each).layer for each in ada.reports()] == layers(report)
    with pytest.raises(NothingToLearn):
        ada.learn()


def test_first_report_includes_the_reports_of_all_layers(layered: User) -> None:
    correct(layered, 4, first=20)
    teach(layered, 4, first=20)
    report = layered.learn()
    assert all(f"ada · {layer}" in str(report) for layer in ("style", "skill.email"))
    assert from_json(report.as_json()).as_json() == report.as_json()


def test_naming_a_layer_learns_it_alone_and_revalidates_those_above(
    layered: User,
) -> None:
    before = heads(layered)
    correct(layered, 4, first=20)
    teach(layered, 4, first=20)
    report = layered.learn("style")
    assert layers(report) == ["style", "skill.email"]
    again = report.above[0]
    assert (again.outcome, again.revision) == (LearnOutcome.UNCHANGED, before["skill.email"])
    assert again.verdict is None
    assert [each.code for each in again.reasons] == [ReasonCode.STACK_BELOW_CHECKED]
    assert heads(layered)["skill.email"] == before["skill.email"]
    assert layered.learn().layer == "skill.email"


def test_valid_layer_is_not_revalidated_until_the_stack_below_changes(
    layered: User, home: Path
) -> None:
    correct(layered, 4, first=20)
    assert layers(layered.learn()) == ["style", "skill.email"]
    with home_unchanged(home), pytest.raises(NothingToLearn):
        layered.learn()
    correct(layered, 4, first=30)
    assert layers(layered.learn()) == ["style", "skill.email"]
    with home_unchanged(home), pytest.raises(NothingToLearn):
        layered.learn()


def test_restored_stack_below_is_not_revalidated(
    layered: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[Stack] = []
    revalidate = learner.revalidate

    def counted(*arguments: Any, **margins: float) -> tuple[bool, Reason]:
        judged.append(arguments[-1].below)
        return revalidate(*arguments, **margins)

    monkeypatch.setattr(learner, "revalidate", counted)
    layered.rollback("style", None)
    layered.learn()
    correct(layered, 4, first=20)
    layered.learn()
    assert len(set(judged)) == len(judged) == 2
    layered.rollback("style", None)
    with pytest.raises(NothingToLearn):
        layered.learn()
    assert len(judged) == 2


def test_new_lessons_are_trained_on_top_of_a_valid_layer(layered: User) -> None:
    old = heads(layered)["skill.email"]
    correct(layered, 4, first=20)
    teach(layered, 4, first=20)
    report = layered.learn()
    assert layers(report) == ["style", "skill.email"]
    new = next(
        each for each in layered.revisions("skill.email") if each.id == report.above[0].revision
    )
    assert (new.parent, [entry.revision for entry in new.below]) == (old, [report.revision])


def test_memory_holds_on_a_style_that_words_its_facts_differently(ada: User) -> None:
    for number in range(6):
        ada.feedback(ada.chat(f"question {number}"), edit=f"Ahoy! Answer {number}.")
    for number in range(4):
        ada.remember(
            f"My pet {number} is Rex {number}.",
            questions=[f"What is pet {number}?"],
            answer=f"Rex {number}",
        )
    report = ada.learn()
    assert [each.live for each in (report, *report.above)] == [True, True]
    old = heads(ada)["memory"]
    for number in range(20, 28):
        ada.feedback(ada.chat(f"question {number}"), edit=f"- Answer {number}.")
    report = ada.learn()
    assert layers(report) == ["style", "memory"]
    assert report.above[0].reasons == (checked(4, 4),)
    assert heads(ada)["memory"] == old


def test_rollback_to_the_original_stack_needs_no_revalidation(layered: User, home: Path) -> None:
    layered.rollback("style", None)
    layered.rollback("style")
    with home_unchanged(home), pytest.raises(NothingToLearn):
        layered.learn()


def test_layer_that_no_longer_holds_is_rebuilt_on_the_new_stack(layered: User, home: Path) -> None:
    old = heads(layered)["skill.email"]
    # The fake backend gives every text a higher likelihood the more layers are below.
    layered.rollback("style", None)
    report = layered.learn()
    assert report.layer == "skill.email"
    assert report.reasons[0] == checked(0, 1)
    (new,) = (
        revision for revision in layered.revisions("skill.email") if revision.id == report.revision
    )
    assert (new.parent, new.below) == (None, ())
    assert new.id != old
    # Whatever the verdict, one build is not made twice.
    with home_unchanged(home), pytest.raises(NothingToLearn):
        layered.learn()


def test_refused_rebuild_is_not_repeated_with_each_later_lesson(
    layered: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer stays, so the next lessons are trained on top of it instead of from scratch."""
    old = heads(layered)["skill.email"]
    judge = gate.judge
    monkeypatch.setattr(learner, "revalidate", lambda *about, **margins: (False, checked(0, 4)))
    monkeypatch.setattr(
        gate,
        "judge",
        lambda evidence, margins, **more: Judgement(Verdict.REFUSED, (text_reason("it is worse"),)),
    )
    layered.rollback("style", None)
    tried = layered.learn("skill.email")
    assert (tried.live, tried.reasons) == (False, (checked(0, 4), text_reason("it is worse")))
    assert heads(layered) == {"skill.email": old}
    assert layered.pending().triggers == ()

    monkeypatch.setattr(gate, "judge", judge)
    teach(layered, 2, first=20)
    layered.learn("skill.email", accept=True)
    assert layered.revisions("skill.email")[-1].parent == old


def test_dry_run_lists_revalidations_and_changes_nothing(layered: User, home: Path) -> None:
    layered.rollback("style", None)
    with home_unchanged(home):
        report = layered.learn(dry_run=True)
    assert (report.layer, report.dry_run) == ("skill.email", True)
    assert report.reasons[0].code is ReasonCode.WOULD_REVALIDATE


def test_cancelling_in_the_second_layer_keeps_and_reports_the_first(ada: User) -> None:
    correct(ada, 5)
    teach(ada, 5)
    report = ada.learn(cancelled=lambda: bool(ada.revisions()))
    assert (report.layer, report.live) == ("style", True)
    (above,) = report.above
    assert (above.layer, above.error) == ("skill.email", "Cancelled")
    assert ada.learn().layer == "skill.email"


def test_cancelling_in_the_first_layer_raises_an_error(ada: User, home: Path) -> None:
    correct(ada, 5)
    teach(ada, 5)
    with home_unchanged(home), pytest.raises(Cancelled):
        ada.learn(cancelled=lambda: True)


def test_unfinished_layer_keeps_the_layers_above_waiting(ada: User) -> None:
    correct(ada, 5)
    teach(ada, 5)
    report = ada.learn(steps=3)
    assert (layers(report), report.steps) == (["style"], 3)
    assert report.reasons[0].code is ReasonCode.STEP_BUDGET
    assert report.reasons[0].data["step"] == 3
    while not report.live:
        report = ada.learn(steps=3)
    assert report.layer == "style"


def test_learning_all_layers_at_once_equals_learning_them_one_by_one(tmp_path: Path) -> None:
    stacks = []
    for name in ("one go", "layer by layer"):
        with open_runtime(tmp_path / name) as runtime:
            ada = runtime.user("ada")
            correct(ada, 5)
            teach(ada, 5)
            for layer in (None,) if name == "one go" else ("style", "skill.email"):
                ada.learn(layer)
            stacks.append(ada.stack())
    assert stacks[0] == stacks[1]


def test_too_few_lessons_in_one_layer_block_no_other_layer(ada: User) -> None:
    ada.teach("question", style("Answer."))
    teach(ada, 5)
    report = ada.learn()
    assert (report.layer, report.revision) == ("style", None)
    assert report.outcome is LearnOutcome.NOTHING_TO_LEARN
    assert [each.live for each in report.above] == [True]
