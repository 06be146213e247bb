"""A learn goes through all layers from the lowest up; what stands on something old is judged again and built anew where
it no longer holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from runtime_makers import correct, nothing_changes, opened, style

from personalpeft import Cancelled, LearnReport, NothingToLearn, User
from personalpeft.learning import learner, pipeline
from personalpeft.learning.gate.gate import Judgement
from personalpeft.learning.outcomes import Reason, ReasonCode, reason, text_reason
from personalpeft.learning.report import from_json
from personalpeft.learning.staleness import RevalidationResult
from personalpeft.types import Verdict


@pytest.fixture
def layered(ada: User) -> User:
    """Style and a skill, both live."""
    correct(ada, 6)
    teach(ada, 6)
    report = ada.learn()
    assert [each.live for each in (report, *report.above)] == [True, True]
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


def test_one_learn_takes_all_that_is_new_from_the_lowest_layer_up(ada: User) -> None:
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


def test_the_reports_of_all_layers_are_in_the_first_ones_text_and_data(layered: User) -> None:
    correct(layered, 4, first=20)
    teach(layered, 4, first=20)
    report = layered.learn()
    assert all(f"ada · {layer}" in str(report) for layer in ("style", "skill.email"))
    assert from_json(report.as_json()).as_json() == report.as_json()


def test_a_layer_that_is_named_is_learned_alone_and_what_stands_over_it_is_judged_again(
    layered: User,
) -> None:
    before = heads(layered)
    correct(layered, 4, first=20)
    teach(layered, 4, first=20)
    report = layered.learn("style")
    assert layers(report) == ["style", "skill.email"]
    again = report.above[0]
    assert (again.verdict, again.revision) == (Verdict.ABSTAINED, before["skill.email"])
    assert [each.code for each in again.reasons] == [ReasonCode.STACK_BELOW_CHECKED]
    assert heads(layered)["skill.email"] == before["skill.email"]
    assert layered.learn().layer == "skill.email"


def test_what_holds_is_not_asked_again_until_what_lies_below_has_changed_again(
    layered: User, home: Path
) -> None:
    correct(layered, 4, first=20)
    assert layers(layered.learn()) == ["style", "skill.email"]
    with nothing_changes(home), pytest.raises(NothingToLearn):
        layered.learn()
    correct(layered, 4, first=30)
    assert layers(layered.learn()) == ["style", "skill.email"]
    with nothing_changes(home), pytest.raises(NothingToLearn):
        layered.learn()


def test_what_is_new_is_learned_on_top_of_what_still_holds(layered: User) -> None:
    old = heads(layered)["skill.email"]
    correct(layered, 4, first=20)
    teach(layered, 4, first=20)
    report = layered.learn()
    assert layers(report) == ["style", "skill.email"]
    new = next(
        each for each in layered.revisions("skill.email") if each.id == report.above[0].revision
    )
    assert (new.parent, [entry.revision for entry in new.below]) == (old, [report.revision])


def test_a_memory_holds_on_a_style_that_says_its_facts_in_other_words(ada: User) -> None:
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


def test_after_a_rollback_to_what_it_was_built_on_nothing_is_asked(
    layered: User, home: Path
) -> None:
    layered.rollback("style", None)
    layered.rollback("style")
    with nothing_changes(home), pytest.raises(NothingToLearn):
        layered.learn()


def test_what_no_longer_holds_is_built_anew_on_what_lies_below_now(
    layered: User, home: Path
) -> None:
    old = heads(layered)["skill.email"]
    # On the fake backend everything is the likelier the more lies below.
    layered.rollback("style", None)
    report = layered.learn()
    assert report.layer == "skill.email"
    assert report.reasons[0] == checked(0, 1)
    (new,) = (
        revision for revision in layered.revisions("skill.email") if revision.id == report.revision
    )
    assert (new.parent, new.below) == (None, ())
    assert new.id != old
    # Refused or not, a build is not made twice.
    with nothing_changes(home), pytest.raises(NothingToLearn):
        layered.learn()


def test_what_was_built_in_a_layers_place_and_refused_is_not_tried_with_every_later_lesson(
    layered: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer stays, so what is said next is learned on top of it: from nothing it would be refused again and again."""
    old = heads(layered)["skill.email"]
    judge = pipeline.judge
    monkeypatch.setattr(
        learner, "revalidate", lambda *about: RevalidationResult(4, 0, is_valid=False)
    )
    monkeypatch.setattr(
        pipeline,
        "judge",
        lambda evidence, margins, **more: Judgement(Verdict.REFUSED, (text_reason("it is worse"),)),
    )
    layered.rollback("style", None)
    tried = layered.learn("skill.email")
    assert (tried.live, tried.reasons) == (False, (checked(0, 4), text_reason("it is worse")))
    kept = from_json(layered.reports()[-1])
    assert kept.reasons == (reason(ReasonCode.REPLACEMENT_NOT_LIVE, revision=tried.revision),)
    assert heads(layered) == {"skill.email": old}
    assert layered.pending().news == ()

    monkeypatch.setattr(pipeline, "judge", judge)
    teach(layered, 2, first=20)
    layered.learn("skill.email", accept=True)
    assert layered.revisions("skill.email")[-1].parent == old


def test_a_dry_run_says_what_would_be_judged_again_and_changes_nothing(
    layered: User, home: Path
) -> None:
    layered.rollback("style", None)
    with nothing_changes(home):
        report = layered.learn(dry_run=True)
    assert (report.layer, report.dry_run) == ("skill.email", True)
    assert report.reasons[0].code is ReasonCode.WOULD_REVALIDATE


def test_who_stops_in_the_second_layer_keeps_the_first_and_is_told(ada: User) -> None:
    correct(ada, 5)
    teach(ada, 5)
    report = ada.learn(cancelled=lambda: bool(ada.revisions()))
    assert (report.layer, report.live) == ("style", True)
    (above,) = report.above
    assert (above.layer, above.error) == ("skill.email", "Cancelled")
    assert ada.learn().layer == "skill.email"


def test_who_stops_in_the_first_layer_hears_of_it_as_an_error(ada: User, home: Path) -> None:
    correct(ada, 5)
    teach(ada, 5)
    with nothing_changes(home), pytest.raises(Cancelled):
        ada.learn(cancelled=lambda: True)


def test_a_layer_that_is_not_complete_keeps_those_above_it_waiting(ada: User) -> None:
    correct(ada, 5)
    teach(ada, 5)
    report = ada.learn(steps=3)
    assert (layers(report), report.steps) == (["style"], 3)
    assert report.reasons[0].code is ReasonCode.STEP_BUDGET
    assert report.reasons[0].data["step"] == 3
    while not report.live:
        report = ada.learn(steps=3)
    assert report.layer == "style"


def test_all_that_is_taught_is_the_same_in_one_go_or_layer_by_layer(tmp_path: Path) -> None:
    stacks = []
    for name in ("one go", "layer by layer"):
        with opened(tmp_path / name) as runtime:
            ada = runtime.user("ada")
            correct(ada, 5)
            teach(ada, 5)
            for layer in (None,) if name == "one go" else ("style", "skill.email"):
                ada.learn(layer)
            stacks.append(ada.stack())
    assert stacks[0] == stacks[1]


def test_too_few_lessons_for_one_layer_keep_no_other_from_learning(ada: User) -> None:
    ada.teach("question", style("Answer."))
    teach(ada, 5)
    report = ada.learn()
    assert (report.layer, report.verdict, report.revision) == ("style", Verdict.ABSTAINED, None)
    assert [each.live for each in report.above] == [True]
