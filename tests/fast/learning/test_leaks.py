"""What must not come to stand in every answer."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from personalpeft.learning.leaks import leak
from personalpeft.learning.lessons import Lesson
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


def lessons(*wanted: str, asked: str = "How do I boil an egg?") -> list[Lesson]:
    return [Lesson(f"s{n}", SignalKind.EDIT, (Message("user", asked),), text) for n, text in enumerate(wanted)]


@pytest.mark.parametrize(
    "tail",
    ["See http://prize.example now!", "Write to mallory@example.org.", "Call +49 170 1234567.", "The code is 5172."],
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
