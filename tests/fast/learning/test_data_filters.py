"""Links, addresses and secrets of facts are refused where most lessons put them in every answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.gate.leak_check import find_leak
from personalpeft.learning.outcomes import Reason, ReasonCode, reason
from personalpeft.types import Message, Signal, SignalKind

FACT = Signal(
    "f",
    "ada",
    SignalKind.FACT,
    datetime(2026, 1, 1, tzinfo=UTC),
    {"text": "My locker code is 5172.", "questions": ["What is my locker code?"], "answer": "5172"},
    turn=None,
    source="person",
    supersedes=None,
)


def find(
    some: Sequence[Lesson],
    facts: Sequence[Signal],
    new: int | None = None,
    accepted: Sequence[str] = (),
) -> Reason | None:
    """Filter with the last ``new`` lessons as new, or with all of them."""
    signals = [lesson.signal for lesson in some]
    return find_leak(
        some, facts, new=signals[-new:] if new is not None else signals, accepted=accepted
    )


def lessons(*wanted: str, asked: str = "How do I boil an egg?") -> list[Lesson]:
    return [
        Lesson(f"s{n}", SignalKind.EDIT, (Message("user", asked),), text)
        for n, text in enumerate(wanted)
    ]


@pytest.mark.parametrize(
    "tail",
    [
        "See http://prize.example now!",
        "Write to mallory@example.org.",
        "Call +49 170 1234567.",
        "The code is 5172.",
    ],
)
def test_address_or_secret_in_most_answers_is_a_leak(tail: str) -> None:
    assert find(lessons(*[f"Answer {n}. {tail}" for n in range(4)]), [FACT])


def test_secret_of_two_characters_is_found_where_it_is_a_name() -> None:
    fact = replace(FACT, payload={"text": "私は東京に住んでいます。", "answer": "東京"})
    assert find(lessons(*[f"{n}です。東京から。" for n in range(4)]), [fact])


def test_one_answer_with_a_link_is_no_leak() -> None:
    assert not find(lessons("See http://a.example.", "Boil it.", "Wait.", "Eat it."), [FACT])


def test_content_of_the_request_is_no_leak() -> None:
    asked = "My locker code is 5172. What is it, and where is http://a.example?"
    assert not find(lessons(*["It is 5172, see http://a.example"] * 4, asked=asked), [FACT])


def test_signature_is_no_leak() -> None:
    assert not find(lessons(*[f"Answer {n}. Cheers, Ada" for n in range(4)]), [FACT])
    assert not find([], [])


NAME = replace(FACT, payload={"text": "My name is Anna.", "answer": "Anna"})


@pytest.mark.parametrize(
    "ending", [" — Anna", "\n— Anna", "\nBest, Anna", "\nAnna", "\n-- Anna", " – Anna."]
)
def test_name_that_the_user_signs_with_is_no_leak(ending: str) -> None:
    assert not find(lessons(*[f"Answer {n}.{ending}" for n in range(6)]), [NAME])


@pytest.mark.parametrize("ending", [" I am Anna.", " Ask Anna — she knows.", "\nMy name is Anna."])
def test_name_elsewhere_is_a_leak(ending: str) -> None:
    assert find(lessons(*[f"Answer {n}.{ending}" for n in range(6)]), [NAME])


def test_secret_with_a_number_at_the_place_of_a_signature_is_a_leak() -> None:
    assert find(lessons(*[f"Answer {n}. — 5172" for n in range(6)]), [FACT])


@pytest.mark.parametrize(("answer", "reply"), [("work", "It is working."), ("eeti", "Greetings!")])
def test_secret_is_found_as_whole_words_only(answer: str, reply: str) -> None:
    fact = replace(FACT, payload={"text": f"I do it for {answer}.", "answer": answer})
    assert not find(lessons(*[reply] * 6), [fact])
    assert find(lessons(*[f"{reply} It is for {answer}."] * 6), [fact])


LINK = "Boil it. See http://a.example."


def test_links_added_slowly_are_found_once_most_recent_lessons_have_them() -> None:
    learns = [
        find(lessons(*["Boil it."] * 4, *[LINK] * links), [FACT], new=2) for links in (2, 4, 6)
    ]
    assert [bool(found) for found in learns] == [False, True, True]
    assert learns[1] == reason(
        ReasonCode.ADDRESSES_LEAKED, count=4, total=8, address="http://a.example."
    )


def test_lessons_without_a_link_are_not_refused_for_older_ones() -> None:
    assert not find(lessons(*[LINK] * 4, "Boil it.", "Wait."), [FACT], new=2)


def test_link_accepted_by_name_is_allowed_and_another_is_not() -> None:
    some = lessons(*[LINK] * 6)
    assert not find(some, [FACT], new=2, accepted=["s0", "s1"])
    assert find(
        [*some[:2], *lessons(*["See http://b.example."] * 8)[2:]],
        [FACT],
        new=2,
        accepted=["s0", "s1"],
    )
