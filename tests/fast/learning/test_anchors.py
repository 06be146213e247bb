"""What a candidate is held to: what lies below, as far as it says something."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from backend_makers import fake_backend

from personalpeft.backends.base import Backend
from personalpeft.learning.data.response_template import ASKED, NO_MANNER, Manner, Shown, manner_of
from personalpeft.learning.train.regularizer import anchor
from personalpeft.types import Message

QUESTION = [Message("user", "What is the capital of Canada?")]
PIRATE = Manner("Ahoy! ", " Arrr!")


@pytest.fixture
def backend() -> Iterator[Backend]:
    backend = fake_backend(slots=1, rows=1)
    yield backend
    backend.close()


def test_the_manner_of_what_lies_below_is_no_sentence_of_its_own(backend: Backend) -> None:
    """Held to "Ahoy!" alone, a memory was free to say anything after it."""
    reply = "Ahoy! The capital is Ottawa. It is cold. Arrr!"
    held = anchor(backend, QUESTION, reply, NO_MANNER, 1.0, below=PIRATE, from_the_first=True)

    assert held is not None
    assert backend.decode(held.kept.completion) == "Ahoy! The capital is Ottawa."
    assert (held.first_kept, held.length) == (0, len(held.kept.completion))


def test_a_reply_that_is_not_in_that_manner_is_held_by_its_first_sentence(backend: Backend) -> None:
    held = anchor(
        backend, QUESTION, "The capital is Ottawa. It is cold.", NO_MANNER, 1.0, below=PIRATE
    )

    assert held is not None
    assert backend.decode(held.kept.completion) == "The capital is Ottawa."


def test_the_manner_is_what_most_texts_share() -> None:
    texts = [f"Ahoy! The {n}th is {n}. Arrr!" for n in range(4)]
    assert manner_of([*texts, "Something else."]) == PIRATE
    assert manner_of([]) == NO_MANNER


def test_answers_that_repeat_the_question_share_a_manner() -> None:
    requests = [f"What is number {n}?" for n in range(4)]
    shown = [Shown(request, f"Q: {request}\nA: It is {n}.") for n, request in enumerate(requests)]
    manner = manner_of([each.pattern for each in shown])

    assert manner == Manner(f"Q: {ASKED}\nA: ")
    assert [manner.dress(f"It is {n}.", request) for n, request in enumerate(requests)] == [
        s.answer for s in shown
    ]


def test_an_anchor_repeats_its_own_question_where_the_lessons_do(backend: Backend) -> None:
    manner = Manner(f"Q: {ASKED}\nA: ")
    held = anchor(backend, QUESTION, "The capital is Ottawa. It is cold.", manner, 1.0)

    assert held is not None
    assert (
        backend.decode(held.said.completion)
        == "Q: What is the capital of Canada?\nA: The capital is Ottawa."
    )
    run = slice(held.first_said, held.first_said + held.length)
    assert "capital is Ottawa." in backend.decode(held.said.completion[run])


def test_a_word_or_two_that_an_answer_has_too_is_no_repetition() -> None:
    assert Shown("Hi", "Hi there, Hi again.").pattern == "Hi there, Hi again."
