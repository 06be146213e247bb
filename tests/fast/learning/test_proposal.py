"""An adapter from elsewhere goes live through the gate, as a learn's candidate does."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime_makers import correct, greedy, home_unchanged, open_runtime, trained_on

from personalpeft import AdapterError, Runtime, User
from personalpeft.learning.outcomes import LearnOutcome, ReasonCode


@pytest.fixture
def folder(runtime: Runtime, tmp_path: Path) -> Path:
    """The adapter of a user whose way of answering is the others', too."""
    teacher = runtime.user("teacher")
    correct(teacher, 8)
    teacher.learn()
    return teacher.export_peft(tmp_path / "peft", layer="style")


def test_an_adapter_that_improves_unseen_lessons_goes_live(
    runtime: Runtime, ada: User, folder: Path
) -> None:
    correct(ada, 6, first=40)
    report = ada.propose_peft(folder)
    assert report.outcome is LearnOutcome.PROMOTED
    assert report.live
    assert report.reasons[0].code is ReasonCode.IMPROVED
    (revision,) = ada.revisions()
    assert (revision.id, revision.parent) == (report.revision, None)
    assert ada.stack().entries[0].revision == revision.id
    assert trained_on(ada) == set()
    assert [move.cause for move in ada.history()] == ["import"]
    assert greedy(ada) == greedy(runtime.user("teacher"))
    assert ada.reports()[0]["revision"] == report.revision
    assert runtime.verify() == ()


@pytest.mark.exhaustive
def test_without_lessons_to_judge_by_the_gate_abstains(ada: User, folder: Path) -> None:
    report = ada.propose_peft(folder)
    assert (report.outcome, report.live) == (LearnOutcome.ABSTAINED, False)
    assert ada.stack().entries == ()
    assert [revision.id for revision in ada.revisions()] == [report.revision]


def test_the_user_may_accept_what_the_gate_did_not_promote(ada: User, folder: Path) -> None:
    report = ada.propose_peft(folder, layer="skill.email", accept=True)
    assert report.accepted
    assert report.live
    assert ada.stack().entries[0].revision == report.revision
    assert [move.cause for move in ada.history()] == ["accepted"]


def test_an_adapter_that_knows_less_than_the_live_layer_is_refused(ada: User, folder: Path) -> None:
    correct(ada, 30, first=40)
    ada.learn()
    live = ada.stack().entries[0].revision
    report = ada.propose_peft(folder)
    assert report.outcome is LearnOutcome.REFUSED
    assert ada.stack().entries[0].revision == live


def test_a_learn_on_top_continues_it(ada: User, folder: Path) -> None:
    correct(ada, 6, first=40)
    proposed = ada.propose_peft(folder).revision
    correct(ada, 6, first=60)
    learned = ada.learn()
    parents = {revision.id: revision.parent for revision in ada.revisions()}
    assert parents[learned.revision or ""] == proposed
    # All lessons are the learn's: the judgement held none of them back for good.
    assert len(trained_on(ada)) >= 8


def test_proposing_what_is_live_changes_nothing(ada: User, folder: Path) -> None:
    correct(ada, 6, first=40)
    first = ada.propose_peft(folder)
    again = ada.propose_peft(folder)
    assert again.outcome is LearnOutcome.UNCHANGED
    assert again.revision == first.revision
    assert len(ada.revisions()) == 1


def test_a_damaged_folder_leaves_nothing(tmp_path: Path) -> None:
    home = tmp_path / "own"
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        with home_unchanged(home), pytest.raises(AdapterError):
            ada.propose_peft(tmp_path / "nowhere")
