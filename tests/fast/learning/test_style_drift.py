"""A change of style is detected in any language, and no change where there is none.

The counts are over random orders drawn from fixed seeds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from style_samples import (
    ARABIC,
    ENGLISH,
    JAPANESE,
    STYLES,
    answer,
    lessons,
    request,
)

from benchmarks.edit_styles import load_styles
from personalpeft.learning.data.style import find_alternating_groups, find_style_change
from personalpeft.memory.embedder import HashEmbedder
from personalpeft.types import PromptResponse

Pairs = Sequence[tuple[str, str]]
Write = Callable[[str], str]

JAPANESE_STYLES: tuple[Write, ...] = (
    lambda text: f"結論から言うと、{text}",
    lambda text: f"{text}\n\nよろしくね、花子より",
)
ARABIC_STYLES: tuple[Write, ...] = (
    lambda text: f"باختصار: {text}",
    lambda text: f"{text}\n\nمع تحيات سلمى",
)


def found_at(styles: Sequence[str], numbers: Sequence[int] | None = None) -> int | None:
    change = find_style_change(lessons(styles, numbers))
    return change.index if change else None


def shuffled_orders(count: int, size: int = len(ENGLISH), seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [chance.sample(range(size), size) for _ in range(count)]


def in_style(pairs: Pairs, old: Write, new: Write, before: int) -> tuple[PromptResponse, ...]:
    return tuple(
        PromptResponse(prompt, (old if number < before else new)(text))
        for number, (prompt, text) in enumerate(pairs)
    )


def test_six_lessons_after_twelve_reveal_most_changes_of_style() -> None:
    """Three of four here, where two of seven styles differ in a few characters of an answer."""
    found = right = total = 0
    pairs = list(permutations(STYLES, 2))
    for (old, new), order in zip(pairs, shuffled_orders(len(pairs)), strict=True):
        course = lessons([old] * 12 + [new] * 6, order)
        change = find_style_change(course)
        if change is not None:
            found += abs(change.index - 12) <= 1
            right += sum(
                change.matches(each.answer) is (index >= 12) for index, each in enumerate(course)
            )
            total += len(course)
    assert found >= 0.75 * len(pairs)
    assert right >= 0.98 * total


def test_one_style_never_changes() -> None:
    for style in STYLES:
        assert [found_at([style] * 44, order) for order in shuffled_orders(3)] == [None] * 3


def test_realistic_edits_in_one_style_never_change_in_any_order() -> None:
    for style in load_styles().values():
        course = [PromptResponse(case.prompt, case.answer) for case in style.lessons]
        for order in shuffled_orders(3, len(course)):
            assert find_style_change(tuple(course[index] for index in order)) is None


@pytest.mark.parametrize(
    ("pairs", "styles"), [(JAPANESE, JAPANESE_STYLES), (ARABIC, ARABIC_STYLES)]
)
def test_drift_is_detected_in_japanese_and_arabic(
    pairs: Pairs, styles: tuple[Write, Write]
) -> None:
    found = lost = 0
    for order in shuffled_orders(10, len(pairs)):
        mixed = [pairs[index] for index in order]
        for old, new in (styles, styles[::-1]):
            change = find_style_change(in_style(mixed, old, new, 12))
            found += change is not None and change.index == 12
            lost += find_style_change(in_style(mixed, old, old, 12)) is not None
    assert found >= 18
    assert lost == 0


@pytest.mark.parametrize("stray", [3, 8, 14])
def test_one_stray_lesson_hides_no_change(stray: int) -> None:
    course = ["signed"] * 12 + ["greeted"] * 8
    course[stray] = "signed" if course[stray] == "greeted" else "greeted"
    change = find_style_change(lessons(course))
    assert change is not None
    matches = [change.matches(each.answer) for each in lessons(course)]
    assert matches == [style == "greeted" for style in course]


@pytest.mark.exhaustive
def test_random_mixture_is_seldom_taken_for_a_change() -> None:
    chance = random.Random(0)
    detected = 0
    for order in shuffled_orders(60):
        share = chance.uniform(0.1, 0.9)
        course = ["listed" if chance.random() < share else "signed" for _ in range(24)]
        detected += found_at(course, order) is not None
    assert detected <= 3


def test_detected_change_is_detected_with_each_later_lesson() -> None:
    course = ["signed"] * 12 + ["listed"] * 14 + ["loud"] * 12
    found = [found_at(course[:end]) or 0 for end in range(len(course) + 1)]
    assert found == sorted(found)
    assert found[18] == 12
    assert abs(found[-1] - 26) <= 1


def test_change_does_not_depend_on_what_was_scanned_before() -> None:
    course = ["signed"] * 12 + ["listed"] * 14 + ["loud"] * 12
    other = [*course[:15], *["signed"] * 10]
    growing = [found_at(course[:end]) for end in range(39)]
    assert found_at(other) is None
    shrinking = [found_at(course[:end]) for end in reversed(range(39))]
    assert growing == shrinking[::-1]


@pytest.mark.exhaustive
def test_one_more_lesson_of_thousands_costs_one_comparison() -> None:
    many = tuple(PromptResponse(f"{number}", f"No. {number}") for number in range(4_200))

    def seconds(examples: tuple[PromptResponse, ...]) -> float:
        began = time.process_time()
        find_style_change(examples)
        return time.process_time() - began

    first = seconds(many)
    assert seconds((*many, PromptResponse("one more", "1"))) < first / 20


def test_return_to_an_older_style_is_a_change_that_matches_its_lessons() -> None:
    course = ["signed"] * 12 + ["listed"] * 12 + ["signed"] * 4
    change = find_style_change(lessons(course))
    assert change is not None
    assert change.index == 24
    matches = [change.matches(each.answer) for each in lessons(course)]
    assert matches == [style == "signed" for style in course]


def test_added_mark_is_a_change() -> None:
    both = [f"Ahoy! {answer(number, 'signed')}" for number in range(12, 18)]
    added = [PromptResponse(request(12 + number), text) for number, text in enumerate(both)]
    change = find_style_change((*lessons(["greeted"] * 12), *added))
    assert change is not None
    assert change.index == 12


ALIKE = ("my aunt", "Tom", "the bank", "Eva", "my boss", "the city")


@pytest.mark.parametrize("count", [4, 5, 6])
def test_other_kind_of_request_with_its_own_style_is_no_change(count: int) -> None:
    messages = [
        PromptResponse(f"Write a short message to {name}.", f"[Draft] {answer(number, 'small')}")
        for number, name in enumerate(ALIKE[:count], 16)
    ]
    assert find_style_change((*lessons(["greeted"] * 16), *messages)) is None


def test_texts_without_letters_and_empty_requests_are_no_change() -> None:
    for text in ("", "...", "👍", "1"):
        assert find_style_change((PromptResponse("", text),) * 20) is None
        assert alternating((PromptResponse("", text),) * 20) is None


def alternating(
    examples: Sequence[PromptResponse],
) -> tuple[Sequence[PromptResponse], Sequence[PromptResponse]] | None:
    return find_alternating_groups(examples, HashEmbedder().embed)


def test_answers_of_two_alternating_styles_are_divided() -> None:
    course = lessons(["loud", "small", "small", "loud"] * 4)
    groups = alternating(course)
    assert groups is not None
    assert [{course.index(each) % 4 for each in group} for group in groups] == [{0, 3}, {1, 2}]
    assert alternating(course[:7]) is None


def test_change_of_style_is_no_alternation() -> None:
    assert alternating(lessons(["loud"] * 8 + ["small"] * 8)) is None


def test_request_kinds_with_one_style_each_do_not_alternate() -> None:
    mixed: list[PromptResponse] = []
    for number in range(8):
        letter = f"Write a letter to number {number} about the garden party"
        mixed.append(PromptResponse(letter, answer(number, "loud")))
        mixed.append(PromptResponse(request(number + 8), answer(number + 8, "small")))
    assert alternating(mixed) is None


def test_requests_of_two_meanings_with_one_style_each_do_not_alternate() -> None:
    styles = ["loud", "small", "small", "loud"] * 4
    course = lessons(styles)
    kinds = {each.request: styles.index(style) for each, style in zip(course, styles, strict=True)}

    def embed(requests: Sequence[str]) -> NDArray[np.float32]:
        return np.eye(2, dtype=np.float32)[[kinds[request] for request in requests]]

    assert alternating(course) is not None
    assert find_alternating_groups(course, embed) is None


def test_learning_page_documents_the_constants_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs/explanation/learning.md").read_text("utf-8")
    assert "at most once in 1,500: 4 after 12, 5 after 9, 6 after 7" in page
    for older, newer in ((12, 4), (9, 5), (7, 6)):
        assert found_at(["loud"] * older + ["small"] * newer) == older
        assert found_at(["loud"] * (older - 1) + ["small"] * newer) is None


@pytest.mark.parametrize("order", ["by turns", "one after the other"])
def test_labels_are_no_styles_in_any_order(order: str) -> None:
    names = ["positive", "negative"] * 10 if order == "by turns" else ["yes"] * 10 + ["no"] * 10
    labelled = tuple(
        PromptResponse(f"{request(number)} Judge it.", name) for number, name in enumerate(names)
    )
    assert alternating(labelled) is None
    assert find_style_change(labelled) is None
