"""General prompts similar to the lessons get few-shot replies; other prompts keep plain replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_makers import ask, open_runtime

from personalpeft import User
from personalpeft.learning.data.batching import build_batches
from personalpeft.learning.data.general_prompts import load_general_prompts
from personalpeft.learning.data.general_replies import (
    GeneralReplies,
    is_usable,
    similar_prompts,
)
from personalpeft.learning.data.lesson import MAX_EXAMPLES, Lesson, few_shot_messages
from personalpeft.learning.plan import Plan
from personalpeft.learning.train import loop
from personalpeft.learning.train.losses import ContextDistillationLoss
from personalpeft.memory.types import Vectors
from personalpeft.types import Message, SignalKind, ToolCall


def backend_of(room: float) -> Any:
    """Return a backend with a context of so many words, or of endless ones."""
    return SimpleNamespace(
        render=lambda messages: " ".join(each.content for each in messages).split(),
        max_length=room,
    )


def lesson(number: int, prompt: str = "", chosen: str = "") -> Lesson:
    messages = (Message("user", prompt or f"question {number}?"),)
    return Lesson(f"sig_{number}", SignalKind.EDIT, messages, chosen or f"answer {number}.")


def count_words(text: str) -> int:
    return len(text.split())


def unit_vectors(*degrees: float) -> Vectors:
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def test_prompts_among_the_lessons_are_similar_and_distant_ones_are_not() -> None:
    lessons = unit_vectors(0, 10, 20, 30)
    prompts = ("distant", "near", "nearer", "opposite")
    vectors = unit_vectors(90, 38, 15, 200)
    assert similar_prompts(prompts, vectors, lessons, 0.5) == ("nearer", "near")


def test_diverse_lessons_are_similar_to_more_prompts() -> None:
    prompts, vectors = ("a prompt",), unit_vectors(60)
    assert similar_prompts(prompts, vectors, unit_vectors(0, 10, 20, 30), 0.5) == ()
    assert similar_prompts(prompts, vectors, unit_vectors(0, 90, 180, 270), 0.5) == prompts


def test_three_lessons_are_too_few_to_compare() -> None:
    assert similar_prompts(("same",), unit_vectors(10), unit_vectors(10, 10, 10), 0.5) == ()


@given(st.lists(st.floats(0, 359), min_size=4, max_size=12), st.floats(0, 359), st.floats(0, 359))
def test_rotating_all_prompts_keeps_their_similarity(
    lessons: list[float], prompt: float, turn: float
) -> None:
    """Similarity is relative, so the topic of the texts makes no difference."""
    here = similar_prompts(("p",), unit_vectors(prompt), unit_vectors(*lessons), 0.5)
    there = similar_prompts(
        ("p",), unit_vectors(prompt + turn), unit_vectors(*(each + turn for each in lessons)), 0.5
    )
    vectors = unit_vectors(prompt) @ unit_vectors(*lessons).T
    between = unit_vectors(*lessons) @ unit_vectors(*lessons).T
    np.fill_diagonal(between, -1)
    is_close_call = abs(vectors.max() - np.median(between.max(axis=1))) < 1e-4
    assert here == there or is_close_call


def test_newest_lessons_are_the_examples_and_the_prompt_comes_last() -> None:
    lessons = [lesson(number) for number in range(MAX_EXAMPLES + 3)]
    messages = few_shot_messages(lessons, (Message("user", "And this?"),), backend_of(inf), 8)
    assert messages[-1] == Message("user", "And this?")
    assert messages[0] == Message("user", "question 3?")
    assert [each.role for each in messages] == ["user", "assistant"] * MAX_EXAMPLES + ["user"]


def test_an_example_of_a_later_turn_has_the_turns_before_it_and_answers_no_tool() -> None:
    turns = (Message("user", "Long?"), Message("assistant", "A long reply."))
    later = replace(
        lesson(1), messages=(Message("system", "Be nice."), *turns, *lesson(1).messages)
    )
    calls = (Message("assistant", "", (ToolCall("look", {}, "c"),)), Message("tool", "42"))
    with_tools = replace(lesson(2), messages=(Message("user", "Look."), *calls))
    examples = few_shot_messages([later, with_tools], (Message("user", "q"),), backend_of(inf), 8)
    assert [(each.role, each.content) for each in examples] == [
        ("user", "Long?"),
        ("assistant", "A long reply."),
        ("user", "question 1?"),
        ("assistant", lesson(1).chosen),
        ("user", "q"),
    ]


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(0, 200))
def test_few_shot_prompt_has_as_many_examples_as_fit(lengths: list[int], room: int) -> None:
    lessons = [lesson(n, "q " * size, "a " * size) for n, size in enumerate(lengths)]

    def fits(messages: Sequence[Message]) -> bool:
        return sum(count_words(each.content) for each in messages) <= room

    prompt = (Message("user", "prompt"),)
    *examples, last = few_shot_messages(lessons, prompt, backend_of(room + 8), 8)
    assert last.content == "prompt"
    assert not examples or fits([*examples, last])
    number = len(examples) // 2
    if number < min(len(lengths), MAX_EXAMPLES):
        assert 1 + 2 * sum(lengths[len(lengths) - number - 1 :]) > room


def test_truncated_or_repetitive_replies_are_not_trained_on() -> None:
    lessons, limit = [lesson(1, chosen="One two three.")], 8
    assert is_usable("Four five.", lessons, 2, limit)
    assert not is_usable("Four five", lessons, limit, limit)
    assert not is_usable(" One two three. ", lessons, 3, limit)
    assert not is_usable("go on and on " * 9, lessons, 5, limit)
    assert not is_usable("ぐるぐる回る" * 9, lessons, 5, limit)
    assert is_usable("水から入れて、沸騰してから八分ほどゆでてください。", lessons, 5, limit)
    assert not is_usable("", lessons, 0, limit)


EVERYDAY = [
    "How do I sing?",
    "Why do cats purr?",
    "What is a comet?",
    "Can I eat snow?",
    "Tell me about tea.",
    "What should I read?",
]


def correct(ada: User, prompts: list[str]) -> None:
    for number, prompt in enumerate(prompts):
        ada.feedback(ask(ada, prompt), edit=f"Well, number {number} it is.")


def record_general_replies(monkeypatch: pytest.MonkeyPatch) -> list[GeneralReplies]:
    seen: list[GeneralReplies] = []

    def recorded(plan: Plan, backend: Any, replies: GeneralReplies, *rest: Any) -> Any:
        seen.append(replies)
        return build_batches(plan, backend, replies, *rest)

    monkeypatch.setattr(loop, "build_batches", recorded)
    return seen


def test_edits_of_everyday_questions_reach_other_everyday_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_general_replies(monkeypatch)
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        correct(ada, EVERYDAY)
        ada.learn("style", accept=True)
    (replies,) = seen
    assert replies.few_shot
    assert all(len(messages) > 1 for messages, _ in replies.few_shot)
    assert replies.plain
    assert replies.free_start <= {prompt for prompt, _ in replies.plain}


def test_few_shot_replies_are_distilled_into_prompts_without_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ContextDistillationLoss] = []

    def recorded(*arguments: Any) -> Any:
        batches = build_batches(*arguments)
        losses = [loss for batch in batches for loss in batch]
        seen.extend(each for each in losses if isinstance(each, ContextDistillationLoss))
        return batches

    monkeypatch.setattr(loop, "build_batches", recorded)
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        correct(ada, EVERYDAY)
        ada.learn("style", accept=True)
    assert seen
    for loss in seen:
        assert loss.student.completion == loss.teacher.completion
        assert len(loss.student.prompt) < len(loss.teacher.prompt)


def test_edits_of_other_requests_do_not_reach_everyday_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_general_replies(monkeypatch)
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        notes = ["Bakery, Monday, nine", "Dentist, Monday, ten", "Cinema, Friday, nine"]
        correct(ada, [f"{note} {n}" for note in notes for n in range(2)])
        ada.learn("style", accept=True)
    (replies,) = seen
    assert not replies.few_shot
    assert not replies.free_start


def test_facts_add_no_few_shot_replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_general_replies(monkeypatch)
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        for number in range(5):
            questions = [f"What is my {thing} {number}?" for thing in ("cat", "dog", "hat", "cup")]
            ada.remember(f"Thing {number} is blue.", questions=questions, answer="blue")
        ada.learn("memory", accept=True)
    (replies,) = seen
    assert not replies.few_shot
    assert not replies.free_start


def test_a_memory_is_held_to_replies_to_everyday_prompts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Held to general questions alone, a memory answered everyday requests with its facts.
    seen = record_general_replies(monkeypatch)
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        for number in range(4):
            ada.remember(
                f"Thing {number} is blue.", questions=[f"What is {number}?"], answer="blue"
            )
        ada.learn("memory", accept=True)
    (replies,) = seen
    general = load_general_prompts()
    held = {prompt for prompt, _ in replies.plain}
    assert held == {*general.regularizer_prompts, *general.everyday_prompts}
