"""A comparison is blind until a choice, and the choice is recorded exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_makers import FakeTime, ask, correct, home_unchanged, open_runtime

from personalpeft import InvalidInput, NotFound, NothingToLearn, User
from personalpeft.types import SignalKind

PROMPT = "How do I boil an egg?"


@pytest.fixture
def ada(home: Path) -> Iterator[User]:
    with open_runtime(home, clock=FakeTime().clock()) as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        ada.learn()
        yield ada


def test_answers_come_from_the_two_revisions_without_naming_them(ada: User, home: Path) -> None:
    head = ada.stack().entries[0].revision
    ask(ada, PROMPT)  # caches the vectors of the lessons
    with home_unchanged(home):
        comparison = ada.compare(PROMPT)
    texts = {answer.revision: answer.text for answer in comparison.answers}
    assert texts == {
        head: ask(ada, PROMPT).text,
        "base": ask(ada, PROMPT, layers=[]).text,
    }
    assert head not in str(comparison) + str(comparison.as_json())


def test_order_of_the_answers_is_random(ada: User) -> None:
    assert {ada.compare(PROMPT).answers[0].revision for _ in range(20)} == {
        "base",
        ada.stack().entries[0].revision,
    }


@pytest.mark.parametrize("by", ["number", "name"])
def test_choice_records_a_preference_against_the_other_answer(ada: User, by: str) -> None:
    comparison = ada.compare(PROMPT)
    chosen, other = comparison.answers
    choice = comparison.choose(1 if by == "number" else chosen.name)
    assert (choice.chosen, choice.other) == (chosen.revision, other.revision)
    signal = ada.signals()[-1]
    assert (signal.id, signal.kind, signal.turn) == (
        choice.signal,
        SignalKind.PREFERENCE,
        choice.turn,
    )
    assert signal.payload == {"text": chosen.text, "revision": chosen.revision, "layer": "style"}
    turn = ada.turn(choice.turn)
    assert (turn.reply, turn.stack) == (other.text, other.stack)
    assert [part.revision.id for part in ada.why(turn).parts] == [
        e.revision for e in other.stack.entries
    ]


def test_choice_never_supersedes_an_edit_by_the_user(ada: User) -> None:
    """The better of two answers may still be far from the edit."""
    (own,) = (
        each
        for each in ada.signal_statuses()
        if ada.turn(str(each.signal.turn)).messages[-1].content == "question 1"
    )
    choice = ada.compare("question 1").choose(1)
    statuses = {status.signal.id: status for status in ada.signal_statuses()}
    assert statuses[own.signal.id] == own
    assert (statuses[choice.signal].place, statuses[choice.signal].why) == (
        "unused",
        "the edit of the same prompt takes precedence",
    )
    # The later of two choices counts, and an edit outranks both.
    first, second = (ada.compare(PROMPT).choose(number).signal for number in (1, 2))
    kept = {status.signal.id: status.place for status in ada.signal_statuses()}
    assert (kept[first], kept[second]) in {("unused", "layer"), ("layer", "layer")}
    edit = ada.feedback(ask(ada, PROMPT), edit="Ahoy! Boil it. Arrr!")
    kept = {status.signal.id: status.place for status in ada.signal_statuses()}
    assert (kept[first], kept[second], kept[edit]) == ("unused", "unused", "layer")


def test_answers_are_shown_side_by_side(ada: User) -> None:
    comparison = ada.compare(PROMPT)
    prompt, empty, head, *rows = str(comparison).splitlines()
    assert (prompt, empty) == (f"> {PROMPT}", "")
    one, two = comparison.answers
    assert head.split(" | ") == [f"1 ({one.name})".ljust(46), f"2 ({two.name})"]
    left, right = (
        " ".join(row.split("|")[side].strip() for row in rows if "|" in row) for side in (0, 1)
    )
    assert left.split() == one.text.split()
    assert right.split() == two.text.split()
    assert max(map(len, rows)) <= 96


def test_choice_between_revisions_of_a_skill_trains_that_skill(ada: User) -> None:
    for number in range(5):
        ada.teach(f"Write to {number}.", f"Dear {number}", skill="email")
    ada.learn("skill.email")
    choice = ada.compare("Write to the bank.", layer="skill.email").choose(1)
    assert ada.learn("skill.email", dry_run=True).sources[-1].signal == choice.signal
    with pytest.raises(NothingToLearn):
        ada.learn("style")


def test_repeated_choices_against_a_revision_on_probation_withdraw_it(ada: User) -> None:
    head = ada.stack().entries[0].revision
    for number in range(8):
        comparison = ada.compare(f"{PROMPT} {number}", head, "base")
        comparison.choose(1 if comparison.answers[0].revision == "base" else 2)
    assert ada.history()[-1].cause == "withdrawn"


def test_choices_over_another_revision_than_the_one_before_confirm_nothing(ada: User) -> None:
    """That a revision is better than the bare base does not say that the last learn helped."""
    correct(ada, 4, first=10)
    head = ada.learn().revision
    for number in range(10):
        comparison = ada.compare(f"{PROMPT} {number}", head, "base")
        comparison.choose(1 if comparison.answers[0].revision == head else 2)
    assert ada.revisions()[-1].probation


def test_repeated_choices_of_a_revision_on_probation_confirm_it(ada: User) -> None:
    head = ada.stack().entries[0].revision
    for number in range(10):
        comparison = ada.compare(f"{PROMPT} {number}", head, "base")
        comparison.choose(1 if comparison.answers[0].revision == head else 2)
    assert not ada.revisions()[0].probation
    assert ada.stack().entries[0].revision == head


def test_invalid_comparison_is_refused_and_changes_nothing(ada: User, home: Path) -> None:
    comparison = ada.compare(PROMPT)
    with home_unchanged(home):
        with pytest.raises(InvalidInput, match="3"):
            comparison.choose(3)
        with pytest.raises(InvalidInput, match="third"):
            comparison.choose("third")
        with pytest.raises(InvalidInput):
            ada.compare(PROMPT, "live", "live")
        with pytest.raises(NotFound) as missing:
            ada.compare(PROMPT, "style@000000000000")
        assert missing.value.hint
        with pytest.raises(NotFound):
            ada.compare(PROMPT, layer="skill.email")
        with pytest.raises(InvalidInput):
            ada.compare(" ")


def learn_skill(ada: User) -> str:
    """Learn a skill over the style that is on probation, and return its revision."""
    for number in range(6):
        ada.teach(f"write an email number {number}", f"Dear {number}, regards", skill="email")
    report = ada.learn(accept=True)
    assert report.revision is not None
    return report.revision


def test_layers_outside_the_comparison_follow_their_scope(ada: User) -> None:
    skill = learn_skill(ada)
    ada.scope("skill.email", "never")
    layers = [[entry.layer for entry in each.stack.entries] for each in ada.compare(PROMPT).answers]
    assert sorted(layers) == [[], ["style"]]
    # The compared layer is attached whatever its scope.
    compared = ada.compare(PROMPT, layer="skill.email")
    assert {each.revision: [e.layer for e in each.stack.entries] for each in compared.answers} == {
        skill: ["style", "skill.email"],
        "base": ["style"],
    }


def test_choice_in_one_layer_says_nothing_about_another(ada: User) -> None:
    skill = learn_skill(ada)
    assert ada.revisions("style")[0].probation
    for number in range(6):
        comparison = ada.compare(f"write an email number {number}0", layer="skill.email")
        live = [answer.revision for answer in comparison.answers].index(skill)
        comparison.choose(live + 1)
    assert [move.cause for move in ada.history()] == ["learn", "learn"]
    assert ada.revisions("style")[0].probation
