"""After a change of style the next build has the new style alone; on thin evidence nothing is
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runtime_makers import ask, open_runtime
from style_samples import answer, request

from personalpeft import NothingToLearn, User
from personalpeft.errors import NothingCause
from personalpeft.learning.gate import gate
from personalpeft.learning.gate.gate import Judgement
from personalpeft.learning.outcomes import ReasonCode, SignalUse, reason, text_reason
from personalpeft.learning.status import SignalStatus
from personalpeft.types import Verdict


@pytest.fixture
def ada(tmp_path: Path) -> Iterator[User]:
    with open_runtime(tmp_path / "home") as runtime:
        yield runtime.user("ada")


def edit_in_style(user: User, way: str, count: int, *, first: int) -> list[str]:
    numbers = range(first, first + count)
    return [
        user.feedback(ask(user, request(number)), edit=answer(number, way)) for number in numbers
    ]


def status_of(user: User, signal: str) -> SignalStatus:
    return next(each for each in user.signal_statuses() if each.signal.id == signal)


def roles(user: User) -> dict[str, str]:
    return dict(user.revisions("style")[-1].signals)


def test_build_after_a_style_change_starts_from_scratch_and_drops_the_old_style(
    ada: User,
) -> None:
    old = edit_in_style(ada, "signed", 12, first=0)
    first = ada.learn()
    # The fake base's likelihoods grow only with the number of lessons.
    new = edit_in_style(ada, "listed", 20, first=12)
    second = ada.learn()
    assert (first.verdict, second.verdict) == ("promoted", "promoted")
    assert ada.revisions("style")[-1].parent is None
    assert set(roles(ada)) == set(new)
    assert sorted(set(roles(ada).values())) == ["held_out", "trained"]
    assert second.scores["retention"]["asked"] == 0
    for signal in old:
        status = status_of(ada, signal)
        assert (status.place, status.use_code, status.layer) == ("unused", SignalUse.UNUSED, None)
        assert status.reason == reason(ReasonCode.STYLE_CHANGED_SINCE, since=new[0])


def test_edits_without_training_consent_change_no_style(ada: User) -> None:
    old = edit_in_style(ada, "signed", 12, first=0)
    for number in range(12, 24):
        ada.feedback(ask(ada, request(number)), edit=answer(number, "listed"), train=False)
    assert {status_of(ada, signal).place for signal in old} == {"layer"}
    ada.learn()
    assert set(roles(ada)) == set(old)


@pytest.mark.parametrize(
    "stamp",
    [
        lambda n: f"({2026 + n // 18}-{12 if n < 18 else 1:02}-{n % 18 + 10})",
        lambda n: f"[#{980 + n}]",
        lambda n: f"Ada, {2025 + n // 18}/{2026 + n // 18}",
    ],
    ids=["date", "number", "school_year"],
)
def test_numbers_in_replies_change_no_style(ada: User, stamp: Callable[[int], str]) -> None:
    """The year in each reply would otherwise divide the lessons at New Year."""
    for number in range(36):
        edit = f"{answer(number, 'signed')} {stamp(number)}"
        ada.feedback(ask(ada, request(number)), edit=edit)
    assert {each.reason.code for each in ada.signal_statuses()}.isdisjoint(
        {ReasonCode.STYLE_CHANGED_SINCE, ReasonCode.STYLE_CHANGED_BEFORE}
    )


@pytest.mark.exhaustive
def test_few_lessons_in_a_new_style_drop_nothing(ada: User) -> None:
    old = edit_in_style(ada, "signed", 12, first=0)
    ada.learn()
    edit_in_style(ada, "listed", 3, first=12)
    ada.learn()
    assert {status_of(ada, signal).place for signal in old} == {"layer"}
    assert ada.revisions("style")[-1].parent is not None


@pytest.mark.exhaustive
def test_returning_to_the_old_style_restores_its_lessons_and_keeps_them_held_out(ada: User) -> None:
    old = edit_in_style(ada, "signed", 12, first=0)
    ada.learn()
    held = {signal for signal, role in roles(ada).items() if role == "held_out"}
    between = edit_in_style(ada, "listed", 12, first=12)
    ada.learn()
    held |= {signal for signal, role in roles(ada).items() if role == "held_out"}
    again = edit_in_style(ada, "signed", 8, first=24)
    ada.learn()
    assert set(roles(ada)) == {*old, *again}
    assert {status_of(ada, signal).place for signal in between} == {"unused"}
    trained = {signal for signal, role in roles(ada).items() if role == "trained"}
    assert not held & trained
    assert held & set(old) <= {signal for signal, role in roles(ada).items() if role == "held_out"}


@pytest.mark.exhaustive
def test_held_out_prompt_answered_in_the_new_style_stays_held_out(ada: User) -> None:
    edit_in_style(ada, "signed", 12, first=0)
    ada.learn()
    held = {signal for signal, role in roles(ada).items() if role == "held_out"}
    edit_in_style(ada, "listed", 12, first=12)
    asked = next(
        number
        for number in range(12)
        if status_of(ada, max(held)).signal.payload["text"] == answer(number, "signed")
    )
    (answered_again,) = edit_in_style(ada, "listed", 1, first=asked)
    ada.learn()
    assert roles(ada)[answered_again] == "held_out"
    assert not held & set(roles(ada))


@pytest.mark.exhaustive
def test_thumbs_neither_change_nor_restore_a_style(ada: User) -> None:
    ledger = ada._services.store.ledger

    def liked(first: int, count: int) -> list[str]:
        """Like replies in the old style."""
        signals = []
        for number in range(first, first + count):
            like = ask(ada, request(number))
            turn = ledger.turn("ada", like.turn_id)
            in_old_style = ledger.add_turn(
                "ada",
                messages=turn.messages,
                reply=answer(number, "signed"),
                stack=turn.stack,
                sampling=turn.sampling,
                usage=turn.usage,
                finish_reason=turn.finish_reason,
            )
            signals.append(ada.feedback(in_old_style, rating=1))
        return signals

    old = edit_in_style(ada, "signed", 12, first=0)
    early = liked(12, 8)
    assert {status_of(ada, signal).place for signal in (*old, *early)} == {"layer"}
    new = edit_in_style(ada, "listed", 6, first=20)
    late = liked(26, 2)
    assert {status_of(ada, signal).place for signal in (*old, *early, *late)} == {"unused"}
    assert status_of(ada, late[0]).reason == reason(ReasonCode.STYLE_CHANGED_BEFORE, since=new[0])
    assert {status_of(ada, signal).place for signal in new} == {"layer"}


def test_style_change_drops_no_skill_lessons(ada: User) -> None:
    taught = [
        ada.teach(request(number), answer(number, "signed"), skill="letters")
        for number in range(12)
    ]
    edit_in_style(ada, "signed", 12, first=12)
    edit_in_style(ada, "listed", 4, first=24)
    assert {status_of(ada, signal).layer for signal in taught} == {"skill.letters"}


def test_retracting_lessons_of_the_new_style_restores_the_old_one(ada: User) -> None:
    old = edit_in_style(ada, "signed", 12, first=0)
    new = edit_in_style(ada, "listed", 4, first=12)
    assert status_of(ada, old[0]).place == "unused"
    ada._services.store.ledger.retract("ada", new[0])
    assert {status_of(ada, signal).place for signal in old} == {"layer"}


def test_old_style_stays_live_where_the_gate_refuses_the_new_one(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build of the new style is not made again from the same lessons."""
    old = edit_in_style(ada, "signed", 12, first=0)
    ada.learn()
    edit_in_style(ada, "listed", 20, first=12)
    monkeypatch.setattr(
        gate,
        "judge",
        lambda evidence, margins, **more: Judgement(Verdict.REFUSED, (text_reason("it is worse"),)),
    )
    ada.learn()
    assert status_of(ada, old[0]).use_code is SignalUse.UNUSED
    assert ada.pending().triggers == ()
    with pytest.raises(NothingToLearn) as nothing:
        ada.learn()
    assert nothing.value.cause is NothingCause.NOT_LIVE
    assert ada.stack().entries


@pytest.mark.exhaustive
def test_ends_are_measured_on_new_held_out_edits_that_fit(ada: User) -> None:
    edit_in_style(ada, "signed", 8, first=0)
    scores = ada.learn().scores["text_quality"]
    assert scores["end_surprisal"] is not None
    assert scores["learned_end_surprisal"] is not None
    long = "and so it went on " * 100
    for number in range(8, 16):
        ada.feedback(ask(ada, request(number)), edit=f"{long} {number}")
    scores = ada.learn().scores["text_quality"]
    assert scores["pmi"] is not None
    assert scores["end_surprisal"] is None
