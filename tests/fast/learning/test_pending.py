"""Pending triggers: each lesson until a learn has considered it, without loading a model."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from runtime_makers import ask, correct

from personalpeft import NothingToLearn, Runtime, User
from personalpeft.learning.gate import gate
from personalpeft.learning.gate.gate import Judgement
from personalpeft.learning.outcomes import LearnOutcome, ReasonCode, SignalUse, text_reason
from personalpeft.learning.status import Pending
from personalpeft.types import Verdict


def keys(user: User, kind: str = "lesson") -> list[str]:
    return [trigger.key for trigger in user.pending().triggers if trigger.kind == kind]


def tell(ada: User, animal: str, name: str) -> str:
    return ada.remember(
        f"My {animal} is called {name}.", questions=[f"What is my {animal} called?"], answer=name
    )


def test_user_without_signals_has_nothing_pending(ada: User) -> None:
    assert ada.pending() == Pending("ada")


def test_lessons_are_pending_until_a_learn_considered_them(ada: User) -> None:
    edits = correct(ada, 6)
    assert keys(ada) == edits
    report = ada.learn()
    pending = ada.pending()
    assert (pending.triggers, pending.last_learned_at) == ((), report.at)
    assert pending.mean_build_seconds is not None
    assert keys(ada) == []
    more = correct(ada, 1, first=10)
    assert keys(ada) == more


def test_too_few_lessons_for_a_first_learn_are_not_pending(
    ada: User,
) -> None:
    edits = correct(ada, 3)
    assert (ada.pending().triggers, ada.pending().too_few) == ((), {"style": 3})
    ada.learn()
    edits += correct(ada, 1, first=10)
    assert keys(ada) == edits


def test_what_waits_is_counted_and_named_without_what_was_tried(ada: User) -> None:
    assert ada.pending().text == "Nothing new to learn"
    correct(ada, 3)
    few = ada.pending()
    assert (few.lessons, few.since, few.is_unfinished) == (0, None, False)
    assert few.text.startswith("3 lessons so far")
    edits = correct(ada, 3, first=10)
    pending = ada.pending()
    assert pending.lessons == 6
    assert pending.since == min(each.at for each in pending.triggers if each.at)
    assert pending.without(edits).lessons == 3


def test_refused_learn_is_not_pending_again(ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    correct(ada, 6)
    monkeypatch.setattr(
        gate,
        "judge",
        lambda evidence, margins, **more: Judgement(Verdict.REFUSED, (text_reason("it is worse"),)),
    )
    assert ada.learn().verdict == Verdict.REFUSED
    assert ada.pending().triggers == ()


def test_learn_ended_by_its_budget_is_pending_until_done(ada: User) -> None:
    correct(ada, 6)
    seen = set()
    for _ in range(3):
        ada.learn(steps=2)
        (key,) = keys(ada, "unfinished")
        seen.add(key)
        assert keys(ada) == []
    assert len(seen) == 3
    ada.learn()
    assert ada.pending().triggers == ()


def test_layer_above_a_rollback_is_pending_until_revalidated(
    ada: User,
) -> None:
    correct(ada, 6)
    ada.learn()
    ada.remember(
        "My dog is called Biscuit.", questions=["What is my dog called?"], answer="Biscuit"
    )
    (fact,) = ada.pending().triggers
    assert (fact.kind, fact.layer) == ("lesson", "memory")
    ada.learn()
    assert ada.pending().triggers == ()
    ada.rollback("style", None)
    (below,) = ada.pending().triggers
    assert (below.kind, below.layer) == ("stack_below_changed", "memory")
    ada.learn()
    assert ada.pending().triggers == ()


def test_learn_ended_by_its_budget_stays_pending_after_later_lessons(
    ada: User,
) -> None:
    correct(ada, 6)
    tell(ada, "cat", "Momo")
    ada.learn()
    tell(ada, "dog", "Biscuit")
    ada.learn(steps=2)
    correct(ada, 6, first=20)
    ada.learn("style")
    assert "unfinished" in {
        trigger.kind for trigger in ada.pending().triggers if trigger.layer == "memory"
    }
    ada.learn()
    assert ada.pending().triggers == ()


@pytest.mark.exhaustive
def test_imported_layer_is_pending_once_and_stays(
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
    assert ada.pending().triggers == ()
    given = ada.layers()[-1].head
    correct(ada, 6, first=20)
    reports = ada.learn()
    assert reports.above[0].reasons[0].code is ReasonCode.NO_HOLDOUT
    assert ada.pending().triggers == ()
    # One demonstration is trained on top of the imported revision.
    ada.teach("write mail 10", "Dear Sir, mail 10. Yours.", skill="email")
    ada.learn()
    assert ada.revisions("skill.email")[-1].parent == given
    assert ada.pending().triggers == ()
    assert [report["layer"] for report in ada.reports()] == [
        "style",
        "style",
        "skill.email",
        "skill.email",
    ]
    assert len(ada.activity_summary().reports) == 4


@pytest.mark.exhaustive
def test_refusal_before_the_head_was_built_does_not_affect_the_head(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct(ada, 6)
    ada.learn()
    first = ada.layers()[0].head
    tell(ada, "dog", "Biscuit")
    with monkeypatch.context() as patch:
        patch.setattr(
            gate,
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
    assert [(trigger.kind, trigger.layer) for trigger in ada.pending().triggers] == [
        ("stack_below_changed", "memory")
    ]
    ada.learn()
    assert ada.pending().triggers == ()


def test_fact_that_helped_often_enough_is_pending_after_an_earlier_learn(
    ada: User,
) -> None:
    fact = ada.remember("My hamster is called Biscuit.")
    for n in range(3):
        tell(ada, f"pet {n}", f"Rex {n}")
    ada.learn()
    for question in ("What is my hamster called?", "How is my hamster called?"):
        turn = ada.turn(ask(ada, question))
        recorded = ada._services.store.ledger.add_turn(
            "ada",
            messages=turn.messages,
            reply="It is Biscuit.",
            stack=turn.stack,
            sampling=turn.sampling,
            usage=turn.usage,
            finish_reason="stop",
            used=[fact],
        )
        ada.feedback(recorded.id, rating=1)
    assert keys(ada) == [fact]


def test_pending_loads_no_model(
    runtime: Runtime, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada.teach("hello", "Ahoy!")
    monkeypatch.setattr(runtime, "engine", lambda: pytest.fail("the model was loaded"))
    assert ada.pending().too_few == {"style": 1}
    assert ada.review_probation() == ()


def test_lessons_that_no_learn_can_use_are_pending_until_one_learn(ada: User) -> None:
    correct(ada, 6)
    ada.learn()
    for number in range(9):
        ada.teach(f"{number} " * 3000, "Too long.")
    assert ada.pending().lessons == 9
    report = ada.learn()
    assert report.outcome is LearnOutcome.NOTHING_TO_LEARN
    assert "9 are too long" in report.reason
    assert ada.pending().lessons == 0
    uses = [status.use_code for status in ada.signal_statuses()]
    assert uses.count(SignalUse.TOO_LONG) == 9
    number = len(ada.reports())
    with pytest.raises(NothingToLearn):
        ada.learn()
    assert len(ada.reports()) == number


def test_what_is_pending_is_of_one_moment_while_another_thread_forgets(ada: User) -> None:
    correct(ada, 6)
    ada.learn()
    stop = threading.Event()
    problems: list[Exception] = []

    def read() -> None:
        while not stop.is_set():
            try:
                ada.pending()
                ada.signal_statuses(current=False)
            except Exception as error:  # noqa: BLE001 - the test shows what it was
                problems.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(6):
        (edit,) = correct(ada, 1, first=20 + number)
        ada.learn()
        ada.forget(edit)
    stop.set()
    for reader in readers:
        reader.join()
    assert problems == []
