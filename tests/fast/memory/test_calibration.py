"""The real embedder tells facts that a request asks about from others, in several languages."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from memory_makers import Home, opened

from personalpeft.chat.routing import AdapterRouter, calibrate_region
from personalpeft.learning.data.general_prompts import load_general_prompts, probe_questions
from personalpeft.memory.embedder import MiniLM, asking_similarity
from personalpeft.types import Message, Stack, StackEntry

EMBEDDER = MiniLM()
SETS = {
    "Japanese": (
        {
            "私の犬の名前はポチです。": "私の犬は何という名前ですか？",
            "妹は大阪に住んでいます。": "妹はどこに住んでいますか？",
            "車の鍵は青い引き出しにあります。": "車の鍵はどこですか？",
        },
        ["虹はどうしてできますか？", "米の炊き方を教えてください。", "冗談を言ってください。"],
    ),
    "French": (
        {
            "Mon chien s'appelle Rex.": "Comment s'appelle mon chien ?",
            "Ma sœur habite à Lyon.": "Dans quelle ville vit ma sœur ?",
            "La clé de la voiture est dans le tiroir bleu.": "Où est la clé de la voiture ?",
        },
        ["Comment cuire le riz ?", "Raconte-moi une blague.", "Résume ce texte."],
    ),
    "German": (
        {
            "Mein Hund heißt Bello.": "Wie heißt mein Hund?",
            "Meine Schwester wohnt in Köln.": "Wo wohnt meine Schwester?",
            "Der Autoschlüssel liegt in der blauen Schublade.": "Wo ist der Autoschlüssel?",
        },
        ["Wie kocht man Reis?", "Erzähl mir einen Witz.", "Wie viel ist 17 mal 4?"],
    ),
}


@pytest.mark.parametrize("language", SETS)
def test_request_finds_the_fact_that_it_asks_about_and_an_unrelated_one_none(
    tmp_path: Path, language: str
) -> None:
    facts, unrelated = SETS[language]
    with opened(tmp_path / "home", EMBEDDER) as home:
        ids = [home.fact("ada", text).id for text in facts]
        found = [home.ask("ada", question).item_ids for question in facts.values()]
        assert [each[0] for each in found] == ids
        assert [home.ask("ada", request).item_ids for request in unrelated] == [()] * 3


@pytest.mark.parametrize("language", SETS)
def test_unrelated_requests_are_rarely_near_a_memory_of_its_language(language: str) -> None:
    facts, unrelated = SETS[language]
    lessons = [EMBEDDER.embed([text, question]) for text, question in facts.items()]
    general = EMBEDDER.embed(["Who wrote Hamlet?", "What is 1 + 1?", "What do cows eat?"])
    region = calibrate_region(
        lessons, general, partial(asking_similarity, EMBEDDER), EMBEDDER.clear_similarity
    )

    def near(requests: Sequence[str]) -> list[bool]:
        similarities = asking_similarity(EMBEDDER, EMBEDDER.embed(requests), region.vectors)
        return (similarities.max(axis=1) >= region.threshold).tolist()

    assert near(list(facts.values())) == [True] * 3
    assert sum(near(unrelated)) <= 1


def test_memory_is_active_for_questions_about_its_facts_and_not_for_everyday_requests(
    tmp_path: Path,
) -> None:
    facts = {
        "My hamster is called Pickle.": ["What is my hamster called?", "Who is my hamster?"],
        "I eat no sugar.": ["What do I not eat?", "What do I leave out of my food?"],
        "I restore old maps.": ["What do I restore?", "What do I restore at work?"],
    }
    asked = [
        "How do I call my hamster?",
        "Which food have I given up?",
        "What kind of maps are mine?",
    ]
    everyday = [
        "How do I keep my houseplants alive?",
        "How can I make my soup taste better?",
        "What should I do when I cannot sleep?",
        "Why do dogs wag their tails?",
    ]
    assert _is_active(tmp_path, facts, (*asked, *everyday)) == [True] * 3 + [False] * 4


def test_memory_is_active_for_a_stated_question_that_could_be_a_general_one(tmp_path: Path) -> None:
    question = "How many minutes are in a day?"
    facts = {
        "My working day has 400 minutes.": [question],
        "My hamster is called Pickle.": ["What is my hamster called?"],
        "Tea is made at four.": ["Why is the sky blue?"],
    }
    assert _is_active(tmp_path, facts, [question]) == [True]


def _is_active(
    folder: Path, facts: Mapping[str, Sequence[str]], requests: Sequence[str]
) -> list[bool]:
    """Return for each request whether a memory of these facts would serve it."""
    with opened(folder / "home", EMBEDDER) as home:
        signals = {home.fact("ada", text, questions=facts[text]).id for text in facts}
        router = AdapterRouter(home.store, home.memory, probe_questions, folder / "cache")
        stack = Stack("0" * 64, (StackEntry("memory", "r_1", "1" * 64),))
        messages = [[Message("user", text)] for text in requests]
        served = router.select_each("ada", stack, messages, {"memory": signals})
    return [bool(each.entries) for each in served]


@pytest.mark.parametrize(
    ("fact", "asks", "on_the_topic"),
    [
        (
            "I play the trumpet.",
            "What do I take along to my music lesson?",
            "How do I clean a trumpet?",
        ),
        (
            "Mein Bruder lebt in Köln.",
            "In welche Stadt fahre ich, um meinen Bruder zu sehen?",
            "Was kann man in Köln unternehmen?",
        ),
    ],
)
def test_other_wording_asks_for_a_fact_more_than_a_request_on_its_topic(
    fact: str, asks: str, on_the_topic: str
) -> None:
    requests = EMBEDDER.embed([asks, on_the_topic])
    found = asking_similarity(EMBEDDER, requests, EMBEDDER.embed([fact]))
    assert found[0, 0] > found[1, 0]


@pytest.mark.parametrize(
    ("old", "new", "question"),
    [
        ("My dog is called Rex.", "My dog is called Max.", "What is my dog called?"),
        ("I live in Leeds.", "I moved to Hull last month.", "Where do I live?"),
        (
            "I am vegetarian.",
            "I eat meat again.",
            "What should I cook for myself tonight?",
        ),
        ("My boss is Ines.", "My new boss is Karl since Monday.", "Who is my boss?"),
        (
            "My phone number is 555 1234.",
            "My new number is 555 9876.",
            "What is my phone number?",
        ),
    ],
)
def test_newest_value_stands_next_to_the_question(
    tmp_path: Path, old: str, new: str, question: str
) -> None:
    with opened(tmp_path / "home", EMBEDDER) as home:
        home.fact("ada", old)
        home.fact("ada", new)
        assert _nearest_line(home, question).endswith(f'"{new}"')


def test_newer_fact_about_another_thing_does_not_displace_the_nearest(tmp_path: Path) -> None:
    with opened(tmp_path / "home", EMBEDDER) as home:
        home.fact("ada", "My dog is called Rex.")
        home.fact("ada", "My cat lives in the barn.")
        assert _nearest_line(home, "What is my dog called?").endswith('"My dog is called Rex."')


def _nearest_line(home: Home, question: str) -> str:
    shown = home.ask("ada", question).messages[-1].content
    return shown.removesuffix(f"\n\n{question}").splitlines()[-1]


def test_vectors_of_the_package_are_those_of_its_prompts() -> None:
    folder = resources.files("personalpeft.memory")
    prompts = tomllib.loads((folder / "neutral_prompts.toml").read_text("utf-8"))
    vectors = safetensors.numpy.load(
        (folder / f"neutral_prompts.{EMBEDDER.name}.safetensors").read_bytes()
    )
    personal = [vectors.pop(f"{language}.personal") for language in prompts]
    assert {weights.shape for weights in personal} == {(EMBEDDER.embed(["Hello."]).shape[1] + 1,)}
    assert all(np.isfinite(weights).all() for weights in personal)
    english = load_general_prompts().regularizer_prompts
    for language in tuple(prompts):
        others = () if language == "en" else (language,)
        questions = load_general_prompts(others).regularizer_prompts
        prompts[f"{language}.questions"] = questions[len(english) :] if others else questions
    assert {name: len(rows) for name, rows in vectors.items()} == {
        name: len(texts) for name, texts in prompts.items()
    }
    for name, texts in prompts.items():
        for number in (0, len(texts) - 1):
            assert vectors[name][number] == pytest.approx(
                EMBEDDER.embed([texts[number]])[0], abs=2e-3
            )
    assert all(np.isfinite(rows).all() for rows in vectors.values())
