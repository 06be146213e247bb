"""When the way of answering changes, the later word wins; on thin evidence nothing is dropped."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from runtime_makers import ask, opened

from personalpeft import NothingToLearn, User
from personalpeft.errors import NothingCause
from personalpeft.learning import pipeline
from personalpeft.learning.data.style import PromptResponse, find_style_change
from personalpeft.learning.gate.gate import Judgement
from personalpeft.learning.outcomes import ReasonCode, SignalUse, reason, text_reason
from personalpeft.learning.status import SignalStatus
from personalpeft.types import Verdict

WAYS = {
    "signed": lambda text: f"{text}\n\nCheers, Ada",
    "listed": lambda text: f"- {text}",
    "numbered": lambda text: f"1. {text}",
    "greeted": lambda text: f"Ahoy! {text}",
    "greeted and signed": lambda text: f"Ahoy! {text}\n\nCheers, Ada",
    "loud": str.upper,
    "plain": str,
}
_ASKED = ("How do I wash", "Why does nobody like", "Where can I buy", "What should I know about")
_WHAT = (
    "a woollen hat",
    "old tin pots",
    "the blue carpet",
    "my bicycle",
    "rubber boots",
    "fresh figs",
    "a garden chair",
)
# The plain answers begin and end each in its own way, as those of people do.
_SAY = ("Take", "Look at", "Begin with", "Forget", "Never mind", "Ask for", "Some say it is")
_MANY = len(_ASKED) * len(_WHAT)

# Deadlines would measure the machine.
many = examples(40)
ways = st.sampled_from(sorted(WAYS))
# Of three in a row two are never the other: no cut in time that would stand for a change.
mixed = st.lists(st.integers(1, 2), max_size=40).map(
    lambda runs: [side % 2 for side, length in enumerate(runs) for _ in range(length)]
)


def request(number: int) -> str:
    return f"{_ASKED[number % len(_ASKED)]} {_WHAT[number % len(_WHAT)]}{'' if number < _MANY else f' in {number}'}?"


def answer(number: int, way: str) -> str:
    return WAYS[way](
        f"{_SAY[number * 3 % len(_SAY)]} {_WHAT[(number + 3) % len(_WHAT)]}, number {number}."
    )


def shown(course: Sequence[str]) -> list[PromptResponse]:
    return [
        PromptResponse(request(number), answer(number, way)) for number, way in enumerate(course)
    ]


def found_at(course: Sequence[str]) -> int | None:
    change = find_style_change(tuple(shown(course)))
    return change.index if change else None


@many
@given(old=ways, new=ways, before=st.integers(8, 40), since=st.integers(4, 16))
def test_a_clean_change_is_found_where_it_is_from_the_fourth_lesson_on(
    old: str, new: str, before: int, since: int
) -> None:
    course = [old] * before + [new] * since
    assert found_at(course) == (before if old != new else None)
    assert found_at(course[: before + 3]) is None


@many
@given(new=ways.filter(lambda way: way != "signed"), stray=st.integers(0, 19))
def test_one_stray_before_or_after_hides_no_change(new: str, stray: int) -> None:
    course = ["signed"] * 12 + [new] * 8
    course[stray] = "signed" if course[stray] == new else new
    change = find_style_change(tuple(shown(course[: stray + 5] if stray >= 12 else course)))
    assert change is not None
    assert all(
        change.matches(each) is (way == new)
        for each, way in zip(shown(course), course, strict=True)
    )


@many
@given(one=ways, other=ways, sides=mixed)
def test_two_ways_that_alternate_are_no_change(one: str, other: str, sides: list[int]) -> None:
    assert found_at([(one, other)[side] for side in sides]) is None


def test_a_mixture_drawn_by_chance_is_hardly_ever_taken_for_a_change() -> None:
    chance = random.Random(0)
    taken = 0
    for _ in range(200):
        share = chance.uniform(0.1, 0.9)
        taken += (
            found_at(["listed" if chance.random() < share else "signed" for _ in range(24)])
            is not None
        )
    assert taken <= 10


@many
@given(
    course=st.lists(st.sampled_from(["signed", "listed", "plain"]), max_size=40),
    more=st.integers(0, 20),
)
def test_what_was_found_is_found_again_with_every_lesson_that_comes_after(
    course: list[str], more: int
) -> None:
    earlier, later = found_at(course[: len(course) - more]), found_at(course)
    if earlier is not None:
        assert later is not None
        assert later >= earlier


@many
@given(texts=st.lists(st.text(min_size=1), max_size=30))
def test_answers_that_share_nothing_never_change(texts: list[str]) -> None:
    course = [
        PromptResponse(request(number), f"{chr(0x4E00 + number)}aA{text}{chr(0x5E00 + number)}")
        for number, text in enumerate(texts)
    ]
    assert find_style_change(tuple(course)) is None


def test_going_back_is_a_change_too_and_what_was_in_that_way_agrees_with_it() -> None:
    course = ["signed"] * 12 + ["listed"] * 12 + ["signed"] * 4
    change = find_style_change(tuple(shown(course)))
    assert change is not None
    assert change.index == 24
    assert [change.matches(each) for each in shown(course)] == [way == "signed" for way in course]


def test_what_only_comes_to_it_is_a_change_since_an_answer_without_it_says_otherwise() -> None:
    course = ["greeted"] * 12 + ["greeted and signed"] * 4
    change = find_style_change(tuple(shown(course)))
    assert change is not None
    assert [mark.kind for mark, _ in change.marks] == ["closing"]


ALIKE = (
    *(
        "Write a short message to my aunt.",
        "Write a short message to Tom.",
        "Write a short message to the bank.",
    ),
    *(
        "Write a short message to Eva.",
        "Write a short message to my boss.",
        "Write a short message to the city.",
    ),
)
UNALIKE = (
    *("Draft a note for Anna.", "Compose a letter to the landlord.", "Reply to Tom's invitation."),
    *(
        "Invite my parents to lunch.",
        "Thank the team for the work.",
        "Congratulate Eva on her job.",
    ),
)


@pytest.mark.parametrize("requests", [ALIKE, UNALIKE])
@pytest.mark.parametrize("count", [4, 5, 6])
def test_another_kind_of_request_with_a_manner_of_its_own_takes_nothing_back(
    requests: Sequence[str], count: int
) -> None:
    messages = [
        PromptResponse(each, f"[Draft] {answer(number, 'plain')}")
        for number, each in enumerate(requests[:count])
    ]
    assert find_style_change((*shown(["greeted"] * 16), *messages)) is None


def test_the_page_on_learning_has_the_numbers_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs/explanation/learning.md").read_text("utf-8")
    assert "at most once in 250: 4 after 7, 5 after 5" in page
    for older, newer in ((7, 4), (5, 5)):
        assert found_at(["signed"] * older + ["listed"] * newer) == older
        assert found_at(["signed"] * (older - 1) + ["listed"] * newer) is None


# From here on by what a user sees.


@pytest.fixture
def ada(tmp_path: Path) -> Iterator[User]:
    with opened(tmp_path / "home") as runtime:
        yield runtime.user("ada")


def edited(user: User, way: str, count: int, *, first: int) -> list[str]:
    said = range(first, first + count)
    return [user.feedback(ask(user, request(number)), edit=answer(number, way)) for number in said]


def account(user: User, signal: str) -> SignalStatus:
    return next(each for each in user.lessons() if each.signal.id == signal)


def roles(user: User) -> dict[str, str]:
    return dict(user.revisions("style")[-1].signals)


def test_after_a_change_the_next_build_starts_from_nothing_and_the_old_way_is_in_none_of_it(
    ada: User,
) -> None:
    old = edited(ada, "signed", 12, first=0)
    first = ada.learn()
    # More than there were, since more to learn from is all that the fake base's answers are likelier for.
    new = edited(ada, "listed", 20, first=12)
    second = ada.learn()
    assert (first.verdict, second.verdict) == ("promoted", "promoted")
    assert ada.revisions("style")[-1].parent is None
    assert set(roles(ada)) == set(new)
    assert sorted(set(roles(ada).values())) == ["pinned", "train"]
    assert second.scores["retention"]["asked"] == 0
    for signal in old:
        told = account(ada, signal)
        assert (told.place, told.use_code, told.layer) == ("kept", SignalUse.UNUSED, None)
        assert told.reason == reason(ReasonCode.STYLE_CHANGED_SINCE, since=new[0])


def test_with_a_few_lessons_in_the_new_way_nothing_is_dropped_yet(ada: User) -> None:
    old = edited(ada, "signed", 12, first=0)
    ada.learn()
    edited(ada, "listed", 3, first=12)
    ada.learn()
    assert {account(ada, signal).place for signal in old} == {"layer"}
    assert ada.revisions("style")[-1].parent is not None


def test_going_back_brings_the_old_lessons_back_and_what_was_held_back_stays_so(ada: User) -> None:
    old = edited(ada, "signed", 12, first=0)
    ada.learn()
    held = {signal for signal, role in roles(ada).items() if role == "pinned"}
    between = edited(ada, "listed", 12, first=12)
    ada.learn()
    held |= {signal for signal, role in roles(ada).items() if role == "pinned"}
    again = edited(ada, "signed", 8, first=24)
    ada.learn()
    assert set(roles(ada)) == {*old, *again}
    assert {account(ada, signal).place for signal in between} == {"kept"}
    trained = {signal for signal, role in roles(ada).items() if role == "train"}
    assert not held & trained
    assert held & set(old) <= {signal for signal, role in roles(ada).items() if role == "pinned"}


def test_a_question_in_the_old_way_that_is_answered_anew_stays_a_question(ada: User) -> None:
    edited(ada, "signed", 12, first=0)
    ada.learn()
    held = {signal for signal, role in roles(ada).items() if role == "pinned"}
    edited(ada, "listed", 12, first=12)
    asked = next(
        number
        for number in range(12)
        if account(ada, max(held)).signal.payload["text"] == answer(number, "signed")
    )
    (anew,) = edited(ada, "listed", 1, first=asked)
    ada.learn()
    assert roles(ada)[anew] == "pinned"
    assert not held & set(roles(ada))


def test_thumbs_neither_make_a_change_nor_bring_the_old_way_back(ada: User) -> None:
    def liked(first: int, count: int) -> list[str]:
        return [
            ada.feedback(ask(ada, request(number)), rating=1)
            for number in range(first, first + count)
        ]

    old = edited(ada, "signed", 12, first=0)
    early = liked(12, 8)
    assert {account(ada, signal).place for signal in (*old, *early)} == {"layer"}
    new = edited(ada, "listed", 6, first=20)
    late = liked(26, 2)
    assert {account(ada, signal).place for signal in (*old, *early, *late)} == {"kept"}
    assert account(ada, late[0]).reason == reason(ReasonCode.STYLE_CHANGED_BEFORE, since=new[0])
    assert {account(ada, signal).place for signal in new} == {"layer"}


def test_a_change_of_the_style_takes_nothing_from_a_skill(ada: User) -> None:
    taught = [
        ada.teach(request(number), answer(number, "signed"), skill="letters")
        for number in range(12)
    ]
    edited(ada, "signed", 12, first=12)
    edited(ada, "listed", 4, first=24)
    assert {account(ada, signal).layer for signal in taught} == {"skill.letters"}


def test_what_is_taken_back_of_the_new_way_brings_the_old_one_back(ada: User) -> None:
    old = edited(ada, "signed", 12, first=0)
    new = edited(ada, "listed", 4, first=12)
    assert account(ada, old[0]).place == "kept"
    ada._services.store.ledger.retract("ada", new[0])
    assert {account(ada, signal).place for signal in old} == {"layer"}


def test_the_old_way_is_not_let_go_where_the_gate_refuses_the_new_one(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What later lessons outgrew was not taken back, so there is nothing to unlearn of what is live."""
    old = edited(ada, "signed", 12, first=0)
    ada.learn()
    edited(ada, "listed", 20, first=12)
    monkeypatch.setattr(
        pipeline,
        "judge",
        lambda evidence, margins, **more: Judgement(Verdict.REFUSED, (text_reason("it is worse"),)),
    )
    ada.learn()
    assert account(ada, old[0]).use_code is SignalUse.UNUSED
    assert ada.pending().news == ()
    with pytest.raises(NothingToLearn) as nothing:
        ada.learn()
    assert nothing.value.cause is NothingCause.NOTHING_NEW
    assert ada.stack().entries
