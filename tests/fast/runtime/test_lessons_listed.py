"""What became of every signal can be listed; what an app saw is kept where that is switched on, and never learned unasked."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from runtime_makers import ask, correct, nothing_changes, opened, pinned, trained_on

from personalpeft import InvalidId, InvalidInput, NotFound, NothingToLearn, User
from personalpeft.learning.data.assignment import IMPLICIT_RATINGS
from personalpeft.learning.outcomes import ReasonCode, SignalUse, reason
from personalpeft.types import Verdict


def uses(user: User, *, current: bool = True) -> dict[str, str]:
    return {account.signal.id: account.use for account in user.lessons(current=current)}


def test_each_signal_says_where_it_went_whether_it_was_learned_and_in_which_revision(
    ada: User,
) -> None:
    edits = correct(ada, 6)
    rule = ada.feedback("last", comment="Be brief.")
    fact = ada.remember("My dog is called Biscuit.")
    down = ada.feedback(ask(ada, "something else"), rating=-1)
    assert set(uses(ada).values()) == {"to be learned", "acts now", "only kept"}
    report = ada.learn()
    later = correct(ada, 1, first=50)
    told = {account.signal.id: account for account in ada.lessons()}
    assert (
        list(told) == [signal.id for signal in ada.signals()] == [*edits, rule, fact, down, *later]
    )
    for edit in edits:
        assert told[edit].place == "layer"
        assert told[edit].layer == "style"
        assert told[edit].revision == report.revision
        assert told[edit].pinned == (edit in pinned(ada))
        assert (told[edit].use_code is SignalUse.LEARNED) == (edit in trained_on(ada))
    assert [(told[s].place, told[s].use_code, told[s].revision) for s in (rule, fact, down)] == [
        ("profile", SignalUse.IN_PROMPT, None),
        ("memory", SignalUse.IN_PROMPT, None),
        ("kept", SignalUse.UNUSED, None),
    ]
    assert told[later[0]].use_code is SignalUse.PENDING


def test_a_lesson_keeps_the_first_live_revision_that_learned_it_and_loses_it_with_a_rollback(
    ada: User,
) -> None:
    edits = correct(ada, 6)
    first = ada.learn()
    correct(ada, 4, first=20)
    assert ada.learn().verdict is Verdict.PROMOTED
    learned = [
        account for account in ada.lessons() if account.signal.id in edits and not account.pinned
    ]
    assert {account.revision for account in learned} == {first.revision}
    ada.rollback("style", None)
    assert {use for signal, use in uses(ada).items() if signal in edits} == {
        "learned, not live",
        "held back to judge by",
    }


def test_what_was_superseded_or_taken_back_is_shown_when_asked_for(ada: User) -> None:
    reply = ask(ada)
    first = ada.feedback(reply, edit="Six minutes.")
    second = ada.feedback(reply, edit="Eight minutes.")
    fact = ada.remember("My dog is called Biscuit.")
    ada.remove_item(fact)
    assert uses(ada) == {second: "to be learned"}
    assert uses(ada, current=False) == {
        first: "superseded",
        second: "to be learned",
        fact: "taken back",
    }
    assert second in next(a.why for a in ada.lessons(current=False) if a.signal.id == first)


def test_two_comments_on_one_reply_both_act(ada: User) -> None:
    reply = ask(ada)
    rules = [ada.feedback(reply, comment=text) for text in ("Be brief.", "Use metric units.")]
    assert [item.id for item in ada.items()] == rules
    assert ada.turn(ask(ada, "And a goose egg?")).used == tuple(rules)


def test_a_later_edit_of_the_same_request_wins_and_an_answer_that_was_held_back_is_never_learned_anew(
    ada: User,
) -> None:
    correct(ada, 8)
    ada.learn()
    questions = pinned(ada)
    for n in range(8):
        ada.feedback(ask(ada, f"question {n}"), edit=f"Aye aye! Answer {n}. Arrr!")
    ada.learn()
    told = {account.signal.id: account for account in ada.lessons()}
    heirs = [
        told[s.id]
        for s in ada.signals()
        if s.id in told and "Aye aye" in s.payload["text"] and told[s.id].pinned
    ]
    assert len(heirs) >= len(questions)
    assert not trained_on(ada) & pinned(ada)
    for signal in questions:
        assert told[signal].use_code is SignalUse.UNUSED
        assert told[signal].reason == reason(ReasonCode.CONTRADICTED, kind="edit")


def test_what_an_app_sees_is_not_kept_unless_that_is_switched_on(ada: User, home: Path) -> None:
    reply = ask(ada)
    with nothing_changes(home):
        assert [ada.observe(reply, seen) for seen in IMPLICIT_RATINGS] == [None] * 4
        with pytest.raises(InvalidInput):
            ada.observe(reply, "sighed")
        with pytest.raises(NotFound):
            ada.observe("t_nothing", "copied")
    with pytest.raises(InvalidInput), opened(home, observing="yes"):
        pass


@pytest.mark.parametrize("seen", list(IMPLICIT_RATINGS))
def test_what_an_app_saw_is_kept_with_how_and_never_trained_on_by_default(
    home: Path, seen: str
) -> None:
    with opened(home, observing="kept") as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        kept = [ada.observe(ask(ada, f"thing {n}"), seen) for n in range(4)]
        ada.learn()
        told = {account.signal.id: account for account in ada.lessons()}
        for signal in kept:
            assert signal is not None
            assert (told[signal].place, told[signal].use) == ("kept", "only kept")
            assert told[signal].signal.source == "app"
            assert told[signal].signal.payload == {"value": IMPLICIT_RATINGS[seen], "how": seen}
        assert not trained_on(ada) & set(kept)


def test_an_app_may_let_them_count_as_weak_ratings(home: Path) -> None:
    with opened(home, observing="learned") as runtime:
        ada = runtime.user("ada")
        correct(ada, 4)
        copied = [ada.observe(ask(ada, f"thing {n}"), "copied") for n in range(4)]
        ada.learn()
        assert set(copied) <= trained_on(ada) | pinned(ada)


def test_every_program_on_a_home_says_the_same_of_what_an_app_saw(home: Path) -> None:
    with opened(home, observing="learned") as runtime:
        ada = runtime.user("ada")
        for number in range(6):
            ada.observe(ask(ada, f"thing {number}"), "copied")
        assert ada.learn().live
        told = ada.lessons()
    with opened(home) as runtime:
        ada = runtime.user("ada")
        assert ada.lessons() == told
        assert {account.use for account in told} == {"learned", "held back to judge by"}
        assert ada.pending().news == ()
        with pytest.raises(NothingToLearn):
            ada.learn()
        # What comes now is learned on top of it.
        correct(ada, 4, first=20)
        report = ada.learn()
        assert ada._services.store.catalog.revision("ada", str(report.revision)).parent is not None


def test_what_somebody_else_says_is_kept_under_their_name_and_not_trained_on(
    ada: User, home: Path
) -> None:
    reply = ask(ada)
    hers = ada.feedback(reply, rating=1)
    theirs = ada.feedback(reply, edit="Nine minutes.", source="judge")
    told = {account.signal.id: account for account in ada.lessons()}
    assert (told[hers].use, told[theirs].use) == ("to be learned", "only kept")
    assert told[theirs].signal.source == "judge"
    with nothing_changes(home), pytest.raises(InvalidId):
        ada.feedback(reply, rating=1, source="A Judge")


def test_what_somebody_else_shows_or_tells_is_kept_under_their_name_and_not_trained_on(
    ada: User, home: Path
) -> None:
    hers = [ada.teach(f"Write to friend {n}.", f"Dear {n}") for n in range(6)]
    shown = ada.teach("Write to friend 1.", "Yo 1", source="judge")
    told = ada.remember("I am Ada.", questions=["Who am I?"], answer="Ada", source="judge")
    assert {s.id: s.source for s in ada.signals()} == {
        **dict.fromkeys(hers, "person"),
        shown: "judge",
        told: "judge",
    }
    ada.learn()
    assert trained_on(ada) | pinned(ada) == set(hers)
    assert [layer.name for layer in ada.layers()] == ["style"]
    assert (uses(ada)[shown], uses(ada)[told]) == ("only kept", "acts now")
    with nothing_changes(home):
        for act in (ada.teach, ada.remember):
            words = ("x", "y") if act == ada.teach else ("x",)
            with pytest.raises(InvalidId, match="source"):
                act(*words, source="A Judge")


def test_a_fact_of_an_app_acts_until_a_person_says_otherwise_and_does_not_take_the_place_of_theirs(
    ada: User,
) -> None:
    def tell(name: str, source: str = "person") -> str:
        return ada.remember(
            f"My dog is {name}.", questions=["What is my dog called?"], answer=name, source=source
        )

    theirs = tell("Rex", "crm")
    assert [item.id for item in ada.items()] == [theirs]
    hers = tell("Biscuit")
    again = tell("Rover", "crm")
    assert [item.id for item in ada.items()] == [hers]
    assert ada.turn(ask(ada, "What is my dog called?")).used == (hers,)
    # Taken back by the person, nothing stands in the way of what the app says.
    ada.remove_item(hers)
    assert [item.id for item in ada.items()] == [again]


def test_what_a_person_edits_of_an_apps_fact_is_the_persons_and_is_learned(ada: User) -> None:
    theirs = ada.remember(
        "My dog is Rex.", questions=["What is my dog called?"], answer="Rex", source="crm"
    )
    hers = ada.edit_item(theirs, "My dog is Biscuit.", answer="Biscuit").id
    assert [(signal.id, signal.source) for signal in ada.signals()] == [(hers, "person")]
    ada.learn()
    assert trained_on(ada) == {hers}


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["edit", "prefer", "up", "down", "teach", "copied", "learn"]),
        st.integers(0, 3),
    ),
    min_size=4,
    max_size=16,
)


@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=ACTS, observing=st.sampled_from(["kept", "learned"]))
def test_whatever_is_said_every_signal_has_one_account_and_nothing_held_back_is_learned(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[str, int]], observing: str
) -> None:
    with opened(tmp_path_factory.mktemp("home"), observing=observing) as runtime:
        ada = runtime.user("ada")
        replies = [ask(ada, f"question {n}") for n in range(4)]
        for number, (act, which) in enumerate(acts):
            about = replies[which]
            match act:
                case "edit":
                    ada.feedback(about, edit=f"Ahoy! {number}")
                case "prefer":
                    ada.feedback(about, prefer=f"Arrr! {number}")
                case "up" | "down":
                    ada.feedback(about, rating=1 if act == "up" else -1)
                case "teach":
                    ada.teach(f"question {which}", f"Aye! {number}")
                case "copied":
                    ada.observe(about, "copied")
                case "learn":
                    with suppress(NothingToLearn):
                        ada.learn()
        told = ada.lessons(current=False)
        assert [account.signal for account in told] == list(ada.signals(current=False))
        assert [account.signal for account in ada.lessons()] == list(ada.signals())
        assert not trained_on(ada) & pinned(ada)
        for account in told:
            assert len(account.why) > 10
            assert (account.place == "layer") == (account.layer is not None)
            assert account.use != "learned" or account.signal.id in trained_on(ada)
            if observing == "kept":
                assert account.signal.source == "person" or account.use in (
                    "only kept",
                    "superseded",
                )
