"""Each signal has a status.

Implicit feedback is kept only where enabled, and trained only on request.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from runtime_makers import ask, correct, home_unchanged, open_runtime, pinned, trained_on

from personalpeft import InvalidId, InvalidInput, NotFound, NothingToLearn, User
from personalpeft.chat.implicit_feedback import IMPLICIT_RATINGS
from personalpeft.learning.outcomes import ReasonCode, SignalUse, reason
from personalpeft.types import Verdict


def uses(user: User, *, current: bool = True) -> dict[str, str]:
    return {status.signal.id: status.use for status in user.signal_statuses(current=current)}


def test_status_names_the_use_of_a_signal_and_the_revision_that_learned_it(
    ada: User,
) -> None:
    edits = correct(ada, 6)
    rule = ada.feedback("last", comment="Be brief.")
    fact = ada.remember("My dog is called Biscuit.")
    down = ada.feedback(ask(ada, "something else"), rating=-1)
    assert set(uses(ada).values()) == {
        "waits for the next learn",
        "applies in the prompt",
        "recorded only",
    }
    report = ada.learn()
    later = correct(ada, 1, first=50)
    statuses = {status.signal.id: status for status in ada.signal_statuses()}
    assert (
        list(statuses)
        == [signal.id for signal in ada.signals()]
        == [*edits, rule, fact, down, *later]
    )
    for edit in edits:
        assert statuses[edit].place == "layer"
        assert statuses[edit].layer == "style"
        assert statuses[edit].revision == report.revision
        assert statuses[edit].is_held_out == (edit in pinned(ada))
        assert (statuses[edit].use_code is SignalUse.LEARNED) == (edit in trained_on(ada))
    assert [
        (statuses[s].place, statuses[s].use_code, statuses[s].revision) for s in (rule, fact, down)
    ] == [
        ("rule", SignalUse.IN_PROMPT, None),
        ("memory", SignalUse.IN_PROMPT, None),
        ("unused", SignalUse.UNUSED, None),
    ]
    assert statuses[later[0]].use_code is SignalUse.PENDING


def test_lesson_keeps_its_first_live_revision_and_loses_it_with_a_rollback(
    ada: User,
) -> None:
    edits = correct(ada, 6)
    first = ada.learn()
    correct(ada, 4, first=20)
    assert ada.learn().verdict is Verdict.PROMOTED
    learned = [
        status
        for status in ada.signal_statuses()
        if status.signal.id in edits and not status.is_held_out
    ]
    assert {status.revision for status in learned} == {first.revision}
    ada.rollback("style", None)
    assert {use for signal, use in uses(ada).items() if signal in edits} == {
        "trained on, not live",
        "held out to judge",
    }


def test_superseded_and_retracted_signals_are_listed_on_request(ada: User) -> None:
    reply = ask(ada)
    first = ada.feedback(reply, edit="Six minutes.")
    second = ada.feedback(reply, edit="Eight minutes.")
    fact = ada.remember("My dog is called Biscuit.")
    ada.retract_item(fact)
    assert uses(ada) == {second: "waits for the next learn"}
    assert uses(ada, current=False) == {
        first: "superseded",
        second: "waits for the next learn",
        fact: "retracted",
    }
    assert second in next(a.why for a in ada.signal_statuses(current=False) if a.signal.id == first)


def test_two_comments_on_one_reply_both_act(ada: User) -> None:
    reply = ask(ada)
    rules = [ada.feedback(reply, comment=text) for text in ("Be brief.", "Use metric units.")]
    assert [item.id for item in ada.items()] == rules
    assert ada.turn(ask(ada, "And a goose egg?")).used == tuple(rules)


def test_later_edit_of_a_request_supersedes_the_older_and_stays_held_out(
    ada: User,
) -> None:
    correct(ada, 8)
    ada.learn()
    questions = pinned(ada)
    for n in range(8):
        ada.feedback(ask(ada, f"question {n}"), edit=f"Aye aye! Answer {n}. Arrr!")
    ada.learn()
    statuses = {status.signal.id: status for status in ada.signal_statuses()}
    heirs = [
        statuses[s.id]
        for s in ada.signals()
        if s.id in statuses and "Aye aye" in s.payload["text"] and statuses[s.id].is_held_out
    ]
    assert len(heirs) >= len(questions)
    assert not trained_on(ada) & pinned(ada)
    for signal in questions:
        assert statuses[signal].use_code is SignalUse.UNUSED
        assert statuses[signal].reason == reason(ReasonCode.CONTRADICTED, kind="edit")


def test_implicit_feedback_is_refused_unless_enabled(ada: User, home: Path) -> None:
    reply = ask(ada)
    with home_unchanged(home):
        assert [ada.record_implicit_feedback(reply, event) for event in IMPLICIT_RATINGS] == [
            None
        ] * 4
        with pytest.raises(InvalidInput):
            ada.record_implicit_feedback(reply, "sighed")
        with pytest.raises(NotFound):
            ada.record_implicit_feedback("t_nothing", "copied")
    with pytest.raises(InvalidInput), open_runtime(home, implicit_feedback="yes"):
        pass


def test_implicit_feedback_is_recorded_with_its_event_and_not_trained_by_default(
    home: Path,
) -> None:
    with open_runtime(home, implicit_feedback="kept") as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        kept = {
            ada.record_implicit_feedback(ask(ada, f"{event} {n}"), event): event
            for event in IMPLICIT_RATINGS
            for n in range(4)
        }
        ada.learn()
        statuses = {status.signal.id: status for status in ada.signal_statuses()}
        for signal, event in kept.items():
            assert signal is not None
            assert (statuses[signal].place, statuses[signal].use) == ("unused", "recorded only")
            assert statuses[signal].signal.source == "app"
            assert statuses[signal].signal.payload == {
                "value": IMPLICIT_RATINGS[event],
                "how": event,
            }
        assert not trained_on(ada) & set(kept)


def test_app_may_train_implicit_feedback_as_weak_ratings(home: Path) -> None:
    with open_runtime(home, implicit_feedback="learned") as runtime:
        ada = runtime.user("ada")
        correct(ada, 4)
        copied = [ada.record_implicit_feedback(ask(ada, f"thing {n}"), "copied") for n in range(4)]
        ada.learn()
        assert set(copied) <= trained_on(ada) | pinned(ada)


def test_each_process_on_a_home_reports_the_same_use_of_implicit_feedback(home: Path) -> None:
    with open_runtime(home, implicit_feedback="learned") as runtime:
        ada = runtime.user("ada")
        for number in range(6):
            ada.record_implicit_feedback(ask(ada, f"thing {number}"), "copied")
        assert ada.learn().live
        statuses = ada.signal_statuses()
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        assert ada.signal_statuses() == statuses
        assert {status.use for status in statuses} == {"trained on", "held out to judge"}
        assert ada.pending().triggers == ()
        with pytest.raises(NothingToLearn):
            ada.learn()
        # The new lessons are trained on top of it.
        correct(ada, 4, first=20)
        report = ada.learn()
        assert ada._services.store.catalog.revision("ada", str(report.revision)).parent is not None


def test_feedback_of_another_source_keeps_its_name_and_is_not_trained(
    ada: User, home: Path
) -> None:
    reply = ask(ada)
    by_user = ada.feedback(reply, rating=1)
    by_other = ada.feedback(reply, edit="Nine minutes.", source="judge")
    statuses = {status.signal.id: status for status in ada.signal_statuses()}
    assert (statuses[by_user].use, statuses[by_other].use) == (
        "waits for the next learn",
        "recorded only",
    )
    assert statuses[by_other].signal.source == "judge"
    with home_unchanged(home), pytest.raises(InvalidId):
        ada.feedback(reply, rating=1, source="A Judge")


def test_demonstrations_and_facts_of_another_source_keep_its_name_and_are_not_trained(
    ada: User, home: Path
) -> None:
    by_user = [ada.teach(f"Write to friend {n}.", f"Dear {n}") for n in range(6)]
    shown = ada.teach("Write to friend 1.", "Yo 1", source="judge")
    statuses = ada.remember("I am Ada.", questions=["Who am I?"], answer="Ada", source="judge")
    assert {s.id: s.source for s in ada.signals()} == {
        **dict.fromkeys(by_user, "person"),
        shown: "judge",
        statuses: "judge",
    }
    ada.learn()
    assert trained_on(ada) | pinned(ada) == set(by_user)
    assert [layer.name for layer in ada.layers()] == ["style"]
    assert (uses(ada)[shown], uses(ada)[statuses]) == ("recorded only", "applies in the prompt")
    with home_unchanged(home):
        for act in (ada.teach, ada.remember):
            words = ("x", "y") if act == ada.teach else ("x",)
            with pytest.raises(InvalidId, match="source"):
                act(*words, source="A Judge")


def test_app_fact_acts_until_the_user_contradicts_it_and_supersedes_no_user_fact(
    ada: User,
) -> None:
    def tell(name: str, source: str = "person") -> str:
        return ada.remember(
            f"My dog is {name}.", questions=["What is my dog called?"], answer=name, source=source
        )

    by_other = tell("Rex", "crm")
    assert [item.id for item in ada.items()] == [by_other]
    by_user = tell("Biscuit")
    again = tell("Rover", "crm")
    assert [item.id for item in ada.items()] == [by_user]
    assert ada.turn(ask(ada, "What is my dog called?")).used == (by_user,)
    # Once the user retracts the fact, the app's fact acts again.
    ada.retract_item(by_user)
    assert [item.id for item in ada.items()] == [again]


def test_app_fact_edited_by_the_user_becomes_the_users_and_is_trained(ada: User) -> None:
    by_other = ada.remember(
        "My dog is Rex.", questions=["What is my dog called?"], answer="Rex", source="crm"
    )
    by_user = ada.edit_item(by_other, "My dog is Biscuit.", answer="Biscuit").id
    assert [(signal.id, signal.source) for signal in ada.signals()] == [(by_user, "person")]
    ada.learn()
    assert trained_on(ada) == {by_user}


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["edit", "prefer", "up", "down", "teach", "copied", "learn"]),
        st.integers(0, 3),
    ),
    min_size=4,
    max_size=16,
)


@examples(6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=ACTS, implicit=st.sampled_from(["kept", "learned"]))
def test_each_signal_has_one_status_and_no_held_out_signal_is_trained(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[str, int]], implicit: str
) -> None:
    with open_runtime(tmp_path_factory.mktemp("home"), implicit_feedback=implicit) as runtime:
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
                    ada.record_implicit_feedback(about, "copied")
                case "learn":
                    with suppress(NothingToLearn):
                        ada.learn()
        statuses = ada.signal_statuses(current=False)
        assert [status.signal for status in statuses] == list(ada.signals(current=False))
        assert [status.signal for status in ada.signal_statuses()] == list(ada.signals())
        assert not trained_on(ada) & pinned(ada)
        for status in statuses:
            assert len(status.why) > 10
            assert (status.place == "layer") == (status.layer is not None)
            assert status.use != "trained on" or status.signal.id in trained_on(ada)
            if implicit == "kept":
                assert status.signal.source == "person" or status.use in (
                    "recorded only",
                    "superseded",
                )
