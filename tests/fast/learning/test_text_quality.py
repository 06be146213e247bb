"""Text quality compares each answer's likelihood with its likelihood for another request or word
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.learning.evaluate.text_quality import (
    measure_learned_pmi,
    measure_style_overlap,
    measure_text_quality,
)
from personalpeft.learning.gate.evidence import TextQuality
from personalpeft.types import Message, PromptResponse

THINGS = ("eggs", "rice", "bread", "beans", "fish", "soup", "corn", "cake")


def toy_likelihoods(pairs: Sequence[PromptResponse]) -> list[float]:
    """Score as a base that prefers answers on the topic of the request with words in alphabetical
    order.
    """
    found = []
    for each in pairs:
        words = each.answer.split()
        speaks = bool(set(words) & set(each.request.split()))
        ascending = sum(a <= b for a, b in pairwise(words)) / max(1, len(words) - 1)
        found.append(-4.0 + speaks + 2 * ascending)
    return found


def lessons(template: str, things: Sequence[str] = THINGS) -> list[PromptResponse]:
    return [PromptResponse(f"How about {thing} ?", template.format(thing)) for thing in things]


def test_on_topic_answers_have_higher_pmi_than_swapped_ones() -> None:
    fitting = measure_text_quality(lessons("{} and some time to wait"), toy_likelihoods)
    assert fitting.pmi == pytest.approx(1.0)
    moved = [
        PromptResponse(f"How about {a} ?", b)
        for a, b in zip(THINGS, (*THINGS[3:], *THINGS[:3]), strict=True)
    ]
    assert (measure_text_quality(moved, toy_likelihoods).pmi or 0.0) <= 0.1
    assert measure_text_quality(
        lessons("I do not know that at all"), toy_likelihoods
    ).pmi == pytest.approx(0.0)


def test_a_few_meaningful_lessons_do_not_carry_a_meaningless_batch() -> None:
    fitting = lessons("{} and some time to wait", THINGS[:3])
    constant = lessons("you are so very clever", THINGS[3:])
    mixed = measure_text_quality([*fitting, *constant], toy_likelihoods)
    assert (mixed.pmi or 0.0) <= 0.05
    jumbled = lessons("zebra you so clever are always", THINGS[3:])
    assert (measure_text_quality(jumbled, toy_likelihoods).word_order_gap or 0.0) <= 0.2
    both = measure_text_quality(
        [*lessons("all are boiled soon {}", THINGS[:3]), *jumbled], toy_likelihoods
    )
    assert (both.word_order_gap or 0.0) <= 0.2


def test_follow_ups_are_told_apart_by_the_turns_before_them() -> None:
    def reading_all(pairs: Sequence[PromptResponse]) -> list[float]:
        texts = [" ".join([*(m.content for m in each.before), each.request]) for each in pairs]
        return toy_likelihoods(
            [PromptResponse(text, each.answer) for text, each in zip(texts, pairs, strict=True)]
        )

    follow_ups = [
        PromptResponse(
            "Shorter, please.",
            f"{thing} and some time",
            (Message("user", f"How about {thing} ?"), Message("assistant", "A long reply.")),
        )
        for thing in THINGS
    ]
    assert measure_text_quality(follow_ups, reading_all).pmi == pytest.approx(1.0)


LABELS = [PromptResponse(f"text {n}", ("good", "bad")[n % 2]) for n in range(8)]


def test_a_reply_is_compared_with_prompts_that_have_another_reply() -> None:
    def label_likelihoods(pairs: Sequence[PromptResponse]) -> list[float]:
        wanted = {each.request: each.answer for each in LABELS}
        return [0.0 if wanted[each.request] == each.answer else -3.0 for each in pairs]

    assert measure_text_quality(LABELS, label_likelihoods).pmi == pytest.approx(3.0)
    assert measure_learned_pmi(LABELS[:3], label_likelihoods) == pytest.approx(3.0)
    # One that does not fit decides, and arbitrary or constant replies never fit.
    odd = [*LABELS[:3], PromptResponse("text 4", "bad")]
    assert (measure_learned_pmi(odd, label_likelihoods) or 0.0) <= 0
    assert measure_learned_pmi(LABELS[::2], label_likelihoods) is None
    assert measure_learned_pmi(LABELS[:2], label_likelihoods) is None


def test_ordered_words_have_a_larger_gap_than_unordered_ones() -> None:
    assert (
        measure_text_quality(lessons("a b c d e f g {}"), toy_likelihoods).word_order_gap or 0.0
    ) > 0.3
    assert measure_text_quality(
        lessons("lo lo lo lo lo lo lo"), toy_likelihoods
    ).word_order_gap == pytest.approx(0.0)


def test_order_in_a_script_without_spaces_is_measured_by_characters() -> None:
    """The base here prefers characters in ascending order."""

    def ascending(pairs: Sequence[PromptResponse]) -> list[float]:
        return [sum(a <= b for a, b in pairwise(each.answer)) / len(each.answer) for each in pairs]

    ordered = [PromptResponse(f"{n}は？", "あいうえおかきくけこ"[n:]) for n in range(5)]
    assert (measure_text_quality(ordered, ascending).word_order_gap or 0.0) > 0.2
    same = [PromptResponse(f"{n}は？", "ああああああああ"[n:]) for n in range(4)]
    assert measure_text_quality(same, ascending).word_order_gap == pytest.approx(0.0)


def test_order_of_very_short_answers_is_not_measured() -> None:
    sense = measure_text_quality(lessons("{}!"), toy_likelihoods)
    assert sense.pmi is not None
    assert sense.word_order_gap is None


@pytest.mark.parametrize(
    ("template", "novelty"),
    [
        ("How about {0} ?", 0.0),
        ("how about {0}? How about {0}!", 0.0),
        ("You asked: How about {0} ? Well.", 1.0),
        ("{0}", 1.0),
        ("HOW ABOUT {0}?", 1.0),
        ("how about {0}", 1.0),
    ],
)
def test_answers_that_only_repeat_the_request_have_no_novelty(
    template: str, novelty: float
) -> None:
    assert measure_text_quality(lessons(template), toy_likelihoods).novelty == novelty


def test_three_lessons_are_too_few_to_measure() -> None:
    assert measure_text_quality(lessons("{}", THINGS[:3]), toy_likelihoods) == TextQuality()
    assert (
        measure_text_quality(
            [PromptResponse("the same", f"answer {n}") for n in range(9)], toy_likelihoods
        )
        == TextQuality()
    )


@given(texts=st.lists(st.text(min_size=1), min_size=4, max_size=20))
def test_same_lessons_are_always_scored_in_the_same_way(texts: list[str]) -> None:
    asked: list[list[PromptResponse]] = []

    def recorded(pairs: Sequence[PromptResponse]) -> list[float]:
        asked.append(list(pairs))
        return [0.0] * len(pairs)

    pairs = [PromptResponse(f"question {n}", text) for n, text in enumerate(texts)]
    assert measure_text_quality(pairs, recorded) == measure_text_quality(pairs, recorded)
    assert asked[0] == asked[1]


def test_only_the_beginning_of_a_long_request_is_scored() -> None:
    read: list[PromptResponse] = []

    def recorded(pairs: Sequence[PromptResponse]) -> list[float]:
        read.extend(pairs)
        return [0.0] * len(pairs)

    pairs = [PromptResponse(f"{n} why? " * 1000, "because") for n in range(6)]
    measure_text_quality(pairs, recorded)
    assert max(len(each.request) for each in read) <= 400


def imitating_likelihoods(pairs: Sequence[PromptResponse]) -> list[float]:
    """Score as a base that prefers to answer in the words of the reply before."""
    found = []
    for each in pairs:
        words = set(each.answer.split())
        seen = set(each.before[-1].content.split()) if each.before else set()
        found.append(-3.0 + len(words & seen) / len(words))
    return found


def test_two_styles_overlap_little_and_two_endings_of_one_style_much() -> None:
    plain = lessons("dear friend it is {} yours truly", THINGS[:4])
    short = lessons("{} !", THINGS[4:])
    for groups in ((plain, short), (short, plain)):
        overlap = measure_style_overlap(*groups, imitating_likelihoods)
        assert overlap == pytest.approx(0.0)
    other_end = lessons("dear friend it is {} yours ever", THINGS[4:])
    overlap = measure_style_overlap(plain, other_end, imitating_likelihoods)
    assert overlap is not None
    assert 0.8 < overlap < 1


def test_turns_before_the_lessons_do_not_change_their_overlap() -> None:
    def reading_all(pairs: Sequence[PromptResponse]) -> list[float]:
        scores = imitating_likelihoods(pairs)
        topics = ["egg" in " ".join(m.content for m in each.before) for each in pairs]
        return [score + 0.25 * known for score, known in zip(scores, topics, strict=True)]

    groups = (
        lessons("dear friend it is {} yours truly", THINGS[:4]),
        lessons("dear friend it is {} yours ever", THINGS[4:]),
    )
    turns = (Message("user", "About egg ?"), Message("assistant", "Yes."))
    follow_ups = [[replace(each, before=turns) for each in group] for group in groups]
    assert measure_style_overlap(*follow_ups, reading_all) == measure_style_overlap(
        *groups, reading_all
    )


def test_an_equal_answer_is_no_example_of_a_style() -> None:
    canned = lessons("I do not know that", THINGS[:4])
    prose = lessons("dear friend it is {} yours truly", THINGS[4:])
    assert measure_style_overlap(canned, canned, imitating_likelihoods) is None
    one_more = [*prose, *lessons("dear friend it was {} yours ever", THINGS[:2])]
    assert measure_style_overlap(canned, one_more, imitating_likelihoods) is not None


def test_a_base_that_does_not_follow_its_prompt_measures_no_overlap() -> None:
    groups = lessons("{} !", THINGS[:4]), lessons("it is {}", THINGS[4:])
    assert measure_style_overlap(*groups, lambda pairs: [-3.0] * len(pairs)) is None


def test_the_overlap_is_measured_on_the_newest_lessons_in_bounded_prompts() -> None:
    asked: list[PromptResponse] = []

    def noting(pairs: Sequence[PromptResponse]) -> list[float]:
        asked.extend(pairs)
        return imitating_likelihoods(pairs)

    long = [PromptResponse("r" * 9000, f"{number} " + "a" * 9000) for number in range(50)]
    measure_style_overlap(long, lessons("{} !"), noting)
    assert len(asked) <= 40
    assert max(len(m.content) for each in asked for m in each.before) <= 600
    assert not any(each.answer.startswith("45 ") for each in asked)
