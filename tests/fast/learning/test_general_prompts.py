"""General prompts are in English, and in the languages that a user's lessons are about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runtime_makers import open_runtime

from personalpeft.backends.base import Backend, Loss
from personalpeft.learning.data.batching import build_batches
from personalpeft.learning.data.general_prompts import load_general_prompts, prompt_languages
from personalpeft.learning.plan import Plan
from personalpeft.learning.train import loop
from personalpeft.memory.languages import find_language
from personalpeft.memory.words import has_spaces

ENGLISH = load_general_prompts()
GERMAN = (
    ("Wie heißt mein Hund?", "Mein Hund heißt Rex.", "Rex"),
    ("Wo wohnt meine Schwester?", "Meine Schwester wohnt in Köln.", "Köln"),
    ("Was trinke ich morgens am liebsten?", "Morgens trinke ich am liebsten Kakao.", "Kakao"),
)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What was trained on, as text."""
    texts: set[str] = set()

    def recorded(plan: Plan, backend: Backend, *rest: Any) -> tuple[tuple[Loss, ...], ...]:
        steps = build_batches(plan, backend, *rest)
        for each in (each for terms in steps for term in terms for each in term.continuations):
            texts.add(backend.decode((*each.prompt, *each.completion)))
        return steps

    monkeypatch.setattr(loop, "build_batches", recorded)
    return texts


def contained(texts: set[str], prompts: tuple[str, ...]) -> list[str]:
    return [each for each in prompts if any(each in text for text in texts)]


def test_style_of_german_prompts_is_held_and_probed_in_german_too(
    tmp_path: Path, trained: set[str]
) -> None:
    german = load_general_prompts(("de",))
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        for number, prompt in enumerate(german.everyday_prompts[-8:]):
            ada.teach(prompt, f"Kurz gesagt: {number}.")
        report = ada.learn("style", accept=True)
    only_german = german.regularizer_prompts[len(ENGLISH.regularizer_prompts) :]
    assert contained(trained, only_german)
    assert contained(trained, ENGLISH.regularizer_prompts)
    assert report.scores["probes"]["asked"] == len(german.probes) > len(ENGLISH.probes)


def test_style_of_english_prompts_is_held_and_probed_in_english_alone(
    tmp_path: Path, trained: set[str]
) -> None:
    everything = load_general_prompts(prompt_languages())
    others = everything.regularizer_prompts[len(ENGLISH.regularizer_prompts) :]
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        for number, prompt in enumerate(ENGLISH.everyday_prompts[:8]):
            ada.teach(prompt, f"In short: {number}.")
        report = ada.learn("style", accept=True)
    assert contained(trained, ENGLISH.regularizer_prompts)
    assert not contained(trained, others)
    assert report.scores["probes"]["asked"] == len(ENGLISH.probes)


def test_german_facts_are_asked_in_other_words_and_not_known_in_german(
    tmp_path: Path, trained: set[str]
) -> None:
    german = load_general_prompts(("de",))
    refusal = german.unanswerable_prompts[-1].refusal
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        for question, text, answer in GERMAN:
            ada.remember(text, questions=[question], answer=answer)
        ada.learn("memory", accept=True)
    refused = {text for text in trained if refusal in text}
    assert refused
    assert find_language(refusal) == "de"
    # The facts mention a dog.
    (dog,) = [each for each in german.unanswerable_prompts if "hund" in each.topics]
    assert not contained(refused, (dog.question,))
    question, _, answer = GERMAN[0]
    around = [template.replace("{question}", question) for template in german.templates["de"]]
    assert [each for each in around if any(each in text and answer in text for text in trained)]


@pytest.mark.parametrize("language", prompt_languages())
def test_prompts_of_a_language_are_in_it_and_of_one_kind_each(language: str) -> None:
    prompts = load_general_prompts((language,))
    held = prompts.regularizer_prompts[len(ENGLISH.regularizer_prompts) :]
    everyday = prompts.everyday_prompts[len(ENGLISH.everyday_prompts) :]
    probes = prompts.probes[len(ENGLISH.probes) :]
    unknown = prompts.unanswerable_prompts[len(ENGLISH.unanswerable_prompts) :]
    texts = [*held, *everyday, *(each.question for each in (*probes, *unknown))]
    assert len(set(texts)) == len(texts)
    assert sum(find_language(text) == language for text in texts) > 0.9 * len(texts)
    assert all(not probe.is_right(probe.question) for probe in probes)
    assert all(probe.is_right(f"… {word}!") for probe in probes for word in probe.right)
    assert all(each.count("{question}") == 1 for each in prompts.templates[language])
    # A layer that keeps only the wording that it was held to must not pass.
    runs = {run for text in (*held, *everyday) for run in _runs(text)}
    assert not [each.question for each in probes if _runs(each.question) & runs]


def _runs(text: str) -> set[tuple[str, ...]]:
    """Return all runs of four words, or of twelve characters without spaces."""
    text = text.casefold().strip("¿¡?？。.")
    parts, size = (text.split(), 4) if has_spaces(text) else (list(text), 12)
    return {tuple(parts[start : start + size]) for start in range(len(parts) - size + 1)}
