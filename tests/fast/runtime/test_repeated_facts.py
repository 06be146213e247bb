"""A fact that is stated again is one item, so its removal or edit leaves no copy in the prompt."""

from __future__ import annotations

import pytest
from runtime_makers import ask

from personalpeft import User
from personalpeft.types import TRAINS, Signal

DOG, ASKED = "My dog is called Biscuit.", "What is my dog called?"


def in_effect(ada: User) -> list[str]:
    return [item.id for item in ada.items()]


def signal_of(ada: User, signal: str) -> Signal:
    return next(each for each in ada.signals(current=False) if each.id == signal)


def used_for(ada: User, question: str) -> tuple[str, ...]:
    return ada.turn(ask(ada, question)).used


def test_fact_that_is_sent_again_keeps_its_id(ada: User) -> None:
    first = ada.remember(DOG)
    assert ada.remember(DOG) == first
    assert in_effect(ada) == [first]


@pytest.mark.parametrize("change", ["edit", "remove"])
def test_no_copy_of_a_repeated_fact_stays_in_the_prompt(ada: User, change: str) -> None:
    ada.remember(DOG)
    ada.remember("I live in Ghent.")
    again = ada.remember(DOG)
    if change == "edit":
        kept = (ada.edit_item(again, "My dog is called Rex.").id,)
    else:
        ada.retract_item(again)
        kept = ()
    assert used_for(ada, ASKED) == kept


def test_facts_with_answers_that_are_sent_again_add_nothing(ada: User) -> None:
    facts = [("Biscuit", ASKED), ("Tom", "What is my brother called?")]

    def send() -> list[str]:
        return [ada.remember(f"It is {a}.", questions=[q], answer=a) for a, q in facts]

    assert send() == send()
    assert len(ada.signals()) == len(facts)


def test_value_that_is_stated_again_after_another_is_the_newest(ada: User) -> None:
    first = ada.remember("My car is red.")
    other = ada.remember("My car is blue.")
    again = ada.remember("My car is red.")
    assert in_effect(ada) == [other, again]
    assert signal_of(ada, again).supersedes == first

    for color in ("red", "blue", "red"):
        last = ada.remember(
            f"My bike is {color}.", questions=["What color is my bike?"], answer=color
        )
    assert in_effect(ada) == [other, again, last]


def test_fact_with_questions_replaces_the_same_fact_without(ada: User) -> None:
    ada.remember(DOG)
    asked = ada.remember(DOG, questions=[ASKED])
    answered = ada.remember(DOG, questions=["Who barks?", ASKED], answer="Biscuit")
    assert in_effect(ada) == [answered]
    assert signal_of(ada, answered).supersedes == asked
    other = ada.remember(DOG, questions=["Which animal do I have?"], answer="A dog")
    assert in_effect(ada) == [answered, other]


def test_fact_of_another_source_is_another_fact(ada: User) -> None:
    users, apps = ada.remember(DOG), ada.remember(DOG, source="crm")
    assert in_effect(ada) == [users, apps]


def test_training_consent_of_a_repeated_fact_is_that_of_the_later(ada: User) -> None:
    ada.remember(DOG, questions=[ASKED], answer="Biscuit")
    later = ada.remember(DOG, questions=[ASKED], answer="Biscuit", train=False)
    assert in_effect(ada) == [later]
    assert signal_of(ada, later).payload[TRAINS] is False
