"""``retract`` keeps a signal in the history without effect, and the next learn builds without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_counts import all_cases
from runtime_makers import ask, correct, home_unchanged, open_runtime, pinned, trained_on

from personalpeft import Forgotten, InvalidInput, NotFound, User
from personalpeft.learning.outcomes import ReasonCode, reason
from personalpeft.store.integrity import verify
from personalpeft.types import SignalKind


def fact(ada: User, name: str) -> str:
    return ada.remember(f"My dog is {name}.", questions=["What is my dog called?"], answer=name)


SAY: dict[SignalKind, Callable[[User, int], str]] = {
    SignalKind.RATING: lambda ada, n: ada.feedback(ask(ada, f"Why {n}?"), rating=1),
    SignalKind.EDIT: lambda ada, n: ada.feedback(ask(ada, f"Why {n}?"), edit=f"Ahoy! {n}"),
    SignalKind.PREFERENCE: lambda ada, n: ada.feedback(ask(ada, f"Why {n}?"), prefer=f"Ahoy! {n}"),
    SignalKind.REWARD: lambda ada, n: ada.feedback(ask(ada, f"Why {n}?"), reward=0.9),
    SignalKind.COMMENT: lambda ada, n: ada.feedback(ask(ada, f"Why {n}?"), comment=f"Say {n}."),
    SignalKind.DEMONSTRATION: lambda ada, n: ada.teach(
        f"Write to friend {n}.", f"Dear {n}", skill="email"
    ),
    SignalKind.FACT: lambda ada, n: ada.remember(
        f"My pet {n} is Rex {n}.", questions=[f"Who is my pet {n}?"], answer=f"Rex {n}"
    ),
}


@pytest.mark.parametrize("kind", SignalKind)
def test_each_kind_of_feedback_can_be_retracted_and_stays_in_the_history(
    ada: User, kind: SignalKind
) -> None:
    kept, retracted_id = SAY[kind](ada, 1), SAY[kind](ada, 2)
    (retracted,) = ada.retract(retracted_id)
    assert (retracted.id, retracted.kind) == (retracted_id, kind)
    assert [signal.id for signal in ada.signals()] == [kept]
    assert {a.signal.id: a.use for a in ada.signal_statuses(current=False)}[
        retracted_id
    ] == "retracted"
    assert ada.signals(current=False)[-1] == retracted
    assert verify(ada._services.store) == ()


@pytest.mark.parametrize(
    "kind",
    all_cases(
        (kind for kind in SignalKind if kind is not SignalKind.COMMENT),
        usual=[SignalKind.EDIT, SignalKind.FACT],
    ),
)
def test_retracted_lesson_is_unlearned_by_the_next_learn(ada: User, kind: SignalKind) -> None:
    for number in range(8):
        SAY[kind](ada, number)
    ada.learn()
    retracted_id = min(trained_on(ada) - pinned(ada))
    assert ada.pending().triggers == ()
    ada.retract(retracted_id)
    assert [trigger.kind for trigger in ada.pending().triggers] == ["lessons_retracted"]
    report = ada.learn()
    assert report.reasons[0] == reason(ReasonCode.LESSONS_RETRACTED, count=1)
    (head,) = (entry.revision for entry in ada.stack().entries)
    live = next(revision for revision in ada.revisions() if revision.id == head)
    assert live.parent is None
    assert retracted_id not in live.signals
    assert ada.pending().triggers == ()


def test_retracted_held_out_signal_judges_no_more(ada: User) -> None:
    correct(ada, 8)
    ada.learn()
    held = min(pinned(ada))
    ada.retract(held)
    # The signal was never trained on, so nothing is unlearned.
    assert ada.pending().triggers == ()
    correct(ada, 4, first=20)
    ada.learn()
    assert held not in ada.revisions()[-1].signals


def test_retracted_rule_and_fact_leave_the_prompt(ada: User) -> None:
    rule, stated = ada.feedback(ask(ada), comment="Be brief."), fact(ada, "Biscuit")
    assert {item.id for item in ada.items()} == {rule, stated}
    assert [signal.id for signal in ada.retract(rule, stated)] == [rule, stated]
    assert ada.items() == ()
    assert ada.turn(ask(ada, "What is my dog called?")).used == ()


def test_signal_superseded_by_a_retracted_one_stays_off(ada: User) -> None:
    reply = ask(ada)
    ada.feedback(reply, edit="Six minutes.")
    ada.retract(ada.feedback(reply, edit="Eight minutes."))
    stated = ada.remember("I live in Oslo.")
    ada.retract(ada.edit_item(stated, "I live in Rome.").id)
    assert ada.signals() == ada.items() == ()
    # The older edit counts after it is recorded again.
    again = ada.feedback(reply, edit="Six minutes.")
    assert [signal.id for signal in ada.signals()] == [again]
    assert [status.use for status in ada.signal_statuses()] == ["waits for the next learn"]


def test_signal_that_only_yielded_to_a_retracted_one_counts_again(ada: User) -> None:
    reply = ask(ada)
    liked, edited = ada.feedback(reply, rating=1), ada.feedback(reply, edit="Eight minutes.")
    older, newer = fact(ada, "Biscuit"), fact(ada, "Rex")
    assert {status.signal.id: status.place for status in ada.signal_statuses()} == {
        liked: "kept",
        edited: "layer",
        older: "kept",
        newer: "memory",
    }
    ada.retract(edited, newer)
    assert {status.signal.id: status.place for status in ada.signal_statuses()} == {
        liked: "layer",
        older: "memory",
    }


def test_signal_of_an_app_can_be_retracted(home: Path) -> None:
    with open_runtime(home, implicit_feedback="kept") as runtime:
        ada = runtime.user("ada")
        seen = ada.record_implicit_feedback(ask(ada), "copied")
        judged = ada.feedback("last", edit="Nine minutes.", source="judge")
        ada.retract(str(seen), judged)
        assert ada.signals() == ()


def test_signal_retracted_by_the_user_is_unlearned_though_an_app_repeats_it(ada: User) -> None:
    by_user = fact(ada, "Biscuit")
    ada.learn()
    theirs = ada.remember(
        "My dog is Biscuit.", questions=["What is my dog called?"], answer="Biscuit", source="crm"
    )
    assert ada.pending().triggers == ()
    ada.retract(by_user)
    assert [trigger.kind for trigger in ada.pending().triggers] == ["lessons_retracted"]
    ada.learn()
    assert ada.stack().entries == ()
    assert [item.id for item in ada.items()] == [theirs]


def test_id_prefix_is_enough_and_a_repeated_id_retracts_once(
    ada: User,
) -> None:
    edit = ada.feedback(ask(ada), edit="Eight minutes.")
    assert [signal.id for signal in ada.retract(edit[:-1], edit)] == [edit]


WRONG: dict[str, tuple[Callable[[dict[str, str]], tuple[Any, ...]], type[Exception], str, str]] = {
    "unknown": (lambda s: ("s_nothing",), NotFound, "'s_nothing'", "s_"),
    "another user's": (lambda s: (s["theirs"],), NotFound, "ada", "s_"),
    "superseded": (lambda s: (s["superseded"],), NotFound, "{newest}", "{newest}"),
    "in the middle of a line": (
        lambda s: (s["middle"],),
        NotFound,
        "{newest}",
        "{newest}",
    ),
    "of a line that is off": (
        lambda s: (s["off"],),
        NotFound,
        "{last}",
        "retracted",
    ),
    "taken back": (lambda s: (s["last"],), NotFound, "{last}", "again"),
    "forgotten": (lambda s: (s["forgotten"],), Forgotten, "", "backup"),
    "a turn": (lambda s: (s["turn"],), NotFound, "'t_", "s_"),
    "nothing": (lambda s: (), InvalidInput, "signal", "id"),
    "no text": (lambda s: (5,), InvalidInput, "5", "string"),
    "the second of two": (
        lambda s: (s["newest"], s["superseded"]),
        NotFound,
        "{newest}",
        "{newest}",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_retraction_is_refused_and_changes_nothing(
    ada: User, home: Path, wrong: str
) -> None:
    reply, other = ask(ada), ask(ada, "And a goose egg?")
    lines = [ada.feedback(reply, edit=f"{n} minutes.") for n in range(3)]
    off = [ada.feedback(other, rating=value) for value in (1, -1)]
    ids = {
        "superseded": lines[0],
        "middle": lines[1],
        "newest": lines[2],
        "off": off[0],
        "last": off[1],
        "forgotten": ada.remember("I live in Oslo."),
        "turn": reply.turn_id,
    }
    ada.retract(off[1])
    ada.forget(ids["forgotten"], rebuild=False)
    with open_runtime(home) as runtime:
        ids["theirs"] = runtime.user("bo").remember("I live in Rome.")
    given, error, words, hint = WRONG[wrong]
    with home_unchanged(home), pytest.raises(error) as caught:
        ada.retract(*given(ids))
    assert type(caught.value) is error
    assert words.format(**ids) in str(caught.value)
    assert hint.format(**ids) in caught.value.hint  # type: ignore[attr-defined]
