"""What is pending: each lesson until a learn has considered it, and no longer; without a model being loaded."""

from __future__ import annotations

import pytest
from runtime_makers import correct

from personalpeft import Runtime, User
from personalpeft.learning import build
from personalpeft.learning.gate import Judgement
from personalpeft.types import Verdict


def keys(user: User, kind: str = "lesson") -> list[str]:
    return [news.key for news in user.pending().news if news.kind == kind]


def test_nothing_is_pending_of_who_said_nothing(ada: User) -> None:
    pending = ada.pending()
    assert (pending.news, pending.too_few, pending.learned, pending.seconds) == ((), {}, None, None)


def test_lessons_are_pending_until_a_learn_has_considered_them(ada: User) -> None:
    edits = correct(ada, 6)
    assert keys(ada) == edits
    report = ada.learn()
    pending = ada.pending()
    assert (pending.news, pending.learned) == ((), report.at)
    assert pending.seconds is not None
    assert keys(ada) == []
    more = correct(ada, 1, first=10)
    assert keys(ada) == more


def test_too_few_for_a_first_learn_are_not_news_and_all_are_once_there_are_enough(ada: User) -> None:
    edits = correct(ada, 3)
    assert (ada.pending().news, ada.pending().too_few) == ((), {"style": 3})
    ada.learn()
    edits += correct(ada, 1, first=10)
    assert keys(ada) == edits


def test_a_refused_learn_is_not_asked_for_again(ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    correct(ada, 6)
    monkeypatch.setattr(build, "judge", lambda evidence, margins, **more: Judgement(Verdict.REFUSED, "it is worse"))
    assert ada.learn().verdict == Verdict.REFUSED
    assert ada.pending().news == ()


def test_a_learn_that_its_budget_ended_goes_on_until_it_is_done(ada: User) -> None:
    correct(ada, 6)
    seen = set()
    for _ in range(3):
        ada.learn(steps=2)
        (key,) = keys(ada, "begun")
        seen.add(key)
        assert keys(ada) == []
    assert len(seen) == 3
    ada.learn()
    assert ada.pending().news == ()


def test_a_layer_over_one_that_was_rolled_back_is_pending_until_it_was_judged_again(ada: User) -> None:
    correct(ada, 6)
    ada.learn()
    ada.remember("My dog is called Biscuit.", questions=["What is my dog called?"], answer="Biscuit")
    (fact,) = ada.pending().news
    assert (fact.kind, fact.layer) == ("lesson", "memory")
    ada.learn()
    assert ada.pending().news == ()
    ada.rollback("style", None)
    (below,) = ada.pending().news
    assert (below.kind, below.layer) == ("below", "memory")
    ada.learn()
    assert ada.pending().news == ()


def test_asking_loads_no_model(runtime: Runtime, ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    ada.teach("hello", "Ahoy!")
    monkeypatch.setattr(runtime, "engine", lambda: pytest.fail("the model was loaded"))
    assert ada.pending().too_few == {"style": 1}
    assert ada.review() == ()
