"""The made-up people of ``bench learn`` are what they are said to be, so that a figure about them means something."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.personas import General, Habit, Persona, load_personas, mentions, pools
from personalpeft.learning.evaluate.probes import load_general_prompts

pytestmark = pytest.mark.exhaustive

PEOPLE = list(load_personas().values())


def test_there_are_twelve_and_half_of_them_change() -> None:
    assert len(PEOPLE) == 12
    assert sum(person.later is not None for person in PEOPLE) == 6
    assert all((person.later is None) == (person.later_comment is None) for person in PEOPLE)
    habits = [habit for person in PEOPLE for habit in (person.habit, person.later) if habit]
    assert len(set(habits)) == len(habits)


def test_there_is_enough_to_ask() -> None:
    common = pools()
    assert len({prompt for prompt, _ in common.everyday}) == 48
    assert len(set(common.unseen)) == 20
    assert len({each.question for each in common.general}) == 40
    assert not {prompt for prompt, _ in common.everyday} & set(common.unseen)


def test_no_general_question_is_one_that_learning_uses() -> None:
    generic = load_general_prompts()
    used = {*generic.regularizer_prompts, *(canary.question for canary in generic.probes)}
    assert not used & {each.question for each in pools().general}
    assert not used & {*pools().unseen, *(prompt for prompt, _ in pools().everyday)}


@pytest.mark.parametrize("person", PEOPLE, ids=lambda person: person.name)
def test_a_habit_is_told_from_a_plain_answer_and_from_the_other_habits(person: Persona) -> None:
    others = [other.habit for other in PEOPLE if other is not person]
    for habit in filter(None, (person.habit, person.later)):
        for prompt, answer in pools().everyday:
            assert not habit.holds(answer)
            assert habit.holds(habit.apply(prompt, answer))
    for prompt, answer in pools().everyday:
        assert not any(other.holds(person.habit.apply(prompt, answer)) for other in others)
        if person.later:
            assert not person.habit.holds(person.later.apply(prompt, answer))
            assert not person.later.holds(person.habit.apply(prompt, answer))


@pytest.mark.parametrize("person", PEOPLE, ids=lambda person: person.name)
def test_a_person_has_twenty_facts_of_which_five_change(person: Persona) -> None:
    assert len(person.facts) == 20
    assert sum(fact.later is not None for fact in person.facts) == 5
    asked = [question for fact in person.facts for question in (*fact.questions, *fact.unseen)]
    assert len(set(asked)) == len(asked)
    for fact in person.facts:
        assert (len(fact.questions), len(fact.unseen)) == (3, 2)
        for told in filter(None, (fact, fact.later)):
            assert mentions(told.right, told.answer)
            assert mentions(told.right, told.text)
            assert not any(
                mentions(told.right, question) for question in (*fact.questions, *fact.unseen)
            )
        if fact.later:
            assert not mentions(fact.right, fact.later.text)


def test_different_people_tell_different_things() -> None:
    for one, other in itertools.combinations(PEOPLE, 2):
        assert not {fact.text for fact in one.facts} & {fact.text for fact in other.facts}


@pytest.mark.parametrize("general", pools().general, ids=lambda general: general.question)
def test_a_general_question_does_not_give_its_answer_away(general: General) -> None:
    assert not mentions(general.right, general.question)


def test_a_reply_that_breaks_off_or_says_nothing_is_not_in_the_habit() -> None:
    letter = Habit(opening="Dear Ada, ", closing=" Yours.")
    assert not letter.holds("Dear Ada, put it into")
    assert not letter.holds("Dear Ada, Yours.")
    assert not Habit(line="- ").holds("")
    assert not Habit(line="{number}. ").holds("1. One.\n3. Two.")
    assert not Habit(opening="In short: ", sentences=1).holds("In short: One. Two.")


def test_the_numbers_of_a_list_are_no_answer() -> None:
    assert not mentions(("4",), "1. It is\n4. five.")
    assert mentions(("4",), "1. It is 4.")
    assert not mentions(("rome",), "Romeo")
