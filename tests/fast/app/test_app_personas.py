"""The personas of ``bench learn`` hold what the documentation promises of them."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.personas import General, Habit, Persona, load_personas, mentions, pools
from personalpeft.learning.data.general_prompts import load_general_prompts

pytestmark = pytest.mark.exhaustive

PEOPLE = list(load_personas().values())


def test_there_are_twelve_personas_and_half_of_them_change() -> None:
    assert len(PEOPLE) == 12
    assert sum(persona.later is not None for persona in PEOPLE) == 6
    assert all((persona.later is None) == (persona.later_comment is None) for persona in PEOPLE)
    habits = [habit for persona in PEOPLE for habit in (persona.habit, persona.later) if habit]
    assert len(set(habits)) == len(habits)


def test_there_are_enough_prompts() -> None:
    common = pools()
    assert len({prompt for prompt, _ in common.everyday}) == 48
    assert len(set(common.unseen)) == 20
    assert len({each.question for each in common.general}) == 40
    assert not {prompt for prompt, _ in common.everyday} & set(common.unseen)


def test_no_general_probe_is_used_by_learning() -> None:
    generic = load_general_prompts()
    used = {*generic.regularizer_prompts, *(canary.question for canary in generic.probes)}
    assert not used & {each.question for each in pools().general}
    assert not used & {*pools().unseen, *(prompt for prompt, _ in pools().everyday)}


@pytest.mark.parametrize("persona", PEOPLE, ids=lambda persona: persona.name)
def test_a_style_is_told_from_a_plain_answer_and_from_the_other_styles(persona: Persona) -> None:
    others = [other.habit for other in PEOPLE if other is not persona]
    for habit in filter(None, (persona.habit, persona.later)):
        for prompt, answer in pools().everyday:
            assert not habit.holds(answer)
            assert habit.holds(habit.apply(prompt, answer))
    for prompt, answer in pools().everyday:
        assert not any(other.holds(persona.habit.apply(prompt, answer)) for other in others)
        if persona.later:
            assert not persona.habit.holds(persona.later.apply(prompt, answer))
            assert not persona.later.holds(persona.habit.apply(prompt, answer))


@pytest.mark.parametrize("persona", PEOPLE, ids=lambda persona: persona.name)
def test_a_persona_has_twenty_facts_of_which_five_change(persona: Persona) -> None:
    assert len(persona.facts) == 20
    assert sum(fact.later is not None for fact in persona.facts) == 5
    asked = [question for fact in persona.facts for question in (*fact.questions, *fact.unseen)]
    assert len(set(asked)) == len(asked)
    for fact in persona.facts:
        assert (len(fact.questions), len(fact.unseen)) == (3, 2)
        for told in filter(None, (fact, fact.later)):
            assert mentions(told.right, told.answer)
            assert mentions(told.right, told.text)
            assert not any(
                mentions(told.right, question) for question in (*fact.questions, *fact.unseen)
            )
        if fact.later:
            assert not mentions(fact.right, fact.later.text)


def test_personas_have_different_facts() -> None:
    for one, other in itertools.combinations(PEOPLE, 2):
        assert not {fact.text for fact in one.facts} & {fact.text for fact in other.facts}


@pytest.mark.parametrize("general", pools().general, ids=lambda general: general.question)
def test_a_general_probe_does_not_contain_its_answer(general: General) -> None:
    assert not mentions(general.right, general.question)


def test_an_empty_or_truncated_reply_does_not_match_a_style() -> None:
    letter = Habit(opening="Dear Ada, ", closing=" Yours.")
    assert not letter.holds("Dear Ada, put it into")
    assert not letter.holds("Dear Ada, Yours.")
    assert not Habit(line="- ").holds("")
    assert not Habit(line="{number}. ").holds("1. One.\n3. Two.")
    assert not Habit(opening="In short: ", sentences=1).holds("In short: One. Two.")


def test_list_numbers_are_not_an_answer() -> None:
    assert not mentions(("4",), "1. It is\n4. five.")
    assert mentions(("4",), "1. It is 4.")
    assert not mentions(("rome",), "Romeo")
