"""A signal without training consent neither judges a revision nor decides what others teach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_makers import FakeTime, ask, correct, open_runtime

from personalpeft import User
from personalpeft.learning.data.lesson_assignment import MIN_THUMBS
from personalpeft.types import Turn


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def ada(home: Path) -> Iterator[User]:
    with open_runtime(home, clock=FakeTime().clock()) as runtime:
        yield runtime.user("ada")


def test_dislikes_without_consent_end_no_probation(ada: User) -> None:
    correct(ada, 5)
    assert ada.learn().probation
    live = ada.stack()
    for number in range(8):
        ada.feedback(ask(ada, f"later {number}"), rating=-1, train=False)
    assert (ada.stack(), ada.review_probation()) == (live, ())


def test_ratings_without_consent_do_not_count_among_those_that_dislikes_need(
    ada: User,
) -> None:
    for number in range(MIN_THUMBS):
        ada.feedback(ask(ada, f"question {number}"), rating=1)
    down = [
        ada.feedback(ask(ada, f"other {number}"), rating=-1, train=number > 0)
        for number in range(MIN_THUMBS)
    ]
    assert {each.layer for each in ada.signal_statuses() if each.signal.id in down} == {None}
    ada.feedback(ask(ada, "one more"), rating=-1)
    assert {each.layer for each in ada.signal_statuses() if each.signal.id in down[1:]} == {"style"}


@pytest.mark.parametrize(
    ("train", "layer"), [(True, "memory"), (False, None)], ids=["may train", "must not"]
)
def test_like_without_consent_trains_no_fact_that_helped(
    ada: User, train: bool, layer: str | None
) -> None:
    fact = ada.remember("My dog is called Biscuit.")
    helped: Turn | None = None
    for question in ("What is my dog called?", "How is my dog called?"):
        reply = ask(ada, question)
        # No tiny model says the fact, so the ledger gets a reply that contains it.
        helped = ada._services.store.ledger.add_turn(
            ada.id,
            messages=ada.turn(reply).messages,
            reply="It is Biscuit.",
            stack=reply.stack,
            sampling=ada.turn(reply).sampling,
            usage=reply.usage,
            finish_reason="stop",
            used=[fact],
            conversation_id=helped.conversation_id if helped else None,
            previous=helped.id if helped else None,
        )
    assert helped is not None
    # The newest of two turns helped only if it was liked.
    ada.feedback(helped.id, rating=1, train=train)
    (status,) = (each for each in ada.signal_statuses() if each.signal.id == fact)
    assert status.layer == layer
