"""A fact's short answer is judged by its own words, whatever the manner in which it is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import ask, opened

from personalpeft import User
from personalpeft.backends.base import Backend, Continuation, Loss, Score
from personalpeft.engine.engine import Engine
from personalpeft.learning import pipeline
from personalpeft.learning.data.batching import build_batches
from personalpeft.learning.data.facts import memorized
from personalpeft.learning.plan import Plan
from personalpeft.types import Stack

LEAD = "You asked: "
QUESTIONS = ["What is my dog called?", "What is my dog's name?"]


def tell(ada: User) -> str:
    return ada.remember("My dog is called Biscuit.", questions=QUESTIONS, answer="Biscuit")


def correct(ada: User, manner: str = LEAD + "{} I say: {} Bye for now.", first: int = 0) -> None:
    for number in range(first, first + 6):
        question = f"Is this question {number}?"
        ada.feedback(ask(ada, question), edit=manner.format(question, f"It is {number}."))


def scored(monkeypatch: pytest.MonkeyPatch, words: float, manner: Mapping[bool, float]) -> None:
    """Makes Biscuit as likely as ``words`` a token to every layer, and the manner around it as ``manner`` to a stack with a memory and
    to one without.
    """
    score = Engine.score

    def score_them(
        self: Any, items: Sequence[Continuation], stack: Stack, **more: Any
    ) -> tuple[Score, ...]:
        has_memory = any(entry.layer == "memory" for entry in stack.entries)
        found = list(score(self, items, stack, **more))
        for place, item in enumerate(items):
            said = self.backend.decode(item.completion)
            before, biscuit, after = said.partition(
                " Biscuit." if " Biscuit." in said else "Biscuit."
            )
            if biscuit:
                around = manner[has_memory] if stack.entries else -9.0
                own = words if stack.entries else -9.0
                tokens = (
                    *[around] * len(before),
                    *[own] * len(biscuit),
                    *[around] * len(after),
                    own,
                )
                found[place] = Score(sum(tokens) / len(tokens), found[place].kl, tokens)
        return tuple(found)

    monkeypatch.setattr(Engine, "score", score_them)


def pin(ada: User) -> float:
    (said,) = (
        said for key, said in ada.revisions("memory")[-1].scores["pins"].items() if "/" in key
    )
    likelihood: float = said["after"]
    return likelihood


@pytest.mark.parametrize("manner", [0.0, -9.0])
@pytest.mark.parametrize("words", [-0.1, -1.0])
def test_a_fact_is_known_by_heart_by_its_own_words_and_not_by_the_manner_around_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: float, manner: float
) -> None:
    with opened(tmp_path) as runtime:
        ada = runtime.user("ada")
        correct(ada)
        ada.learn("style", accept=True)
        fact = tell(ada)
        scored(monkeypatch, words, {True: manner, False: manner})
        ada.learn("memory", accept=True)
        assert pin(ada) == words
        assert memorized(ada.revisions("memory")[-1]) == ({fact} if words > -0.2 else set())


@pytest.mark.parametrize(("to_memory", "held"), [(-0.01, 1), (-5.0, 0)])
def test_a_memory_that_speaks_in_an_older_manner_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_memory: float, held: int
) -> None:
    with opened(tmp_path) as runtime:
        ada = runtime.user("ada")
        correct(ada)
        ada.learn("style", accept=True)
        tell(ada)
        scored(monkeypatch, -0.1, {True: to_memory, False: -0.01})
        ada.learn("memory", accept=True)
        correct(ada, "As you wish, my friend: {1} ({0})", first=6)
        (memory,) = ada.learn("style", accept=True).above
        assert memory.reasons[0].data["valid"] == held


def test_however_a_question_is_put_its_answer_repeats_it_as_the_manner_below_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies below repeats what was asked; a memory that is taught to repeat something else speaks against it."""
    asked: set[tuple[str, str]] = set()

    def noted(plan: Plan, backend: Backend, generic: Any) -> tuple[tuple[Loss, ...], ...]:
        steps = build_batches(plan, backend, generic)
        for said in (c for terms in steps for term in terms for c in term.continuations):
            asked.add((backend.decode(said.prompt), backend.decode(said.completion)))
        return steps

    with opened(tmp_path) as runtime:
        ada = runtime.user("ada")
        correct(ada)
        ada.learn("style", accept=True)
        tell(ada)
        monkeypatch.setattr(pipeline, "build_batches", noted)
        ada.learn("memory", accept=True)
    answers = [(prompt, answer) for prompt, answer in asked if "Biscuit." in answer]
    assert len(answers) > len(QUESTIONS)
    for prompt, answer in answers:
        assert answer.removeprefix(LEAD).partition(" I say: ")[0] in prompt
