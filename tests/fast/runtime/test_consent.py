"""Training consent of a signal, set at once or later.

Without it the signal acts in the prompt only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_counts import all_cases
from runtime_makers import ask, correct, home_unchanged, open_runtime, pinned, trained_on

from personalpeft import InvalidInput, NotFound, NothingToLearn, User
from personalpeft.learning.outcomes import Placement, ReasonCode, SignalUse
from personalpeft.learning.status import SignalStatus
from personalpeft.store.integrity import verify
from personalpeft.types import SignalKind

DOG = {"questions": ["What is my dog called?"], "answer": "Biscuit"}

GIVE: dict[SignalKind, Callable[..., str]] = {
    SignalKind.RATING: lambda ada, n, **k: ada.feedback(ask(ada, f"Why {n}?"), rating=1, **k),
    SignalKind.EDIT: lambda ada, n, **k: ada.feedback(ask(ada, f"Why {n}?"), edit=f"Ahoy {n}", **k),
    SignalKind.PREFERENCE: lambda ada, n, **k: ada.feedback(
        ask(ada, f"Why {n}?"), prefer=f"Ahoy {n}", **k
    ),
    SignalKind.COMMENT: lambda ada, n, **k: ada.feedback(
        ask(ada, f"Why {n}?"), comment=f"Say {n}.", **k
    ),
    SignalKind.REWARD: lambda ada, n, **k: ada.feedback(ask(ada, f"Why {n}?"), reward=0.9, **k),
    SignalKind.DEMONSTRATION: lambda ada, n, **k: ada.teach(f"Write to {n}.", f"Dear {n}", **k),
    SignalKind.FACT: lambda ada, n, **k: ada.remember(
        f"My pet {n} is Rex {n}.", questions=[f"Who is my pet {n}?"], answer=f"Rex {n}", **k
    ),
}
PLACES = {SignalKind.COMMENT: Placement.RULE, SignalKind.FACT: Placement.MEMORY}


def statuses(user: User) -> dict[str, SignalStatus]:
    return {status.signal.id: status for status in user.signal_statuses()}


def without_consent(user: User) -> set[str]:
    code = ReasonCode.TRAINING_FORBIDDEN
    return {each.signal.id for each in user.signal_statuses() if each.reason.code is code}


@pytest.mark.parametrize(
    "kind",
    all_cases(SignalKind, usual=[SignalKind.EDIT, SignalKind.COMMENT, SignalKind.FACT]),
)
def test_signal_without_consent_is_listed_so_and_in_no_build(ada: User, kind: SignalKind) -> None:
    kept = [GIVE[kind](ada, number, train=False) for number in range(6)]
    assert without_consent(ada) == set(kept)
    assert {each.place for each in ada.signal_statuses()} == {PLACES.get(kind, Placement.UNUSED)}
    assert ada.pending().triggers == ()
    assert ada.pending().too_few == {}
    with pytest.raises(NothingToLearn):
        ada.learn()
    assert len(ada.items()) == (6 if kind in PLACES else 0)
    correct(ada)
    ada.learn()
    assert not set(kept) & (trained_on(ada) | pinned(ada))


@pytest.mark.parametrize("kind", [SignalKind.RATING, SignalKind.FACT])
def test_withdrawn_consent_is_unlearned_by_the_next_learn(ada: User, kind: SignalKind) -> None:
    for number in range(8):
        GIVE[kind](ada, number)
    ada.learn()
    gone = min(trained_on(ada) - pinned(ada))
    before, items = ada.signals(), ada.items()
    (withdrawn,) = ada.retract(gone, training_only=True)
    assert withdrawn.id == gone
    assert without_consent(ada) == {gone}
    # The signal stays in the ledger and in the prompt.
    assert [each.id for each in ada.signals()] == [each.id for each in before]
    assert ada.items() == items
    assert [trigger.kind for trigger in ada.pending().triggers] == ["lessons_retracted"]
    assert ada.learn().reasons[0].code is ReasonCode.LESSONS_RETRACTED
    (head,) = (entry.revision for entry in ada.stack().entries)
    live = next(revision for revision in ada.revisions() if revision.id == head)
    assert gone not in live.signals
    assert ada.pending().triggers == ()
    assert verify(ada._services.store) == ()


def test_held_out_signal_judges_no_more_after_consent_is_withdrawn(ada: User) -> None:
    correct(ada, 8)
    ada.learn()
    held = min(pinned(ada))
    ada.retract(held, training_only=True)
    assert ada.pending().triggers == ()
    assert statuses(ada)[held].use_code is SignalUse.UNUSED
    correct(ada, 4, first=20)
    ada.learn()
    assert held not in ada.revisions()[-1].signals


def test_layer_is_cleared_where_consent_is_withdrawn_from_all_its_signals(ada: User) -> None:
    ada.retract(*correct(ada, 6), training_only=True)
    with pytest.raises(NothingToLearn):
        ada.learn()
    kept = correct(ada, 6, first=20)
    ada.learn()
    ada.retract(*kept, training_only=True)
    ada.learn()
    assert ada.stack().entries == ()


def test_consent_can_be_given_again(ada: User) -> None:
    reply = ask(ada)
    first = ada.feedback(reply, rating=1, train=False)
    assert ada.feedback(reply, rating=1, train=False) == first
    second = ada.feedback(reply, rating=1)
    assert [each.id for each in ada.signals()] == [second]
    ada.retract(second, training_only=True)
    third = ada.feedback(reply, rating=1)
    assert {each.signal.id: each.place for each in ada.signal_statuses()} == {
        third: Placement.LAYER
    }
    assert ada.feedback(reply, rating=1, train=False) != third
    assert ada.pending().too_few == {}


def test_runtime_can_record_signals_without_consent(home: Path) -> None:
    with open_runtime(home, train=False, implicit_feedback="learned") as runtime:
        ada = runtime.user("ada")
        fact = ada.remember("My dog is called Biscuit.", **DOG)
        signals = [
            *correct(ada, 6),
            ada.teach("Write to Bo.", "Dear Bo", skill="email"),
            ada.record_implicit_feedback(ask(ada, "a"), "copied"),
            ada.edit_item(fact, "My dog is called Crumpet.", answer="Crumpet").id,
        ]
        assert without_consent(ada) == set(signals)
        assert ada.pending().triggers == ()
        allowed = ada.teach("Write to Cy.", "Dear Cy", train=True)
        assert statuses(ada)[allowed].place is Placement.LAYER
    # Another process on the home treats them alike.
    with open_runtime(home) as runtime:
        assert without_consent(runtime.user("ada")) == set(signals)


def test_implicit_feedback_trains_only_with_consent_of_app_and_caller(home: Path) -> None:
    with open_runtime(home, implicit_feedback="learned") as runtime:
        ada = runtime.user("ada")
        withheld = ada.record_implicit_feedback(ask(ada, "a"), "copied", train=False)
        learned = ada.record_implicit_feedback(ask(ada, "b"), "copied")
        assert without_consent(ada) == {withheld}
        assert statuses(ada)[str(learned)].place is Placement.LAYER
        ada.retract(str(learned), training_only=True)
        assert without_consent(ada) == {withheld, learned}
    with open_runtime(home, implicit_feedback="kept") as runtime:
        ada = runtime.user("ada")
        kept = ada.record_implicit_feedback(ask(ada, "c"), "copied", train=True)
        assert statuses(ada)[str(kept)].reason.code is ReasonCode.NOT_USER_ACT


def test_implicit_feedback_never_counts_against_a_user_signal_without_consent(
    home: Path,
) -> None:
    with open_runtime(home, implicit_feedback="learned") as runtime:
        ada = runtime.user("ada")
        reply = ask(ada)
        ada.feedback(reply, rating=-1, train=False)
        copied = ada.record_implicit_feedback(reply, "copied")
        assert statuses(ada)[str(copied)].place is Placement.UNUSED


def test_choice_between_revisions_follows_the_setting_of_runtime_and_user(home: Path) -> None:
    with open_runtime(home, train=False) as runtime:
        ada = runtime.user("ada")
        for number in range(6):
            ada.teach(f"question {number}", f"Ahoy! {number}. Arrr!", train=True)
        ada.learn()
        chosen = ada.compare("hello", "live", "base").choose(1).signal
        assert without_consent(ada) == {chosen}
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        ada.set_training(False)
        again = ada.compare("good day", "live", "base").choose(1).signal
        assert without_consent(ada) == {chosen, again}


def test_edited_fact_stays_without_consent(ada: User) -> None:
    fact = ada.remember("My dog is called Biscuit.", **DOG, train=False)
    new = ada.edit_item(fact, "My dog is called Crumpet.", answer="Crumpet").id
    assert without_consent(ada) == {new}


def test_later_signal_on_a_reply_supersedes_an_earlier_one_without_consent_too(
    ada: User,
) -> None:
    replies = [ask(ada, f"question {number}") for number in range(2)]
    liked = ada.feedback(replies[0], rating=1)
    withheld = ada.feedback(replies[0], edit="Eight minutes.", train=False)
    assert statuses(ada)[liked].place is Placement.UNUSED
    assert withheld in without_consent(ada)
    # It is superseded by a later signal of any kind.
    ada.feedback(replies[1], edit="Nine minutes.", train=False)
    later = ada.feedback(replies[1], rating=1)
    assert statuses(ada)[later].place is Placement.LAYER


def test_superseding_without_consent_unlearns_the_earlier_signal(
    ada: User,
) -> None:
    replies = [ask(ada, f"question {number}") for number in range(8)]
    for reply in replies:
        ada.feedback(reply, rating=1)
    ada.learn()
    turn = next(s.turn for s in ada.signals() if s.id in trained_on(ada) - pinned(ada))
    ada.feedback(str(turn), edit="Not so.", train=False)
    assert [trigger.kind for trigger in ada.pending().triggers] == ["lessons_retracted"]


def test_signal_without_consent_settles_no_conflict_of_lessons(ada: User) -> None:
    older = ada.feedback(ask(ada, "question"), edit="Ahoy! One. Arrr!")
    ada.feedback(ask(ada, "question"), edit="Two.", train=False)
    ada.teach("question", "Three.", train=False)
    assert statuses(ada)[older].place is Placement.LAYER


def test_later_fact_without_consent_is_retrieved_and_stops_training_the_one_it_contradicts(
    ada: User,
) -> None:
    older = ada.remember("My dog is called Biscuit.", **DOG)
    ada.learn()
    newer = ada.remember("My dog is Rex.", questions=DOG["questions"], answer="Rex", train=False)
    assert [item.id for item in ada.items()] == [newer]
    assert older not in {each.signal.id for each in ada.signal_statuses() if each.layer}
    ada.learn()
    assert ada.stack().entries == ()


def test_reply_with_a_fact_without_consent_in_its_prompt_is_not_trained(ada: User) -> None:
    fact = ada.remember("My dog is called Biscuit.", **DOG, train=False)
    replies = [ask(ada, "What is my dog called?") for _ in range(3)]
    assert all(ada.turn(reply).used == (fact,) for reply in replies)
    liked = ada.feedback(replies[0], rating=1)
    edited = ada.feedback(replies[1], edit="I will not tell.")
    codes = {each.signal.id: each.reason.code for each in ada.signal_statuses()}
    assert codes[liked] is ReasonCode.REPLY_TRAINING_FORBIDDEN
    # The user's own text is trained.
    assert statuses(ada)[edited].place is Placement.LAYER
    # Removing the fact from the prompt does not make the reply trainable.
    ada.retract(fact)
    assert statuses(ada)[liked].reason.code is ReasonCode.REPLY_TRAINING_FORBIDDEN


def test_reply_under_a_rule_without_consent_is_not_trained_nor_are_later_ones_of_its_conversation(
    ada: User,
) -> None:
    before = ask(ada, "hello")
    rule = ada.feedback(before, comment="Never mention nuts.", train=False)
    under = ask(ada, "What shall I eat?")
    assert ada.turn(under).used == (rule,)
    ada.retract(rule)
    later = ask(ada, "And then?", conversation_id=under.conversation_id)
    elsewhere = ask(ada, "And then?")
    assert ada.turn(later).used == ada.turn(elsewhere).used == ()
    liked = [ada.feedback(each, rating=1) for each in (before, under, later, elsewhere)]
    codes = {each.signal.id: each.reason.code for each in ada.signal_statuses()}
    forbidden = ReasonCode.REPLY_TRAINING_FORBIDDEN
    assert [codes[each] is forbidden for each in liked] == [False, True, True, False]


def test_likes_are_unlearned_where_consent_is_withdrawn_from_their_fact(
    ada: User,
) -> None:
    fact = ada.remember("My dog is called Biscuit.")
    for number in range(6):
        ada.feedback(ask(ada, f"{number}: my dog is called?"), rating=1)
    assert all(fact in turn.used for turn in ada.turns())
    ada.learn()
    ada.retract(fact, training_only=True)
    assert [trigger.kind for trigger in ada.pending().triggers] == ["lessons_retracted"]
    ada.learn()
    assert ada.stack().entries == ()
    assert [item.id for item in ada.items()] == [fact]


def test_personal_file_carries_consent(ada: User, tmp_path: Path) -> None:
    said = ada.teach("Write to Bo.", "Dear Bo", train=False)
    withdrawn = ada.teach("Write to Cy.", "Dear Cy")
    ada.retract(withdrawn, training_only=True)
    file = ada.export(tmp_path / "ada.personal").path
    with open_runtime(tmp_path / "elsewhere") as runtime:
        runtime.import_user(file)
        copy = runtime.user("ada")
        assert without_consent(copy) == {said, withdrawn}
        assert copy.signal_statuses() == ada.signal_statuses()
        assert runtime.verify() == ()


def test_forgetting_keeps_consent_of_others_and_erases_that_of_the_signal(ada: User) -> None:
    said = ada.teach("Write to Bo.", "Dear Bo", train=False)
    first, second = ada.teach("Write to Cy.", "Dear Cy"), ada.teach("Write to Di.", "Dear Di")
    ada.retract(first, second, training_only=True)
    ada.forget(first)
    assert without_consent(ada) == {said, second}
    assert verify(ada._services.store) == ()


def test_signal_without_consent_can_be_retracted(ada: User) -> None:
    rule = ada.feedback(ask(ada), comment="Be brief.")
    ada.retract(rule, training_only=True)
    assert [item.id for item in ada.items()] == [rule]
    ada.retract(rule)
    assert ada.signals() == ada.items() == ()


WRONG: dict[str, tuple[Callable[[User, dict[str, str]], Any], type[Exception]]] = {
    "a word": (lambda ada, s: ada.feedback("last", rating=1, train="no"), InvalidInput),
    "a number": (lambda ada, s: ada.teach("a", "b", train=0), InvalidInput),
    "a list": (lambda ada, s: ada.remember("a", train=[]), InvalidInput),
    "of what was seen": (
        lambda ada, s: ada.record_implicit_feedback("last", "copied", train="no"),
        InvalidInput,
    ),
    "withdrawn before": (lambda ada, s: ada.retract(s["off"], training_only=True), NotFound),
    "one of two withdrawn": (
        lambda ada, s: ada.retract(s["on"], s["off"], training_only=True),
        NotFound,
    ),
    "superseded": (lambda ada, s: ada.retract(s["old"], training_only=True), NotFound),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_consent_is_refused_and_changes_nothing(ada: User, home: Path, wrong: str) -> None:
    reply = ask(ada)
    said = {
        "old": ada.feedback(reply, edit="Six minutes."),
        "on": ada.feedback(reply, edit="Eight minutes."),
        "off": ada.teach("Write to Bo.", "Dear Bo", train=False),
    }
    act, error = WRONG[wrong]
    with home_unchanged(home), pytest.raises(error) as caught:
        act(ada, said)
    assert caught.value.hint  # type: ignore[attr-defined]


def test_invalid_consent_setting_of_the_runtime_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput), open_runtime(tmp_path / "none", train="no"):
        pass
    assert not (tmp_path / "none").exists()


def test_consent_can_be_set_once_for_a_user(home: Path) -> None:
    with open_runtime(home, implicit_feedback="learned") as runtime:
        ada, bob = runtime.user("ada"), runtime.user("bob")
        before = correct(ada, 2)
        assert ada.summary().training
        ada.set_training(False)
        withheld = {
            *correct(ada, 2, first=20),
            ada.remember("My dog is called Biscuit."),
            ada.record_implicit_feedback(ask(ada, "a"), "copied"),
        }
        withheld.add(ada.edit_item(ada.items()[0].id, "My dog is called Crumpet.").id)
        assert without_consent(ada) == withheld & {each.id for each in ada.signals()}
        assert not without_consent(ada) & set(before)
        # The setting belongs to one user.
        correct(bob)
        assert without_consent(bob) == set()
        assert bob.summary().training
    # Other processes on the home see the setting until the user changes it.
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        assert not ada.summary().training
        assert [each.training for each in runtime.users()] == [False, True]
        allowed = ada.teach("Write to Cy.", "Dear Cy", train=True)
        ada.set_training(True)
        again = ada.teach("Write to Di.", "Dear Di")
        assert not without_consent(ada) & {allowed, again}


def test_consent_of_the_user_does_not_override_the_runtime_setting(home: Path) -> None:
    with open_runtime(home, train=False) as runtime:
        ada = runtime.user("ada")
        ada.set_training(True)
        withheld = ada.teach("Write to Bo.", "Dear Bo")
        assert without_consent(ada) == {withheld}


@pytest.mark.parametrize("allowed", [False, True])
def test_personal_file_carries_the_users_consent_setting(
    ada: User, tmp_path: Path, allowed: bool
) -> None:
    ada.set_training(allowed)
    ada.teach("Write to Bo.", "Dear Bo", train=True)
    file = ada.export(tmp_path / "ada.personal").path
    with open_runtime(tmp_path / "elsewhere") as runtime:
        runtime.import_user(file)
        assert runtime.user("ada").summary().training is allowed


@pytest.mark.parametrize("wrong", ["no", 0, None])
def test_invalid_consent_setting_of_a_user_is_refused_and_changes_nothing(
    ada: User, home: Path, wrong: Any
) -> None:
    ada.set_training(False)
    with home_unchanged(home), pytest.raises(InvalidInput):
        ada.set_training(wrong)
    assert not ada.summary().training
