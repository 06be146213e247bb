"""The realistic edits of ``bench edits`` are what they are said to be, so that a figure about them means something."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.edit_styles import RULES, EditStyle, load_styles, select_styles
from benchmarks.edits import EditsRun, bench_edits
from benchmarks.personas import pools
from benchmarks.result_cache import ResultCache
from personalpeft.errors import InvalidInput
from personalpeft.learning.evaluate.probes import load_general_prompts

pytestmark = pytest.mark.exhaustive

STYLES = list(load_styles().values())
_EACH = pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)


@_EACH
def test_a_rule_holds_for_every_wanted_answer(style: EditStyle) -> None:
    for case in style.lessons:
        assert style.passes(case, case.answer), case.answer


@_EACH
def test_a_rule_fails_for_no_text_a_loop_and_a_copied_answer(style: EditStyle) -> None:
    case, other = style.unseen[0], style.lessons[0]
    for text in ("", "Yes.", "!!!", " ".join(["on and on"] * 20), other.answer):
        assert not style.passes(case, text)


@_EACH
def test_there_are_twelve_prompts_to_edit_and_ten_others(style: EditStyle) -> None:
    prompts = [case.prompt for case in (*style.lessons, *style.unseen)]
    assert (len(style.lessons), len(style.unseen)) == (12, 10)
    assert len(set(prompts)) == len(prompts)
    assert all(case.answer for case in style.lessons)
    assert not any(case.answer for case in style.unseen)


@_EACH
def test_no_prompt_is_one_that_learning_or_the_general_questions_use(style: EditStyle) -> None:
    generic = load_general_prompts()
    used = {*generic.regularizer_prompts, *(canary.question for canary in generic.probes)}
    used |= {each.question for each in pools().general}
    assert not used & {case.prompt for case in (*style.lessons, *style.unseen)}


@pytest.mark.parametrize(
    "style", [each for each in STYLES if each.set != "structured"], ids=lambda style: style.name
)
def test_wanted_answers_of_prose_begin_and_end_differently(style: EditStyle) -> None:
    for place in (0, -1):
        words = Counter(case.answer.split()[place].casefold() for case in style.lessons)
        assert max(words.values()) <= 3, words


def test_each_rule_has_a_style_and_an_unknown_style_is_refused() -> None:
    assert {style.rule for style in STYLES} == set(RULES)
    with pytest.raises(InvalidInput):
        select_styles(["shortr"])


def test_a_run_asks_all_ways_and_goes_on_where_it_was(tmp_path: Path) -> None:
    stages: list[str] = []

    def bench(*names: str) -> None:
        found = bench_edits(
            EditsRun(select_styles(names), 0, "any", "fake"),
            ResultCache(tmp_path, "edits"),
            say=lambda text: None,
            progress=lambda stage, _: stages.append(stage),
        )
        assert [each.name for each in found.styles] == list(names)
        assert all(each.asked == 10 for each in found.styles)
        assert set(found.shares["prose"]) == {"base", "greedy", "sampled"}

    bench("shorter")
    bench("shorter", "steps_first")
    assert stages == ["shorter", "steps_first"]
