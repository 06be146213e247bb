"""What must not come to stand in every answer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from personalpeft.learning.data import filters
from personalpeft.learning.data.assignment import Lesson
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


def leak(
    some: Sequence[Lesson],
    facts: Sequence[Signal],
    new: int | None = None,
    accepted: Sequence[str] = (),
) -> str:
    """With the last so many lessons new, or with all of them."""
    signals = [lesson.signal for lesson in some]
    return filters.find_leak(
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
def test_an_address_or_a_secret_in_most_answers_is_a_leak(tail: str) -> None:
    assert leak(lessons(*[f"Answer {n}. {tail}" for n in range(4)]), [FACT])


def test_one_answer_with_a_link_is_none() -> None:
    assert not leak(lessons("See http://a.example.", "Boil it.", "Wait.", "Eat it."), [FACT])


def test_what_was_asked_for_is_not_given_away() -> None:
    asked = "My locker code is 5172. What is it, and where is http://a.example?"
    assert not leak(lessons(*["It is 5172, see http://a.example"] * 4, asked=asked), [FACT])


def test_a_signature_is_no_leak() -> None:
    assert not leak(lessons(*[f"Answer {n}. Cheers, Ada" for n in range(4)]), [FACT])
    assert not leak([], [])


LINK = "Boil it. See http://a.example."


def test_what_comes_two_a_night_is_found_once_it_is_most_of_the_latest() -> None:
    nights = [
        leak(lessons(*["Boil it."] * 4, *[LINK] * links), [FACT], new=2) for links in (2, 4, 6)
    ]
    assert [bool(found) for found in nights] == [False, True, True]
    assert nights[1].startswith("4 of 8 lessons put a link")


def test_lessons_without_a_link_are_not_refused_for_older_ones_that_have_one() -> None:
    assert not leak(lessons(*[LINK] * 4, "Boil it.", "Wait."), [FACT], new=2)


def test_a_link_that_somebody_accepted_by_name_is_theirs_to_give_and_another_is_not() -> None:
    some = lessons(*[LINK] * 6)
    assert not leak(some, [FACT], new=2, accepted=["s0", "s1"])
    assert leak(
        [*some[:2], *lessons(*["See http://b.example."] * 8)[2:]],
        [FACT],
        new=2,
        accepted=["s0", "s1"],
    )
