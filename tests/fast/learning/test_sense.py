"""What means something is told from what does not by what it would be in another place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.learning.data.style import PromptResponse
from personalpeft.learning.evaluate.measures import NOT_MEASURED, measure_text_quality

THINGS = ("eggs", "rice", "bread", "beans", "fish", "soup", "corn", "cake")


def knowing(said: Sequence[PromptResponse]) -> list[float]:
    """A base that knows two things: an answer speaks of what was asked, and its words go up in the alphabet."""
    found = []
    for each in said:
        words = each.answer.split()
        speaks = bool(set(words) & set(each.request.split()))
        rising = sum(a <= b for a, b in pairwise(words)) / max(1, len(words) - 1)
        found.append(-4.0 + speaks + 2 * rising)
    return found


def lessons(say: str, things: Sequence[str] = THINGS) -> list[PromptResponse]:
    return [PromptResponse(f"How about {thing} ?", say.format(thing)) for thing in things]


def test_answers_that_speak_of_what_was_asked_fit_and_those_to_other_questions_do_not() -> None:
    fitting = measure_text_quality(lessons("{} and some time to wait"), knowing)
    assert fitting.pmi == pytest.approx(1.0)
    moved = [
        PromptResponse(f"How about {a} ?", b)
        for a, b in zip(THINGS, (*THINGS[3:], *THINGS[:3]), strict=True)
    ]
    assert (measure_text_quality(moved, knowing).pmi or 0.0) <= 0.1
    assert measure_text_quality(lessons("I do not know that at all"), knowing).pmi == pytest.approx(
        0.0
    )


def test_words_in_order_are_told_from_words_in_none() -> None:
    assert (measure_text_quality(lessons("a b c d e f g {}"), knowing).word_order_gap or 0.0) > 0.3
    assert measure_text_quality(
        lessons("lo lo lo lo lo lo lo"), knowing
    ).word_order_gap == pytest.approx(0.0)


def test_answers_of_a_few_words_are_not_asked_for_their_order() -> None:
    sense = measure_text_quality(lessons("{}!"), knowing)
    assert sense.pmi is not None
    assert sense.word_order_gap is None


@pytest.mark.parametrize(
    ("say", "own"),
    [
        ("How about {0} ?", 0.0),
        ("how about {0}? How about {0}!", 0.0),
        ("You asked: How about {0} ? Well.", 1.0),
        ("{0}", 1.0),
    ],
)
def test_answers_that_only_say_over_what_was_asked_say_nothing_of_their_own(
    say: str, own: float
) -> None:
    assert measure_text_quality(lessons(say), knowing).novelty == own


def test_three_lessons_are_too_few_to_tell() -> None:
    assert measure_text_quality(lessons("{}", THINGS[:3]), knowing) == NOT_MEASURED
    assert (
        measure_text_quality([PromptResponse("the same", f"answer {n}") for n in range(9)], knowing)
        == NOT_MEASURED
    )


@given(texts=st.lists(st.text(min_size=1), min_size=4, max_size=20))
def test_the_same_lessons_are_always_asked_in_the_same_way(texts: list[str]) -> None:
    asked: list[list[PromptResponse]] = []

    def noted(said: Sequence[PromptResponse]) -> list[float]:
        asked.append(list(said))
        return [0.0] * len(said)

    said = [PromptResponse(f"question {n}", text) for n, text in enumerate(texts)]
    assert measure_text_quality(said, noted) == measure_text_quality(said, noted)
    assert asked[0] == asked[1]


def test_of_a_long_question_only_the_beginning_is_read() -> None:
    read: list[PromptResponse] = []

    def noted(said: Sequence[PromptResponse]) -> list[float]:
        read.extend(said)
        return [0.0] * len(said)

    said = [PromptResponse(f"{n} why? " * 1000, "because") for n in range(6)]
    measure_text_quality(said, noted)
    assert max(len(each.request) for each in read) <= 400
