"""What a candidate is held to: what lies below, as far as it says something."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from backend_makers import fake_backend

from personalpeft.backends.base import Backend
from personalpeft.learning.data.style import (
    NO_TEMPLATE,
    REQUEST_PLACEHOLDER,
    PromptResponse,
    ResponseTemplate,
    infer_template,
)
from personalpeft.learning.train.losses import make_kl_regularizer
from personalpeft.types import Message

QUESTION = [Message("user", "What is the capital of Canada?")]
PIRATE = ResponseTemplate("Ahoy! ", " Arrr!")


@pytest.fixture
def backend() -> Iterator[Backend]:
    backend = fake_backend(slots=1, rows=1)
    yield backend
    backend.close()


def test_the_manner_of_what_lies_below_is_no_sentence_of_its_own(backend: Backend) -> None:
    """Held to "Ahoy!" alone, a memory was free to say anything after it."""
    reply = "Ahoy! The capital is Ottawa. It is cold. Arrr!"
    held = make_kl_regularizer(
        backend, QUESTION, reply, NO_TEMPLATE, 1.0, below=PIRATE, from_the_first=True
    )

    assert held is not None
    assert backend.decode(held.reference.completion) == "Ahoy! The capital is Ottawa."
    assert (held.reference_start, held.length) == (0, len(held.reference.completion))


def test_a_reply_that_is_not_in_that_manner_is_held_by_its_first_sentence(backend: Backend) -> None:
    held = make_kl_regularizer(
        backend, QUESTION, "The capital is Ottawa. It is cold.", NO_TEMPLATE, 1.0, below=PIRATE
    )

    assert held is not None
    assert backend.decode(held.reference.completion) == "The capital is Ottawa."


def test_the_manner_is_what_most_texts_share() -> None:
    texts = [f"Ahoy! The {n}th is {n}. Arrr!" for n in range(4)]
    assert infer_template([*texts, "Something else."]) == PIRATE
    assert infer_template([]) == NO_TEMPLATE


def test_answers_that_repeat_the_question_share_a_manner() -> None:
    requests = [f"What is number {n}?" for n in range(4)]
    shown = [
        PromptResponse(request, f"Q: {request}\nA: It is {n}.")
        for n, request in enumerate(requests)
    ]
    manner = infer_template([each.pattern for each in shown])

    assert manner == ResponseTemplate(f"Q: {REQUEST_PLACEHOLDER}\nA: ")
    assert [manner.apply(f"It is {n}.", request) for n, request in enumerate(requests)] == [
        s.answer for s in shown
    ]


def test_an_anchor_repeats_its_own_question_where_the_lessons_do(backend: Backend) -> None:
    manner = ResponseTemplate(f"Q: {REQUEST_PLACEHOLDER}\nA: ")
    held = make_kl_regularizer(backend, QUESTION, "The capital is Ottawa. It is cold.", manner, 1.0)

    assert held is not None
    assert (
        backend.decode(held.student.completion)
        == "Q: What is the capital of Canada?\nA: The capital is Ottawa."
    )
    run = slice(held.student_start, held.student_start + held.length)
    assert "capital is Ottawa." in backend.decode(held.student.completion[run])


def test_a_word_or_two_that_an_answer_has_too_is_no_repetition() -> None:
    assert PromptResponse("Hi", "Hi there, Hi again.").pattern == "Hi there, Hi again."
