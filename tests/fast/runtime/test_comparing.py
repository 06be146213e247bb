"""A comparison is blind until somebody chose, and what they chose is in the ledger as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_makers import Time, ask, correct, nothing_changes, opened

from personalpeft import InvalidInput, NotFound, NothingToLearn, User
from personalpeft.types import SignalKind

PROMPT = "How do I boil an egg?"


@pytest.fixture
def ada(home: Path) -> Iterator[User]:
    with opened(home, clock=Time().clock()) as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        ada.learn()
        yield ada


def test_the_answers_are_those_of_the_two_revisions_and_say_nothing_of_whose_they_are(
    ada: User, home: Path
) -> None:
    head = ada.stack().entries[0].revision
    with nothing_changes(home):
        comparison = ada.compare(PROMPT)
    texts = {answer.revision: answer.text for answer in comparison.answers}
    assert texts == {
        head: ask(ada, PROMPT).text,
        "base": ask(ada, PROMPT, layers=[]).text,
    }
    assert head not in str(comparison) + str(comparison.as_json())


def test_the_order_is_drawn_by_chance(ada: User) -> None:
    assert {ada.compare(PROMPT).answers[0].revision for _ in range(20)} == {
        "base",
        ada.stack().entries[0].revision,
    }


@pytest.mark.parametrize("by", ["number", "name"])
def test_a_choice_is_a_preference_against_the_other_answer(ada: User, by: str) -> None:
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


def test_a_choice_takes_no_answers_place_that_the_person_wrote(ada: User) -> None:
    """Of two answers of the model the better one may be far from what was wanted, and that was said."""
    (own,) = (
        each
        for each in ada.lessons()
        if ada.turn(str(each.signal.turn)).messages[-1].content == "question 1"
    )
    choice = ada.compare("question 1").choose(1)
    told = {account.signal.id: account for account in ada.lessons()}
    assert told[own.signal.id] == own
    assert (told[choice.signal].place, told[choice.signal].why) == (
        "kept",
        "the edit of the same request says more",
    )
    # The later choice counts among choices, and what is written later counts more than any.
    first, second = (ada.compare(PROMPT).choose(number).signal for number in (1, 2))
    kept = {account.signal.id: account.place for account in ada.lessons()}
    assert (kept[first], kept[second]) in {("kept", "layer"), ("layer", "layer")}
    edit = ada.feedback(ask(ada, PROMPT), edit="Ahoy! Boil it. Arrr!")
    kept = {account.signal.id: account.place for account in ada.lessons()}
    assert (kept[first], kept[second], kept[edit]) == ("kept", "kept", "layer")


def test_the_two_stand_side_by_side(ada: User) -> None:
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


def test_what_is_chosen_of_a_skill_is_a_lesson_of_that_skill(ada: User) -> None:
    for number in range(5):
        ada.teach(f"Write to {number}.", f"Dear {number}", skill="email")
    ada.learn("skill.email")
    choice = ada.compare("Write to the bank.", layer="skill.email").choose(1)
    assert ada.learn("skill.email", dry_run=True).sources[-1].signal == choice.signal
    with pytest.raises(NothingToLearn):
        ada.learn("style")


def test_choosing_against_what_is_on_probation_again_and_again_withdraws_it(ada: User) -> None:
    head = ada.stack().entries[0].revision
    for number in range(8):
        comparison = ada.compare(f"{PROMPT} {number}", head, "base")
        comparison.choose(1 if comparison.answers[0].revision == "base" else 2)
    assert ada.history()[-1].cause == "withdrawn"


def test_choosing_what_is_on_probation_again_and_again_confirms_it(ada: User) -> None:
    head = ada.stack().entries[0].revision
    for number in range(8):
        comparison = ada.compare(f"{PROMPT} {number}", head, "base")
        comparison.choose(1 if comparison.answers[0].revision == head else 2)
    assert not ada.revisions()[0].probation
    assert ada.stack().entries[0].revision == head


def test_what_makes_no_sense_is_refused_and_changes_nothing(ada: User, home: Path) -> None:
    comparison = ada.compare(PROMPT)
    with nothing_changes(home):
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


def with_a_skill(ada: User) -> str:
    """A style that is live on probation, and a skill over it."""
    for number in range(6):
        ada.teach(f"write an email number {number}", f"Dear {number}, regards", skill="email")
    report = ada.learn(accept=True)
    assert report.revision is not None
    return report.revision


def test_the_layers_that_are_not_compared_answer_as_their_scope_says(ada: User) -> None:
    skill = with_a_skill(ada)
    ada.scope("skill.email", "never")
    layers = [[entry.layer for entry in each.stack.entries] for each in ada.compare(PROMPT).answers]
    assert sorted(layers) == [[], ["style"]]
    # What is compared is there, whatever its scope.
    compared = ada.compare(PROMPT, layer="skill.email")
    assert {each.revision: [e.layer for e in each.stack.entries] for each in compared.answers} == {
        skill: ["style", "skill.email"],
        "base": ["style"],
    }


def test_who_chooses_between_two_of_one_layer_says_nothing_of_another(ada: User) -> None:
    skill = with_a_skill(ada)
    assert ada.revisions("style")[0].probation
    for number in range(6):
        comparison = ada.compare(f"write an email number {number}0", layer="skill.email")
        live = [answer.revision for answer in comparison.answers].index(skill)
        comparison.choose(live + 1)
    assert [move.cause for move in ada.history()] == ["learn", "learn"]
    assert ada.revisions("style")[0].probation
