"""A layer is stale if it was trained on what is no longer a lesson. It is built again once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from runtime_makers import ask, correct, greedy, open_runtime, pinned, style

from personalpeft import Cancelled, NothingToLearn, Runtime, User
from personalpeft.errors import NothingCause
from personalpeft.learning.gate import gate
from personalpeft.learning.gate.gate import Judgement
from personalpeft.learning.outcomes import ReasonCode, reason, text_reason
from personalpeft.types import Verdict


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with open_runtime(tmp_path / "home") as runtime:
        yield runtime


@pytest.fixture
def ada(runtime: Runtime) -> User:
    return runtime.user("ada")


def tell(ada: User, animal: str, name: str) -> str:
    return ada.remember(
        f"My {animal} is called {name}.", questions=[f"What is my {animal} called?"], answer=name
    )


def live(ada: User, layer: str) -> str | None:
    return next((entry.revision for entry in ada.stack().entries if entry.layer == layer), None)


def signals_of(ada: User, layer: str) -> set[str]:
    """Return the signals of a live revision that was built from scratch."""
    (revision,) = (each for each in ada.revisions(layer) if each.id == live(ada, layer))
    assert revision.parent is None
    return set(revision.signals)


def due(ada: User) -> list[tuple[str, str]]:
    return [(trigger.kind, trigger.layer) for trigger in ada.pending().triggers]


def refuse_all(patch: pytest.MonkeyPatch) -> None:
    refused = Judgement(Verdict.REFUSED, (text_reason("it is worse"),))
    patch.setattr(gate, "judge", lambda *about, **more: refused)


def test_stale_layer_is_built_again_once_without_the_retracted_lesson(ada: User) -> None:
    dog, cat = tell(ada, "dog", "Biscuit"), tell(ada, "cat", "Momo")
    ada.learn()
    ada.retract_item(dog)
    assert due(ada) == [("lessons_retracted", "memory")]
    dry = ada.learn(dry_run=True)
    assert (dry.dry_run, len(ada.revisions())) == (True, 1)
    codes = [ReasonCode.LESSONS_RETRACTED, ReasonCode.WOULD_TRAIN]
    assert [each.code for each in dry.reasons] == codes

    report = ada.learn()
    assert (report.live, report.probation) == (True, True)
    assert report.reasons[0] == reason(ReasonCode.LESSONS_RETRACTED, count=1)
    assert signals_of(ada, "memory") == {cat}
    assert due(ada) == []
    with pytest.raises(NothingToLearn):
        ada.learn()


def test_layer_without_lessons_returns_to_the_base(ada: User, runtime: Runtime) -> None:
    before = greedy(ada)
    dog = tell(ada, "dog", "Biscuit")
    ada.learn()
    head = live(ada, "memory")
    ada.retract_item(dog)
    assert ada.learn(dry_run=True).dry_run
    with pytest.raises(Cancelled):
        ada.learn(cancelled=lambda: True)
    assert live(ada, "memory") == head

    report = ada.learn()
    assert [each.code for each in report.reasons] == [ReasonCode.ALL_RETRACTED]
    assert (report.event, report.revision, report.previous_head) == ("retracted", head, None)
    undo = f"undo: personalpeft rollback memory --to {head} --user ada"
    assert undo in str(report)
    assert undo in str(ada.activity_summary(timedelta(days=1)))
    assert (ada.history()[-1].cause, ada.history()[-1].after) == ("retracted", None)
    assert greedy(ada) == before
    assert ada.reports()[-1]["reason"] == report.reason
    assert due(ada) == []
    assert runtime.verify() == ()
    with pytest.raises(NothingToLearn):
        ada.learn()


def test_layer_with_only_held_out_lessons_returns_to_the_base(ada: User) -> None:
    edits = correct(ada, 12)
    ada.learn("style", accept=True)
    ada.retract(*set(edits) - pinned(ada))
    ada.learn("style")
    assert live(ada, "style") is None
    assert style("Answer 1.") not in greedy(ada)


def test_imported_revision_stays_below_retracted_lessons(
    ada: User, runtime: Runtime, tmp_path: Path
) -> None:
    bo = runtime.user("bo")
    tell(bo, "horse", "Bella")
    bo.learn()
    given = ada.import_peft(bo.export_peft(tmp_path / "memory", layer="memory"), layer="memory").id
    dog = tell(ada, "dog", "Biscuit")
    ada.learn(accept=True)
    ada.retract_item(dog)
    assert ada.learn().reasons == (reason(ReasonCode.ALL_RETRACTED, live=given),)
    assert live(ada, "memory") == given
    assert due(ada) == []
    dog, _ = tell(ada, "dog", "Biscuit"), tell(ada, "cat", "Momo")
    ada.learn(accept=True)
    ada.retract_item(dog)
    ada.learn(accept=True)
    assert ada.revisions("memory")[-1].parent == given


def test_build_with_new_lessons_leaves_retracted_ones_out(ada: User) -> None:
    facts = [tell(ada, f"pet {n}", f"Rex {n}") for n in range(6)]
    ada.learn()
    ada.retract_item(facts[0])
    horse = tell(ada, "horse", "Bella")
    report = ada.learn()
    assert report.live
    assert report.reasons[0] == reason(ReasonCode.LESSONS_RETRACTED, count=1)
    assert signals_of(ada, "memory") == {*facts[1:], horse}
    assert due(ada) == []


@pytest.mark.parametrize("said", [{"reward": -0.9}, {"rating": -1}, {"edit": "No."}])
def test_like_that_yields_to_other_feedback_leaves_the_layer(
    ada: User, said: dict[str, float | str]
) -> None:
    liked = [ask(ada, f"Why {n}?") for n in range(5)]
    signals = {ada.feedback(reply, rating=1): reply for reply in liked}
    ada.learn()
    turned = next(signal for signal in signals if signal not in pinned(ada))
    about = signals[turned]
    if "rating" in said:
        # The rating is of the same text in another turn.
        about = ask(ada, ada.turn(about).messages[-1].content, layers=[])
        assert about.text == signals[turned].text
    ada.feedback(about, **said)  # type: ignore[arg-type]
    assert ("lessons_retracted", "style") in due(ada)
    ada.learn()
    assert turned not in signals_of(ada, "style")
    assert due(ada) == []


def test_fact_whose_replies_are_no_longer_liked_leaves_the_layer(ada: User) -> None:
    fact = ada.remember("My hamster is called Biscuit.")
    tell(ada, "cat", "Momo")
    said = []
    for question in ("What is my hamster called?", "How is my hamster called?"):
        turn = ada.turn(ask(ada, question))
        how = {
            "stack": turn.stack,
            "sampling": turn.sampling,
            "usage": turn.usage,
            "finish_reason": "stop",
        }
        recorded = ada._services.store.ledger.add_turn(
            "ada", messages=turn.messages, reply="It is Biscuit.", used=[fact], **how
        )
        ada.feedback(recorded.id, rating=1)
        said.append(recorded.id)
    ada.learn("memory")
    assert fact in signals_of(ada, "memory")
    for turn_id in said:
        ada.feedback(turn_id, rating=-1)
    assert ("lessons_retracted", "memory") in due(ada)
    ada.learn("memory")
    assert fact not in signals_of(ada, "memory")


def test_fact_that_overwrote_another_leaves_the_layer(ada: User) -> None:
    """The older fact has answers to the same questions, and the layer still has the newer one."""
    older = tell(ada, "dog", "Biscuit")
    ada.learn()
    newer = tell(ada, "dog", "Rex")
    ada.learn()
    ada.retract_item(newer)
    assert due(ada) == [("lessons_retracted", "memory")]
    ada.learn()
    assert signals_of(ada, "memory") == {older}


def test_lesson_given_again_in_the_same_words_is_not_stale(ada: User) -> None:
    edits = correct(ada, 6)
    dog = tell(ada, "dog", "Biscuit")
    ada.learn()
    ada.retract_item(dog)
    tell(ada, "dog", "Biscuit")
    again = next(each for each in ada.signals() if each.id in edits and each.id not in pinned(ada))
    # Other feedback came between, so the edit is recorded again.
    ada.feedback(str(again.turn), rating=1)
    assert ada.feedback(str(again.turn), edit=again.payload["text"]) != again.id
    assert set(due(ada)) == {("lesson", "memory"), ("lesson", "style")}
    ada.learn()
    assert due(ada) == []
    with pytest.raises(NothingToLearn) as nothing:
        ada.learn()
    assert nothing.value.cause is NothingCause.NOTHING_NEW


@pytest.mark.parametrize("others", [["cat"], []])
def test_fact_given_and_retracted_again_is_unlearned_again_and_nothing_is_trained_twice(
    ada: User, others: list[str]
) -> None:
    for animal in others:
        tell(ada, animal, "Momo")
    stages = set[str]()
    for _ in range(3):
        stages.clear()
        dog = tell(ada, "dog", "Biscuit")
        ada.learn(progress=lambda stage, done: stages.add(stage))
        assert dog in {signal for each in ada.revisions("memory") for signal in each.signals}
        before = live(ada, "memory")
        ada.retract_item(dog)
        assert due(ada) == [("lessons_retracted", "memory")]
        ada.learn(progress=lambda stage, done: stages.add(stage))
        assert live(ada, "memory") != before
        assert due(ada) == []
    assert stages == {"Judging"}


@pytest.mark.parametrize("others", [["cat"], []])
def test_rollback_to_a_stale_revision_takes_precedence(ada: User, others: list[str]) -> None:
    dog = tell(ada, "dog", "Biscuit")
    for animal in others:
        tell(ada, animal, "Momo")
    ada.learn()
    before = live(ada, "memory")
    ada.retract_item(dog)
    ada.learn()
    after = live(ada, "memory")
    ada.rollback("memory")
    assert due(ada) == []
    with pytest.raises(NothingToLearn) as nothing:
        ada.learn()
    assert nothing.value.cause is NothingCause.NOT_LIVE
    assert f"rollback memory --to {after or 'base'}" in nothing.value.hint
    # Also after what was learned in between.
    ada.rollback("memory", after)
    tell(ada, "horse", "Bella")
    ada.learn(accept=True)
    ada.rollback("memory", before)
    assert due(ada) == []
    with pytest.raises(NothingToLearn):
        ada.learn()
    assert live(ada, "memory") == before


def test_refused_build_is_not_built_again_from_the_same_inputs(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct(ada, 6)
    dog, _ = tell(ada, "dog", "Biscuit"), tell(ada, "cat", "Momo")
    ada.learn()
    head = live(ada, "memory")
    ada.retract_item(dog)
    bad = tell(ada, "horse", "Bella")
    with monkeypatch.context() as patch:
        refuse_all(patch)
        report = ada.learn()
    codes = [ReasonCode.LESSONS_RETRACTED, ReasonCode.TEXT]
    assert [each.code for each in report.reasons] == codes
    assert live(ada, "memory") == head
    assert due(ada) == []
    with pytest.raises(NothingToLearn) as nothing:
        ada.learn()
    assert nothing.value.cause is NothingCause.NOT_LIVE
    assert f"rollback memory --to {report.revision}" in nothing.value.hint
    # Without one of its lessons the build is another one.
    ada.retract_item(bad)
    assert due(ada) == [("lessons_retracted", "memory")]
    assert ada.learn().live
    assert due(ada) == []


def test_earlier_refusal_does_not_keep_a_retracted_lesson(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same lessons were judged before, but not in the place of this head."""
    cat = tell(ada, "cat", "Momo")
    with monkeypatch.context() as patch:
        refuse_all(patch)
        ada.learn()
    dog = tell(ada, "dog", "Biscuit")
    ada.learn()
    ada.retract_item(dog)
    assert ada.learn().live
    assert signals_of(ada, "memory") == {cat}


def test_a_rebuilt_layer_is_judged_by_the_lessons_that_are_new(ada: User) -> None:
    """Old ones were judged when they arrived. Beside them a bad batch would look better."""
    first = correct(ada, 8)
    assert ada.learn("style").live
    # Now most of the old lessons contain a fact, but no new one does.
    ada.remember("Answer")
    ada.retract(first[0])
    for number in range(4):
        ada.feedback(ask(ada, f"Other question {number}?"), edit=f"Reply {number}.")
    report = ada.learn("style")
    assert report.reasons[0] == reason(ReasonCode.LESSONS_RETRACTED, count=1)
    assert ReasonCode.FACTS_LEAKED not in [each.code for each in report.reasons]
