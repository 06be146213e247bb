"""A learn after a retraction builds without the retracted lessons, also when nothing new was
recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from runtime_makers import FakeTime, ask, correct, greedy, open_runtime, pinned, style

from personalpeft import Cancelled, LearnReport, NothingToLearn, Runtime, User
from personalpeft.errors import NothingCause
from personalpeft.learning import pipeline
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


def is_retraction(report: LearnReport) -> bool:
    """Return whether the report is of a build without retracted lessons."""
    return report.reasons[0].code is ReasonCode.LESSONS_RETRACTED


def tell(ada: User, animal: str, name: str) -> str:
    return ada.remember(
        f"My {animal} is called {name}.", questions=[f"What is my {animal} called?"], answer=name
    )


def live(ada: User, layer: str) -> str | None:
    return next((entry.revision for entry in ada.stack().entries if entry.layer == layer), None)


def signals_of(ada: User, layer: str) -> set[str]:
    (revision,) = (each for each in ada.revisions(layer) if each.id == live(ada, layer))
    assert revision.parent is None
    return set(revision.signals)


def test_removed_fact_is_not_in_the_layer_after_the_next_learn(ada: User) -> None:
    dog, cat = tell(ada, "dog", "Biscuit"), tell(ada, "cat", "Momo")
    ada.learn()
    ada.retract_item(dog)
    (news,) = ada.pending().news
    assert (news.kind, news.layer) == ("lessons retracted", "memory")

    report = ada.learn()
    assert (report.live, report.probation) == (True, True)
    assert report.reasons[0] == reason(ReasonCode.LESSONS_RETRACTED, count=1)
    assert signals_of(ada, "memory") == {cat}
    assert ada.pending().news == ()
    with pytest.raises(NothingToLearn):
        ada.learn()


def test_fact_edited_to_have_no_answer_leaves_the_layer(ada: User) -> None:
    city, cat = (
        ada.remember("I live in Oslo.", questions=["Where do I live?"], answer="Oslo"),
        tell(ada, "cat", "Momo"),
    )
    ada.learn()
    ada.edit_item(city, "I moved.", questions=[])
    ada.learn()
    assert signals_of(ada, "memory") == {cat}


def test_layer_without_lessons_returns_to_the_base(ada: User, runtime: Runtime) -> None:
    before = greedy(ada)
    dog = tell(ada, "dog", "Biscuit")
    ada.learn()
    head = live(ada, "memory")
    ada.retract_item(dog)
    dry = ada.learn(dry_run=True)
    assert (dry.dry_run, live(ada, "memory")) == (True, head)

    report = ada.learn()
    assert [each.code for each in report.reasons] == [ReasonCode.ALL_RETRACTED]
    assert (report.event, report.revision, report.before, report.live) == (
        "taken back",
        head,
        None,
        False,
    )
    undo = f"undo: personalpeft rollback memory --to {head} --user ada"
    assert undo in str(report)
    assert undo in str(ada.activity_summary(timedelta(days=1)))
    assert live(ada, "memory") is None
    assert (ada.history()[-1].cause, ada.history()[-1].after) == ("taken back", None)
    assert greedy(ada) == before
    assert ada.reports()[-1]["reason"] == report.reason
    assert ada.pending().news == ()
    assert runtime.verify() == ()
    with pytest.raises(NothingToLearn):
        ada.learn()
    # Recording the fact again learns it again.
    tell(ada, "dog", "Biscuit")
    assert ada.learn().live


def test_like_replaced_by_a_dislike_leaves_the_layer(ada: User) -> None:
    likes = [ada.feedback(ask(ada, f"Why {n}?"), rating=1) for n in range(8)]
    ada.learn()
    turned = next(each for each in ada.signals() if each.id in likes and each.id not in pinned(ada))
    ada.feedback(str(turned.turn), rating=-1)
    ada.learn()
    assert turned.id not in signals_of(ada, "style")


def test_retracted_lesson_is_left_out_of_a_build_with_new_lessons(ada: User) -> None:
    edits = correct(ada, 6)
    ada.learn()
    retracted = next(each for each in edits if each not in pinned(ada))
    ada._services.store.ledger.retract("ada", retracted)
    correct(ada, 2, first=20)
    ada.learn()
    assert retracted not in signals_of(ada, "style")
    assert ada.pending().news == ()


def test_retracted_fact_leaves_the_layer_when_a_new_fact_arrives(ada: User) -> None:
    facts = [tell(ada, f"pet {n}", f"Rex {n}") for n in range(6)]
    ada.learn()
    ada.retract_item(facts[0])
    horse = tell(ada, "horse", "Bella")
    report = ada.learn()
    assert report.live
    assert report.reasons[0] == reason(ReasonCode.LESSONS_RETRACTED, count=1)
    assert signals_of(ada, "memory") == {*facts[1:], horse}
    assert ada.pending().news == ()


def test_disliked_replies_leave_the_layer_when_a_new_like_arrives_and_few_are_left(
    ada: User,
) -> None:
    likes = [ada.feedback(ask(ada, f"Why {n}?"), rating=1) for n in range(4)]
    ada.learn()
    turned = [each for each in ada.signals() if each.id in likes and each.id not in pinned(ada)][:2]
    for each in turned:
        ada.feedback(str(each.turn), rating=-1)
    ada.feedback(ask(ada, "Why not?"), rating=1)
    assert ada.learn().revision is not None
    assert not {each.id for each in turned} & set(ada.revisions("style")[-1].signals)
    assert ada.pending().news == ()


@pytest.mark.parametrize("said", [{"reward": -0.9}, {"rating": -1}])
def test_dislike_as_reward_or_on_an_equal_turn_cancels_a_like(
    ada: User, said: dict[str, float]
) -> None:
    liked = [ask(ada, f"Why {n}?") for n in range(8)]
    signals = {ada.feedback(reply, rating=1): reply for reply in liked}
    ada.learn()
    turned = next(signal for signal in signals if signal not in pinned(ada))
    on_the_turn = signals[turned]
    # The rating is of the same text in another turn.
    about = (
        on_the_turn
        if "reward" in said
        else ask(ada, ada.turn(on_the_turn).messages[-1].content, layers=[])
    )
    assert about.text == on_the_turn.text
    ada.feedback(about, **said)  # type: ignore[arg-type]
    assert [news.kind for news in ada.pending().news] == ["lessons retracted"]
    ada.learn()
    assert turned not in signals_of(ada, "style")
    assert ada.pending().news == ()


def test_rollback_to_a_revision_with_retracted_lessons_takes_precedence(ada: User) -> None:
    dog, _ = tell(ada, "dog", "Biscuit"), tell(ada, "cat", "Momo")
    ada.learn()
    before = live(ada, "memory")
    ada.retract_item(dog)
    ada.learn()
    after = live(ada, "memory")
    ada.rollback("memory")
    assert live(ada, "memory") == before
    assert ada.pending().news == ()
    with pytest.raises(NothingToLearn) as caught:
        ada.learn()
    assert caught.value.cause is NothingCause.ROLLED_BACK
    assert f"rollback memory --to {after}" in caught.value.hint
    assert live(ada, "memory") == before


def test_rolled_back_layer_is_revalidated_when_the_stack_below_changes(
    ada: User,
) -> None:
    correct(ada, 6)
    dog, _ = tell(ada, "dog", "Biscuit"), tell(ada, "cat", "Momo")
    ada.learn()
    ada.retract_item(dog)
    ada.learn()
    ada.rollback("memory")
    assert ada.pending().news == ()
    ada.rollback("style", None)
    assert [news.kind for news in ada.pending().news] == ["stack below changed"]
    ada.learn()
    assert ada.pending().news == ()


def test_rollback_to_a_cleared_revision_takes_precedence(ada: User) -> None:
    dog = tell(ada, "dog", "Biscuit")
    ada.learn()
    before = live(ada, "memory")
    ada.retract_item(dog)
    ada.learn()
    ada.rollback("memory")
    assert ada.pending().news == ()
    with pytest.raises(NothingToLearn):
        ada.learn()
    assert live(ada, "memory") == before


def test_rollback_to_a_cleared_revision_holds_after_other_learns(
    ada: User,
) -> None:
    dog = tell(ada, "dog", "Biscuit")
    ada.learn()
    before = live(ada, "memory")
    ada.retract_item(dog)
    ada.learn()
    tell(ada, "cat", "Momo")
    ada.learn(accept=True)
    ada.rollback("memory", before)
    assert ada.pending().news == ()
    with pytest.raises(NothingToLearn):
        ada.learn()
    assert live(ada, "memory") == before


@pytest.mark.parametrize("others", [["cat"], []])
def test_fact_recorded_and_retracted_again_is_removed_again(ada: User, others: list[str]) -> None:
    for animal in others:
        tell(ada, animal, "Momo")
    for _ in range(3):
        dog = tell(ada, "dog", "Biscuit")
        ada.learn()
        assert dog in {signal for each in ada.revisions("memory") for signal in each.signals}
        before = live(ada, "memory")
        ada.retract_item(dog)
        assert [news.kind for news in ada.pending().news] == ["lessons retracted"]
        ada.learn()
        assert live(ada, "memory") != before
        assert ada.pending().news == ()


def test_fact_recorded_again_in_the_same_words_is_not_retracted(ada: User) -> None:
    dog = tell(ada, "dog", "Biscuit")
    ada.learn()
    head = live(ada, "memory")
    ada.retract_item(dog)
    tell(ada, "dog", "Biscuit")
    assert {news.kind for news in ada.pending().news} == {"lesson"}
    assert not is_retraction(ada.learn())
    assert ada.pending().news == ()
    with pytest.raises(NothingToLearn) as nothing:
        ada.learn("memory")
    assert nothing.value.cause is NothingCause.NOTHING_NEW
    assert head in {each.id for each in ada.revisions("memory")}


def test_like_after_a_dislike_is_not_retracted(ada: User) -> None:
    likes = [ada.feedback(ask(ada, f"Why {n}?"), rating=1) for n in range(8)]
    ada.learn()
    liked = next(each for each in ada.signals() if each.id in likes and each.id not in pinned(ada))
    ada.feedback(str(liked.turn), rating=-1)
    ada.feedback(str(liked.turn), rating=1)
    assert {news.kind for news in ada.pending().news} == {"lesson"}


def test_imported_revision_stays_below_retracted_lessons(
    ada: User, runtime: Runtime, tmp_path: Path
) -> None:
    bo = runtime.user("bo")
    tell(bo, "horse", "Bella")
    bo.learn()
    given = ada.import_peft(bo.export_peft(tmp_path / "memory", layer="memory"), layer="memory").id
    dog = tell(ada, "dog", "Biscuit")
    ada.learn(accept=True)
    assert live(ada, "memory") != given
    ada.retract_item(dog)
    report = ada.learn()
    assert report.reasons == (reason(ReasonCode.ALL_RETRACTED, live=given),)
    assert live(ada, "memory") == given
    assert ada.pending().news == ()
    dog, _ = tell(ada, "dog", "Biscuit"), tell(ada, "cat", "Momo")
    ada.learn(accept=True)
    ada.retract_item(dog)
    ada.learn(accept=True)
    assert ada.revisions("memory")[-1].parent == given


def test_refusal_of_another_build_does_not_settle_a_retraction(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    dog, _ = tell(ada, "dog", "Biscuit"), tell(ada, "cat", "Momo")
    ada.learn()
    ada.retract_item(dog)
    bad = tell(ada, "horse", "Bella")
    with monkeypatch.context() as patch:
        patch.setattr(
            pipeline,
            "judge",
            lambda evidence, margins, **more: Judgement(
                Verdict.REFUSED, (text_reason("it is worse"),)
            ),
        )
        ada.learn()
    assert ada.pending().news == ()
    ada.retract_item(bad)
    assert [news.kind for news in ada.pending().news] == ["lessons retracted"]
    assert ada.learn().live
    assert ada.pending().news == ()


def test_fact_whose_replies_are_no_longer_liked_is_removed(ada: User) -> None:
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
    assert [news.kind for news in ada.pending().news if news.layer == "memory"] == [
        "lessons retracted"
    ]
    ada.learn("memory")
    assert fact not in signals_of(ada, "memory")


def test_learn_of_all_layers_names_the_layer_that_still_has_retracted_lessons(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct(ada, 6)
    dog, _ = tell(ada, "dog", "Biscuit"), tell(ada, "cat", "Momo")
    ada.learn()
    ada.retract_item(dog)
    monkeypatch.setattr(
        pipeline,
        "judge",
        lambda evidence, margins, **more: Judgement(Verdict.REFUSED, (text_reason("it is worse"),)),
    )
    ada.learn()
    with pytest.raises(NothingToLearn) as nothing:
        ada.learn()
    assert nothing.value.cause is NothingCause.NOT_LIVE


def test_cancelled_learn_clears_no_layer(ada: User) -> None:
    dog = tell(ada, "dog", "Biscuit")
    ada.learn()
    before = live(ada, "memory")
    ada.retract_item(dog)
    with pytest.raises(Cancelled):
        ada.learn(cancelled=lambda: True)
    assert live(ada, "memory") == before


def test_clock_set_back_leaves_nothing_pending_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = FakeTime()
    with open_runtime(tmp_path / "other", clock=time.clock()) as runtime:
        ada = runtime.user("ada")
        dog, _ = tell(ada, "dog", "Biscuit"), tell(ada, "cat", "Momo")
        ada.learn()
        ada.retract_item(dog)
        time.at -= timedelta(hours=1)
        monkeypatch.setattr(
            pipeline,
            "judge",
            lambda evidence, margins, **more: Judgement(
                Verdict.REFUSED, (text_reason("it is worse"),)
            ),
        )
        ada.learn()
        assert ada.pending().news == ()


def test_repeated_edit_is_not_retracted(ada: User) -> None:
    edits = correct(ada, 6)
    ada.learn()
    head = live(ada, "style")
    again = next(each for each in ada.signals() if each.id in edits and each.id not in pinned(ada))
    assert ada.feedback(str(again.turn), edit=again.payload["text"]) == again.id
    assert ada.pending().news == ()
    # Other feedback came between, so the edit is recorded again.
    ada.feedback(str(again.turn), rating=1)
    assert ada.feedback(str(again.turn), edit=again.payload["text"]) != again.id
    assert {news.kind for news in ada.pending().news} == {"lesson"}
    report = ada.learn()
    assert not is_retraction(report)
    assert report.before == head
    assert ada.pending().news == ()


def test_dry_run_reports_the_retraction_build_and_changes_nothing(ada: User) -> None:
    dog = tell(ada, "dog", "Biscuit")
    tell(ada, "cat", "Momo")
    ada.learn()
    ada.retract_item(dog)
    count = len(ada.revisions())
    report = ada.learn(dry_run=True)
    assert report.dry_run
    assert [each.code for each in report.reasons] == [
        ReasonCode.LESSONS_RETRACTED,
        ReasonCode.WOULD_TRAIN,
    ]
    assert len(ada.revisions()) == count


def test_refused_retraction_build_is_reported_once_with_a_rollback_hint(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    dog = tell(ada, "dog", "Biscuit")
    tell(ada, "cat", "Momo")
    ada.learn()
    head = live(ada, "memory")
    ada.retract_item(dog)
    monkeypatch.setattr(
        pipeline,
        "judge",
        lambda evidence, margins, **more: Judgement(Verdict.REFUSED, (text_reason("it is worse"),)),
    )
    report = ada.learn()
    assert is_retraction(report)
    assert report.reasons[-1] == text_reason("it is worse")
    assert live(ada, "memory") == head
    assert ada.pending().news == ()
    with pytest.raises(NothingToLearn) as caught:
        ada.learn()
    assert caught.value.cause is NothingCause.NOT_LIVE
    assert "rollback memory --to base" in caught.value.hint


def test_edited_fact_is_not_retracted(ada: User) -> None:
    """The edit is trained on top of the live revision, since the new value supersedes the old one."""
    old = tell(ada, "dog", "Biscuit")
    ada.learn()
    ada.edit_item(old, "My dog is called Rex.", answer="Rex")
    assert {news.kind for news in ada.pending().news} == {"lesson"}
    report = ada.learn()
    assert not is_retraction(report)


def test_style_with_only_held_out_lessons_is_cleared(ada: User) -> None:
    edits = correct(ada, 12)
    ada.learn("style", accept=True)
    for edit in set(edits) - pinned(ada):
        ada._services.store.ledger.retract("ada", edit)
    ada.learn("style")
    assert live(ada, "style") is None
    assert style("Answer 1.") not in greedy(ada)
