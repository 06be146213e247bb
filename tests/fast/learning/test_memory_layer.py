"""The memory layer, by what a user sees of it, on the tiny base and on the fake backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import ask, correct, opened, pinned, quick_card, style, trained_on

from personalpeft import NothingToLearn, Runtime, User
from personalpeft.errors import NothingCause
from personalpeft.learning.data.facts import memorized
from personalpeft.learning.learner import Learner
from personalpeft.learning.options import LearnOptions
from personalpeft.learning.pipeline import TrainingPipeline
from personalpeft.learning.plan import Plan
from personalpeft.types import Revision, Verdict

FACTS = {"dog": "Biscuit", "cat": "Momo", "horse": "Hector"}


@pytest.fixture(params=["fake", pytest.param("torch", marks=pytest.mark.exhaustive)])
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runtime]:
    if request.param == "torch":
        request.getfixturevalue("tiny_base")
    base = "fake" if request.param == "fake" else quick_card(tmp_path)
    with opened(tmp_path / "home", base) as runtime:
        yield runtime


@pytest.fixture
def ada(runtime: Runtime) -> User:
    return runtime.user("ada")


def tell(ada: User, animal: str, name: str) -> str:
    questions = [f"What is my {animal} called?", f"What is my {animal}'s name?"]
    return ada.remember(f"My {animal} is called {name}.", questions=questions, answer=name)


def test_one_fact_is_enough_to_learn_from_and_all_that_was_said_of_it_is_learned(ada: User) -> None:
    fact = tell(ada, "dog", "Biscuit")
    report = ada.learn("memory", accept=True)

    assert report.revision is not None
    assert trained_on(ada) == {fact}
    assert pinned(ada) == set()
    assert report.scores["target"]["asked"] == 1


def test_a_fact_acts_at_once_and_says_in_its_account_whether_it_was_learned(ada: User) -> None:
    tell(ada, "dog", "Biscuit")
    before = ada.lessons()[0]
    ada.learn("memory", accept=True)
    after = ada.lessons()[0]

    assert (before.place, before.layer, before.use) == ("memory", "memory", "to be learned")
    assert (after.place, after.use) == ("memory", "learned")
    assert ask(ada, "What is my dog called?").text is not None
    assert ada.turns(1)[0].used == (after.signal.id,)


@pytest.mark.parametrize("runtime", ["fake", "torch"], indirect=True)
def test_facts_told_later_are_learned_on_top_and_the_earlier_ones_are_asked_again(
    ada: User,
) -> None:
    tell(ada, "dog", "Biscuit")
    first = ada.learn("memory", accept=True)
    tell(ada, "cat", "Momo")
    second = ada.learn("memory", accept=True)

    assert ada.revisions("memory")[-1].parent == first.revision
    assert second.scores["target"]["asked"] == second.scores["retention"]["asked"] == 1


def test_a_fact_with_another_answer_to_its_questions_is_learned_over_the_old_one(ada: User) -> None:
    old = tell(ada, "dog", "Biscuit")
    kept = tell(ada, "cat", "Momo")
    first = ada.learn("memory", accept=True)
    new = ada.edit_item(old, "My dog is called Rex.", answer="Rex")
    ada.learn("memory", accept=True)
    later = tell(ada, "dog", "Hasso")
    ada.learn("memory", accept=True)

    second, third = ada.revisions("memory")[-2:]
    assert (second.parent, third.parent) == (first.revision, second.id)
    assert {s for s, role in second.signals.items() if role == "train"} == {new.id, kept}
    assert {s for s, role in third.signals.items() if role == "train"} == {later, kept}


def test_a_fact_that_leaves_a_question_without_an_answer_is_built_without_its_old_value(
    ada: User,
) -> None:
    old = tell(ada, "dog", "Biscuit")
    kept = tell(ada, "cat", "Momo")
    ada.learn("memory", accept=True)
    new = ada.edit_item(old, "Nobody barks here.", questions=["Who barks?"], answer="nobody")
    ada.learn("memory", accept=True)

    newest = ada.revisions("memory")[-1]
    assert newest.parent is None
    assert set(newest.signals) == {new.id, kept}


@pytest.mark.parametrize("runtime", ["fake", "torch"], indirect=True)
def test_a_fact_that_was_taken_back_can_be_unlearned(ada: User) -> None:
    gone = tell(ada, "dog", "Biscuit")
    tell(ada, "cat", "Momo")
    ada.learn("memory", accept=True)
    ada.remove_item(gone)
    ada.learn("memory", start="nothing", accept=True)

    assert gone not in ada.revisions("memory")[-1].signals


def test_a_memory_is_said_in_the_manner_of_the_style_below_it(ada: User) -> None:
    correct(ada)
    ada.learn("style", accept=True)
    tell(ada, "dog", "Biscuit")
    report = ada.learn("memory", dry_run=False, accept=True)

    revision = ada.revisions("memory")[-1]
    assert [entry.layer for entry in revision.below] == ["style"]
    assert report.revision == revision.id
    assert style("Biscuit.") in _wanted(ada)


def _wanted(ada: User) -> set[str]:
    from personalpeft.learning.data.assignment import load_assignments
    from personalpeft.learning.plan import holdout_of

    store = ada._services.store
    return {
        q.chosen
        for q in holdout_of(store, ada.id, ada.stack(), "memory", load_assignments(store, ada.id))
    }


def test_where_nothing_is_known_to_be_learned_of_facts_it_is_said(ada: User) -> None:
    ada.remember("My dog is called Biscuit.")
    with pytest.raises(NothingToLearn):
        ada.learn("memory")


@pytest.mark.parametrize("runtime", ["fake", "torch"], indirect=True)
def test_a_memory_is_for_what_is_near_to_it_and_general_questions_are_judged_so(ada: User) -> None:
    for animal, name in FACTS.items():
        tell(ada, animal, name)
    report = ada.learn("memory", accept=True)

    assert {layer.name: layer.scope for layer in ada.layers()}["memory"] == "near"
    canaries = report.scores["canaries"]
    assert canaries["still_right"] == canaries["right_before"]
    assert report.verdict is not Verdict.ABSTAINED


def test_what_the_memory_knows_by_heart_is_not_looked_up_where_it_answers(ada: User) -> None:
    fact = tell(ada, "dog", "Biscuit")
    ada.learn("memory", accept=True)

    def looked_up(**more: Any) -> set[str]:
        ask(ada, "What is my dog called?", **more)
        return set(ada.turns(1)[0].used)

    assert looked_up(layers=["memory"]) == {fact} - memorized(ada.revisions("memory")[-1])
    assert looked_up(layers=[]) == {fact}
    ada.set_weight("memory", 0.5)
    assert looked_up(layers=["memory"]) == {fact}


def test_by_heart_is_what_was_likely_when_it_was_asked_and_trained_on(ada: User) -> None:
    tell(ada, "dog", "Biscuit")
    ada.learn("memory", accept=True)
    (head,) = ada.revisions("memory")
    (fact,) = head.signals

    def with_after(after: float | None) -> Revision:
        return replace(
            head, scores={"pins": {f"{fact}/12345678": {"after": after}, "s_other": {"after": 0.0}}}
        )

    assert memorized(with_after(-0.1)) == {fact}
    assert memorized(with_after(-1.0)) == memorized(with_after(None)) == frozenset()


def test_however_many_facts_there_are_each_is_trained_on_and_none_becomes_a_question(
    ada: User,
) -> None:
    """Sixty-four lessons are replayed at most; a fact whose lessons were not among them became a question for ever."""
    ways = ("Who is {}?", "Name {}.", "Tell me of {}.")
    facts = {
        ada.remember(
            f"a{n} is b{n}.", questions=[way.format(f"a{n}") for way in ways], answer=f"b{n}"
        )
        for n in range(24)
    }
    ada.learn("memory", accept=True)
    facts.add(tell(ada, "dog", "Biscuit"))
    ada.learn("memory", accept=True)

    assert pinned(ada) == set()
    assert trained_on(ada) == facts
    ada.learn("memory", start="nothing", accept=True)
    assert set(ada.revisions("memory")[-1].signals.values()) == {"train"}


def test_what_a_later_fact_contradicts_is_not_looked_up(ada: User) -> None:
    old = tell(ada, "dog", "Biscuit")
    new = tell(ada, "dog", "Rex")
    ask(ada, "What is my dog called?")

    assert ada.turns(1)[0].used == (new,)
    assert {item.id for item in ada.items()} == {new}
    # It is still there to be taken back, and counts again once nothing contradicts it.
    ada.remove_item(new)
    assert {item.id for item in ada.items()} == {old}
    ada.remove_item(old)
    assert ada.items() == ()


def test_where_only_questions_are_left_it_is_said(ada: User) -> None:
    edits = correct(ada, 12)
    ada.learn("style", accept=True)
    held = pinned(ada)
    for turn in ada.turns():
        for signal in ada.signals():
            if signal.turn == turn.id and signal.id in edits and signal.id not in held:
                ada._services.store.ledger.retract(ada.id, signal.id)
    ada.rollback("style", None)
    with pytest.raises(NothingToLearn) as nothing:
        ada.learn("style", start="nothing")
    assert nothing.value.cause is NothingCause.ALL_HELD_OUT


def test_a_fact_that_helped_twice_is_distilled_from_what_was_said_with_it(ada: User) -> None:
    fact = ada.remember("My dog is called Biscuit.")
    for question in ("What is my dog called?", "How is my dog called?"):
        reply = ask(ada, question)
        # What a tiny model says of it is nothing; that the reply told the fact is what the ledger is made to hold.
        helped = ada._services.store.ledger.add_turn(
            ada.id,
            messages=ada.turn(reply).messages,
            reply="It is Biscuit.",
            stack=reply.stack,
            sampling=ada.turn(reply).sampling,
            usage=reply.usage,
            finish_reason="stop",
            used=[fact],
        )
        ada.feedback(helped.id, rating=1)
    report = ada.learn("memory", accept=True)

    assert report.revision is not None
    assert ada.revisions("memory")[-1].signals == {fact: "train"}
    plan = _plan(ada)
    assert {lesson.chosen for lesson in plan.new_examples} == {"It is Biscuit."}
    assert all(
        "Biscuit" in (lesson.teacher_messages or ())[0].content for lesson in plan.new_examples
    )
    assert not any(
        "Biscuit" in message.content for lesson in plan.new_examples for message in lesson.messages
    )


def _plan(ada: User) -> Plan:
    """What would be built from nothing."""
    learner = Learner.from_services(ada._services)
    pipeline = TrainingPipeline(
        learner.services, learner.margins, learner.recipes, LearnOptions(), 0.0
    )
    return pipeline.plan(ada.id, "memory", "nothing")
