"""The language of a user's prompts is found, and what is in no known language counts for none."""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.memory.languages import find_languages
from personalpeft.memory.words import contains_phrase

PROMPTS: dict[str, list[str]] = tomllib.loads(
    (resources.files("personalpeft.memory") / "neutral_prompts.toml").read_text("utf-8")
)
WORDS = [f"question {number}" for number in range(6)]
UNKNOWN = ["Hvad hedder min hund?", "Hvor bor min bror?", "Hvornår har jeg fødselsdag?"]


@pytest.mark.parametrize("language", PROMPTS)
def test_language_of_a_dozen_prompts_is_found(language: str) -> None:
    assert find_languages(PROMPTS[language], PROMPTS) == (language,)


def test_all_languages_of_a_user_who_writes_in_several_are_found() -> None:
    assert find_languages([*PROMPTS["de"], *PROMPTS["ja"]], PROMPTS) == ("de", "ja")


@pytest.mark.parametrize(
    "prompts", [[], PROMPTS["en"], UNKNOWN, ["ok", "SELECT * FROM users", "12 + 5", *WORDS]]
)
def test_other_languages_code_and_single_words_count_for_no_language(prompts: list[str]) -> None:
    assert find_languages(prompts, set(PROMPTS) - {"en"}) == ()


@pytest.mark.parametrize(
    ("text", "phrase", "found"),
    [
        ("My cat is called Momo.", "cat", True),
        ("My category is lightweight.", "cat", False),
        ("Mexico City, of course!", "mexico city", True),
        ("The city of Mexico", "mexico city", False),
        ("O2", "o", False),
        ("ギリシャの首都はアテネです。", "アテネ", True),
        ("मेरी बिल्ली का नाम मोमो है।", "बिल्ली", True),
        ("Мою кошку зовут Мурка.", "кошку", True),
        ("首都是北京。", "北京", True),
        ("衛星は月です。", "月", True),
        ("달입니다", "달", True),
        ("首都は東京です。", "京都", False),
        ("수도는 서울입니다.", "서울", True),
        ("عاصمة اليونان هي أثينا.", "أثينا", True),
    ],
)
def test_phrase_is_found_as_whole_words_in_any_script(text: str, phrase: str, found: bool) -> None:
    assert contains_phrase(text, phrase) is found


@given(st.lists(st.sampled_from(["a", "bo", "ключ", "猫", "นก"]), min_size=1, max_size=6))
def test_text_contains_each_run_of_its_words(words: list[str]) -> None:
    text = " ".join(words)
    assert all(
        contains_phrase(text, " ".join(words[start:end]))
        for start in range(len(words))
        for end in range(start + 1, len(words) + 1)
    )
