"""Ways of answering that alternate are found; changes of mind, and what the requests explain, are none."""

from __future__ import annotations

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from test_habits import answer, request, ways

from personalpeft.learning.data.style import PromptResponse, find_style_conflict

MARKED = ("signed", "listed", "numbered", "greeted", "loud")
many = examples(60)
marked = st.sampled_from(MARKED)


def course(names: list[str]) -> list[PromptResponse]:
    """Two in a row are asked in the same words, so that no request explains its answer."""
    return [
        PromptResponse(request(number // 2), answer(number, way))
        for number, way in enumerate(names)
    ]


@many
@given(one=marked, other=marked, count=st.integers(6, 24))
def test_two_ways_by_turns_are_found(one: str, other: str, count: int) -> None:
    found = find_style_conflict(course([(one, other)[number % 2] for number in range(count)]))
    assert bool(found) is (one != other)


def test_three_ways_by_turns_are_found_and_named() -> None:
    found = find_style_conflict(course(["signed", "listed", "greeted"] * 4))
    assert found.startswith("4 ")
    assert "by turns" in found


@many
@given(way=ways, count=st.integers(0, 30))
def test_one_way_is_not_divided(way: str, count: int) -> None:
    assert find_style_conflict(course([way] * count)) == ""


@many
@given(old=ways, new=ways, before=st.integers(1, 12), since=st.integers(1, 12))
def test_a_change_of_mind_is_not_divided(old: str, new: str, before: int, since: int) -> None:
    assert find_style_conflict(course([old] * before + [new] * since)) == ""


@many
@given(texts=st.lists(st.text(min_size=1), max_size=20))
def test_answers_that_share_nothing_are_not_divided(texts: list[str]) -> None:
    said = [
        PromptResponse(request(n), f"{chr(0x4E00 + n)}aA{text}{chr(0x5E00 + n)}")
        for n, text in enumerate(texts)
    ]
    assert find_style_conflict(said) == ""


def test_what_the_requests_explain_is_not_divided() -> None:
    letters = [
        f"Write a letter to {name} about the garden party"
        for name in ("Ada", "Bo", "Cy", "Di", "Ed", "Flo")
    ]
    said = []
    for number, letter in enumerate(letters):
        said += [
            PromptResponse(letter, f"Dear friend, number {number} it is."),
            PromptResponse(request(number), answer(number, "listed")),
        ]
    assert find_style_conflict(said) == ""


@pytest.mark.parametrize("count", range(6))
def test_a_few_answers_are_too_few_to_tell(count: int) -> None:
    assert find_style_conflict(course(["signed", "listed"] * 3)[:count]) == ""


def test_yes_and_no_are_what_is_said_and_no_ways_of_saying_it() -> None:
    said = [
        PromptResponse(
            request(n // 2),
            f"{('Yes', 'No')[n % 2]}, {answer(n, 'plain')[0].lower()}{answer(n, 'plain')[1:]}",
        )
        for n in range(12)
    ]
    assert find_style_conflict(said) == ""
