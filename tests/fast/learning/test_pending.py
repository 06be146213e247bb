"""What is pending: each lesson until a learn has considered it, and no longer; without a model being loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime_makers import ask, correct

from personalpeft import Runtime, User
from personalpeft.learning import pipeline
from personalpeft.learning.gate.gate import Judgement
from personalpeft.learning.outcomes import ReasonCode, text_reason
from personalpeft.types import Verdict


def keys(user: User, kind: str = "lesson") -> list[str]:
    return [news.key for news in user.pending().news if news.kind == kind]


def tell(ada: User, animal: str, name: str) -> str:
    return ada.remember(
        f"My {animal} is called {name}.", questions=[f"What is my {animal} called?"], answer=name
    )


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


def test_too_few_for_a_first_learn_are_not_news_and_all_are_once_there_are_enough(
    ada: User,
) -> None:
    edits = correct(ada, 3)
    assert (ada.pending().news, ada.pending().too_few) == ((), {"style": 3})
    ada.learn()
    edits += correct(ada, 1, first=10)
    assert keys(ada) == edits


def test_a_refused_learn_is_not_asked_for_again(ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    correct(ada, 6)
    monkeypatch.setattr(
        pipeline,
        "judge",
        lambda evidence, margins, **more: Judgement(Verdict.REFUSED, (text_reason("it is worse"),)),
    )
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


def test_a_layer_over_one_that_was_rolled_back_is_pending_until_it_was_judged_again(
    ada: User,
) -> None:
    correct(ada, 6)
    ada.learn()
    ada.remember(
        "My dog is called Biscuit.", questions=["What is my dog called?"], answer="Biscuit"
    )
    (fact,) = ada.pending().news
    assert (fact.kind, fact.layer) == ("lesson", "memory")
    ada.learn()
    assert ada.pending().news == ()
    ada.rollback("style", None)
    (below,) = ada.pending().news
    assert (below.kind, below.layer) == ("below", "memory")
    ada.learn()
    assert ada.pending().news == ()


def test_a_learn_that_its_budget_ended_is_not_forgotten_over_what_came_in_between(
    ada: User,
) -> None:
    correct(ada, 6)
    tell(ada, "cat", "Momo")
    ada.learn()
    tell(ada, "dog", "Biscuit")
    ada.learn(steps=2)
    correct(ada, 6, first=20)
    ada.learn("style")
    assert "begun" in {news.kind for news in ada.pending().news if news.layer == "memory"}
    ada.learn()
    assert ada.pending().news == ()


def test_a_layer_that_somebody_gave_is_asked_about_once_and_stays(
    ada: User, runtime: Runtime, tmp_path: Path
) -> None:
    bo = runtime.user("bo")
    for n in range(6):
        bo.teach(f"write mail {n}", f"Dear Sir, mail {n}. Yours.", skill="email")
    bo.learn()
    folder = bo.export_peft(tmp_path / "email", layer="skill.email")
    correct(ada, 6)
    ada.learn()
    ada.import_peft(folder, layer="skill.email")
    assert ada.pending().news == ()
    given = ada.layers()[-1].head
    correct(ada, 6, first=20)
    reports = ada.learn()
    assert reports.above[0].reasons[0].code is ReasonCode.NO_HOLDOUT
    assert ada.pending().news == ()
    # One demonstration is learned on top of it.
    ada.teach("write mail 10", "Dear Sir, mail 10. Yours.", skill="email")
    ada.learn()
    assert ada.revisions("skill.email")[-1].parent == given
    assert ada.pending().news == ()
    assert [report["layer"] for report in ada.reports()] == [
        "style",
        "style",
        "skill.email",
        "skill.email",
    ]
    assert len(ada.activity_summary().reports) == 4


def test_a_refusal_before_the_head_was_built_says_nothing_of_the_head(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct(ada, 6)
    ada.learn()
    first = ada.layers()[0].head
    tell(ada, "dog", "Biscuit")
    with monkeypatch.context() as patch:
        patch.setattr(
            pipeline,
            "judge",
            lambda evidence, margins, **more: Judgement(
                Verdict.REFUSED, (text_reason("it is worse"),)
            ),
        )
        ada.learn()
    correct(ada, 4, first=20)
    tell(ada, "horse", "Bella")
    ada.learn(accept=True)
    ada.rollback("style", first)
    assert [(news.kind, news.layer) for news in ada.pending().news] == [("below", "memory")]
    ada.learn()
    assert ada.pending().news == ()


def test_a_fact_that_helped_often_enough_is_pending_though_a_learn_has_seen_it_before(
    ada: User,
) -> None:
    fact = ada.remember("My hamster is called Biscuit.")
    for n in range(3):
        tell(ada, f"pet {n}", f"Rex {n}")
    ada.learn()
    for question in ("What is my hamster called?", "How is my hamster called?"):
        turn = ada.turn(ask(ada, question))
        said = ada._services.store.ledger.add_turn(
            "ada",
            messages=turn.messages,
            reply="It is Biscuit.",
            stack=turn.stack,
            sampling=turn.sampling,
            usage=turn.usage,
            finish_reason="stop",
            used=[fact],
        )
        ada.feedback(said.id, rating=1)
    assert keys(ada) == [fact]


def test_asking_loads_no_model(
    runtime: Runtime, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada.teach("hello", "Ahoy!")
    monkeypatch.setattr(runtime, "engine", lambda: pytest.fail("the model was loaded"))
    assert ada.pending().too_few == {"style": 1}
    assert ada.review() == ()
