"""The memory layer through the public surface, on the tiny base and the fake backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_makers import ask, correct, open_runtime, pinned, quick_card, trained_on

from personalpeft import NothingToLearn, Runtime, User
from personalpeft.errors import NothingCause
from personalpeft.learning.layers import inspect_live_layer
from personalpeft.learning.learner import Learner
from personalpeft.learning.outcomes import SignalUse
from personalpeft.learning.plan import Plan, build_plan
from personalpeft.types import Verdict

FACTS = {"dog": "Biscuit", "cat": "Momo", "horse": "Hector"}


@pytest.fixture(params=["fake", pytest.param("torch", marks=pytest.mark.exhaustive)])
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runtime]:
    if request.param == "torch":
        request.getfixturevalue("tiny_base")
    base = "fake" if request.param == "fake" else quick_card(tmp_path)
    with open_runtime(tmp_path / "home", base) as runtime:
        yield runtime


@pytest.fixture
def ada(runtime: Runtime) -> User:
    return runtime.user("ada")


def tell(ada: User, animal: str, name: str) -> str:
    questions = [f"What is my {animal} called?", f"What is my {animal}'s name?"]
    return ada.remember(f"My {animal} is called {name}.", questions=questions, answer=name)


def test_one_fact_is_enough_to_learn_and_trains_all_its_questions(ada: User) -> None:
    fact = tell(ada, "dog", "Biscuit")
    report = ada.learn("memory", accept=True)

    assert report.revision is not None
    assert trained_on(ada) == {fact}
    assert pinned(ada) == set()
    assert report.scores["target"]["asked"] == 1


def test_fact_is_retrieved_at_once_and_its_status_says_whether_it_was_trained(ada: User) -> None:
    tell(ada, "dog", "Biscuit")
    before = ada.signal_statuses()[0]
    ada.learn("memory", accept=True)
    after = ada.signal_statuses()[0]

    assert (before.place, before.layer, before.use_code) == ("memory", "memory", SignalUse.PENDING)
    assert (after.place, after.use_code) == ("memory", SignalUse.LEARNED)
    assert ask(ada, "What is my dog called?").text is not None
    assert ada.turns(1)[0].used == (after.signal.id,)


def test_later_facts_train_on_top_and_earlier_ones_are_evaluated_again(
    ada: User,
) -> None:
    tell(ada, "dog", "Biscuit")
    first = ada.learn("memory", accept=True)
    tell(ada, "cat", "Momo")
    second = ada.learn("memory", accept=True)

    assert ada.revisions("memory")[-1].parent == first.revision
    assert second.scores["target"]["asked"] == second.scores["retention"]["asked"] == 1


def test_steps_grow_with_the_facts_and_not_with_their_questions(ada: User) -> None:
    recipe = {"min_steps": 10, "batch_size": 1, "min_steps_batches": 2}
    for animal, name in FACTS.items():
        tell(ada, animal, name)

    report = ada.learn("memory", accept=True, recipe=recipe)
    assert len(report.sources) == len(FACTS)
    assert report.steps == 15


def test_a_few_facts_on_a_parent_take_a_few_steps(ada: User) -> None:
    recipe = {"min_steps": 10, "batch_size": 1}
    tell(ada, "dog", "Biscuit")
    ada.learn("memory", accept=True, recipe=recipe)
    tell(ada, "cat", "Momo")
    assert ada.learn("memory", accept=True).steps == 10


def test_fact_with_a_new_answer_supersedes_the_old_one(ada: User) -> None:
    old = tell(ada, "dog", "Biscuit")
    kept = tell(ada, "cat", "Momo")
    first = ada.learn("memory", accept=True)
    new = ada.edit_item(old, "My dog is called Rex.", answer="Rex")
    ada.learn("memory", accept=True)
    later = tell(ada, "dog", "Hasso")
    ada.learn("memory", accept=True)

    second, third = ada.revisions("memory")[-2:]
    assert (second.parent, third.parent) == (first.revision, second.id)
    assert {s for s, role in second.signals.items() if role == "trained"} == {new.id, kept}
    assert {s for s, role in third.signals.items() if role == "trained"} == {later, kept}


def test_fact_that_loses_its_answer_is_rebuilt_without_the_old_value(
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


def test_retracted_fact_can_be_removed_from_the_layer(ada: User) -> None:
    retracted = tell(ada, "dog", "Biscuit")
    tell(ada, "cat", "Momo")
    ada.learn("memory", accept=True)
    ada.retract_item(retracted)
    ada.learn("memory", start="scratch", accept=True)

    assert retracted not in ada.revisions("memory")[-1].signals


def test_memory_is_built_on_the_style_below(ada: User) -> None:
    correct(ada)
    ada.learn("style", accept=True)
    tell(ada, "dog", "Biscuit")
    report = ada.learn("memory", accept=True)

    revision = ada.revisions("memory")[-1]
    assert [entry.layer for entry in revision.below] == ["style"]
    assert report.revision == revision.id


def test_facts_without_trainable_questions_raise_nothing_to_learn(ada: User) -> None:
    ada.remember("My dog is called Biscuit.")
    with pytest.raises(NothingToLearn):
        ada.learn("memory")


def test_memory_is_scoped_near_and_general_probes_are_judged_without_it(ada: User) -> None:
    for animal, name in FACTS.items():
        tell(ada, animal, name)
    report = ada.learn("memory", accept=True)

    assert {layer.name: layer.scope for layer in ada.layers()}["memory"] == "near"
    canaries = report.scores["probes"]
    assert canaries["still_right"] == canaries["right_before"]
    assert report.verdict not in (None, Verdict.ABSTAINED)


def test_trained_fact_is_still_retrieved(ada: User) -> None:
    fact = tell(ada, "dog", "Biscuit")
    ada.learn("memory", accept=True)
    for layers in (["memory"], []):
        ask(ada, "What is my dog called?", layers=layers)
        assert ada.turns(1)[0].used == (fact,)


def test_all_facts_are_trained_and_none_becomes_held_out(
    ada: User,
) -> None:
    """Replay is limited to 64 lessons. Facts outside it once became held out for good."""
    templates = ("Who is {}?", "Name {}.", "Tell me of {}.")
    facts = {
        ada.remember(
            f"a{n} is b{n}.",
            questions=[template.format(f"a{n}") for template in templates],
            answer=f"b{n}",
        )
        for n in range(24)
    }
    ada.learn("memory", accept=True)
    facts.add(tell(ada, "dog", "Biscuit"))
    ada.learn("memory", accept=True)

    assert pinned(ada) == set()
    assert trained_on(ada) == facts
    ada.learn("memory", start="scratch", accept=True)
    assert set(ada.revisions("memory")[-1].signals.values()) == {"trained"}


def test_contradicted_fact_is_not_retrieved(ada: User) -> None:
    old = tell(ada, "dog", "Biscuit")
    new = tell(ada, "dog", "Rex")
    ask(ada, "What is my dog called?")

    assert ada.turns(1)[0].used == (new,)
    assert {item.id for item in ada.items()} == {new}
    # The older fact can still be retracted, and counts again once nothing contradicts it.
    ada.retract_item(new)
    assert {item.id for item in ada.items()} == {old}
    ada.retract_item(old)
    assert ada.items() == ()


def test_layer_with_only_held_out_questions_raises_nothing_to_learn(ada: User) -> None:
    edits = correct(ada, 12)
    ada.learn("style", accept=True)
    held = pinned(ada)
    for turn in ada.turns():
        for signal in ada.signals():
            if signal.turn == turn.id and signal.id in edits and signal.id not in held:
                ada._services.store.ledger.retract(ada.id, signal.id)
    ada.rollback("style", None)
    with pytest.raises(NothingToLearn) as nothing:
        ada.learn("style", start="scratch")
    assert nothing.value.cause is NothingCause.ALL_HELD_OUT


def test_fact_that_helped_twice_is_distilled_from_those_replies(ada: User) -> None:
    fact = ada.remember("My dog is called Biscuit.")
    for question in ("What is my dog called?", "How is my dog called?"):
        reply = ask(ada, question)
        # The tiny model writes noise, so the ledger gets a reply that contains the fact.
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
    assert ada.revisions("memory")[-1].signals == {fact: "trained"}
    plan = _plan(ada)
    assert {lesson.chosen for lesson in plan.new_examples} == {"It is Biscuit."}
    assert all(
        "Biscuit" in (lesson.teacher_messages or ())[-1].content for lesson in plan.new_examples
    )
    assert not any(
        "Biscuit" in message.content for lesson in plan.new_examples for message in lesson.messages
    )


def _plan(ada: User) -> Plan:
    """Return the plan of a build from scratch."""
    learner = Learner.from_services(ada._services)
    state = inspect_live_layer(learner.services, ada.id, "memory")
    return build_plan(learner.services, state, learner.recipes.memory, "scratch", 0.0)
