"""Whatever was said can be taken back without destroying it: it counts no more, and the next learn builds without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import ask, correct, nothing_changes, opened, pinned, trained_on

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
def test_every_kind_of_feedback_can_be_taken_back_and_stays_in_the_history(
    ada: User, kind: SignalKind
) -> None:
    kept, gone = SAY[kind](ada, 1), SAY[kind](ada, 2)
    (taken,) = ada.retract(gone)
    assert (taken.id, taken.kind) == (gone, kind)
    assert [signal.id for signal in ada.signals()] == [kept]
    assert {a.signal.id: a.use for a in ada.lessons(current=False)}[gone] == "taken back"
    assert ada.signals(current=False)[-1] == taken
    assert verify(ada._services.store) == ()


@pytest.mark.parametrize("kind", [kind for kind in SignalKind if kind is not SignalKind.COMMENT])
def test_what_was_learned_of_it_is_unlearned_by_the_next_learn(ada: User, kind: SignalKind) -> None:
    for number in range(8):
        SAY[kind](ada, number)
    ada.learn()
    gone = min(trained_on(ada) - pinned(ada))
    assert ada.pending().news == ()
    ada.retract(gone)
    assert [news.kind for news in ada.pending().news] == ["taken back"]
    report = ada.learn()
    assert report.reasons[0] == reason(ReasonCode.LESSONS_RETRACTED, count=1)
    (head,) = (entry.revision for entry in ada.stack().entries)
    live = next(revision for revision in ada.revisions() if revision.id == head)
    assert live.parent is None
    assert gone not in live.signals
    assert ada.pending().news == ()


def test_a_question_that_was_held_back_and_taken_back_judges_no_more(ada: User) -> None:
    correct(ada, 8)
    ada.learn()
    held = min(pinned(ada))
    ada.retract(held)
    # Nothing was learned of it, so there is nothing to unlearn.
    assert ada.pending().news == ()
    correct(ada, 4, first=20)
    ada.learn()
    assert held not in ada.revisions()[-1].signals


def test_a_rule_and_a_fact_that_are_taken_back_act_no_more(ada: User) -> None:
    rule, told = ada.feedback(ask(ada), comment="Be brief."), fact(ada, "Biscuit")
    assert {item.id for item in ada.items()} == {rule, told}
    assert [signal.id for signal in ada.retract(rule, told)] == [rule, told]
    assert ada.items() == ()
    assert ada.turn(ask(ada, "What is my dog called?")).used == ()


def test_what_it_came_in_the_place_of_stays_off_since_that_was_given_up_too(ada: User) -> None:
    reply = ask(ada)
    ada.feedback(reply, edit="Six minutes.")
    ada.retract(ada.feedback(reply, edit="Eight minutes."))
    told = ada.remember("I live in Oslo.")
    ada.retract(ada.edit_item(told, "I live in Rome.").id)
    assert ada.signals() == ada.items() == ()
    # Whoever wants the older one after all says it again.
    again = ada.feedback(reply, edit="Six minutes.")
    assert [signal.id for signal in ada.signals()] == [again]
    assert [account.use for account in ada.lessons()] == ["to be learned"]


def test_what_only_gave_way_to_it_counts_again(ada: User) -> None:
    reply = ask(ada)
    liked, edited = ada.feedback(reply, rating=1), ada.feedback(reply, edit="Eight minutes.")
    older, newer = fact(ada, "Biscuit"), fact(ada, "Rex")
    assert {account.signal.id: account.place for account in ada.lessons()} == {
        liked: "kept",
        edited: "layer",
        older: "kept",
        newer: "memory",
    }
    ada.retract(edited, newer)
    assert {account.signal.id: account.place for account in ada.lessons()} == {
        liked: "layer",
        older: "memory",
    }


def test_what_an_app_gave_can_be_taken_back_too(home: Path) -> None:
    with opened(home, observing="kept") as runtime:
        ada = runtime.user("ada")
        seen = ada.observe(ask(ada), "copied")
        judged = ada.feedback("last", edit="Nine minutes.", source="judge")
        ada.retract(str(seen), judged)
        assert ada.signals() == ()


def test_what_a_person_takes_back_is_unlearned_though_an_app_says_it_too(ada: User) -> None:
    hers = fact(ada, "Biscuit")
    ada.learn()
    theirs = ada.remember(
        "My dog is Biscuit.", questions=["What is my dog called?"], answer="Biscuit", source="crm"
    )
    assert ada.pending().news == ()
    ada.retract(hers)
    assert [news.kind for news in ada.pending().news] == ["taken back"]
    ada.learn()
    assert ada.stack().entries == ()
    assert [item.id for item in ada.items()] == [theirs]


def test_the_beginning_of_an_id_is_enough_and_naming_one_twice_takes_it_back_once(
    ada: User,
) -> None:
    edit = ada.feedback(ask(ada), edit="Eight minutes.")
    assert [signal.id for signal in ada.retract(edit[:-1], edit)] == [edit]


WRONG: dict[str, tuple[Callable[[dict[str, str]], tuple[Any, ...]], type[Exception], str, str]] = {
    "unknown": (lambda s: ("s_nothing",), NotFound, "'s_nothing'", "s_"),
    "somebody else's": (lambda s: (s["theirs"],), NotFound, "ada", "s_"),
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
def test_what_cannot_be_taken_back_is_said_with_a_way_out_and_changes_nothing(
    ada: User, home: Path, wrong: str
) -> None:
    reply, other = ask(ada), ask(ada, "And a goose egg?")
    lines = [ada.feedback(reply, edit=f"{n} minutes.") for n in range(3)]
    off = [ada.feedback(other, rating=value) for value in (1, -1)]
    said = {
        "superseded": lines[0],
        "middle": lines[1],
        "newest": lines[2],
        "off": off[0],
        "last": off[1],
        "forgotten": ada.remember("I live in Oslo."),
        "turn": reply.turn_id,
    }
    ada.retract(off[1])
    ada.forget(said["forgotten"], rebuild=False)
    with opened(home) as runtime:
        said["theirs"] = runtime.user("bo").remember("I live in Rome.")
    given, error, words, hint = WRONG[wrong]
    with nothing_changes(home), pytest.raises(error) as caught:
        ada.retract(*given(said))
    assert type(caught.value) is error
    assert words.format(**said) in str(caught.value)
    assert hint.format(**said) in caught.value.hint  # type: ignore[attr-defined]
