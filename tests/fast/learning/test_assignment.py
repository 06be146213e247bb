"""The write policy: each signal has one assignment, and the strongest and latest signal of a turn
is its lesson.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.learning.data.lesson_assignment import (
    MIN_THUMBS,
    Assignment,
    assign,
    lessons_for,
    undesirable_lessons_for,
)
from personalpeft.learning.outcomes import ReasonCode, reason
from personalpeft.types import TRAINS, Message, Sampling, Signal, SignalKind, Stack, Turn, Usage

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
REPLIES = {"turn_1": "Boil it.", "turn_2": "No idea.", "turn_3": ""}


def turn(turn_id: str) -> Turn:
    asked = (Message("user", f"question of {turn_id}"),)
    reply = REPLIES[turn_id]
    return Turn(turn_id, "ada", NOON, asked, reply, Stack("base"), Sampling(), Usage(3, 2), "stop")


def signal(
    number: int,
    kind: SignalKind,
    payload: dict[str, Any],
    on: str | None = "turn_1",
    source: str = "person",
) -> Signal:
    return Signal(
        f"sig_{number}", "ada", kind, NOON + timedelta(seconds=number), payload, on, source
    )


def edit(number: int, text: str = "Eight minutes.", on: str = "turn_1") -> Signal:
    return signal(number, SignalKind.EDIT, {"text": text}, on)


def reward(number: int, value: float, on: str = "turn_1") -> Signal:
    return signal(number, SignalKind.REWARD, {"value": value}, on)


def rating(
    number: int, value: int, on: str = "turn_1", source: str = "person", **more: bool
) -> Signal:
    return signal(number, SignalKind.RATING, {"value": value, **more}, on, source)


def prefer(number: int, text: str = "Seven minutes.") -> Signal:
    return signal(number, SignalKind.PREFERENCE, {"text": text})


def demonstration(
    number: int, skill: str | None = None, answer: str = "Dear Bo", source: str = "person"
) -> Signal:
    payload = {"prompt": "Write to Bo.", "answer": answer, "skill": skill}
    return signal(number, SignalKind.DEMONSTRATION, payload, None, source)


def fact(number: int, answer: str, source: str = "person") -> Signal:
    payload = {
        "text": f"My dog is {answer}.",
        "questions": ["What is my dog called?"],
        "answer": answer,
    }
    return signal(number, SignalKind.FACT, payload, None, source)


TURNS = st.sampled_from(sorted(REPLIES))
PAYLOADS: dict[SignalKind, st.SearchStrategy[tuple[dict[str, Any], str | None]]] = {
    SignalKind.RATING: st.tuples(
        st.fixed_dictionaries(
            {"value": st.sampled_from([-1, 1])}, optional={TRAINS: st.booleans()}
        ),
        TURNS,
    ),
    SignalKind.EDIT: st.tuples(st.fixed_dictionaries({"text": st.text(min_size=1)}), TURNS),
    SignalKind.PREFERENCE: st.tuples(st.fixed_dictionaries({"text": st.text(min_size=1)}), TURNS),
    SignalKind.COMMENT: st.tuples(st.fixed_dictionaries({"text": st.text(min_size=1)}), TURNS),
    SignalKind.REWARD: st.tuples(st.fixed_dictionaries({"value": st.floats(-1, 1)}), TURNS),
    SignalKind.DEMONSTRATION: st.tuples(
        st.fixed_dictionaries(
            {
                "prompt": st.text(min_size=1),
                "answer": st.text(min_size=1),
                "skill": st.sampled_from([None, "email"]),
            }
        ),
        st.none(),
    ),
    SignalKind.FACT: st.tuples(
        st.fixed_dictionaries(
            {"text": st.text(min_size=1)},
            optional={
                "questions": st.lists(st.sampled_from(["Who?", "When?"]), max_size=2),
                "answer": st.sampled_from(["Bo", "Cy"]),
            },
        ),
        st.none(),
    ),
}


@st.composite
def ledgers(draw: st.DrawFn) -> list[Signal]:
    kinds = draw(st.lists(st.sampled_from(sorted(SignalKind)), max_size=12))
    signals = [
        (kind, *draw(PAYLOADS[kind]), draw(st.sampled_from(["person", "app"]))) for kind in kinds
    ]
    return [signal(number, *each) for number, each in enumerate(signals)]


def only(assignments: tuple[Assignment, ...]) -> Assignment:
    (assignment,) = assignments
    return assignment


@given(signals=ledgers())
def test_each_signal_has_one_assignment_with_a_reason(
    signals: list[Signal],
) -> None:
    assignments = assign(signals, turn)
    assert [assignment.signal for assignment in assignments] == signals
    for assignment in assignments:
        assert len(str(assignment.reason)) > 10
        assert (assignment.place == "layer") == (assignment.lesson is not None)
        assert (assignment.layer is not None) == (
            assignment.lesson is not None or bool(assignment.extra_examples)
        )
        assert assignment.place == "memory" or not assignment.extra_examples
        assert assignment.superseded_by is None or assignment.place == "unused"


@given(signals=ledgers())
def test_only_the_users_own_signals_and_enabled_implicit_feedback_are_lessons(
    signals: list[Signal],
) -> None:
    assignments = assign(signals, turn)
    for assignment in assignments:
        if assignment.lesson is not None and assignment.signal.source != "person":
            assert assignment.signal.payload[TRAINS]
            assert assignment.signal.kind is SignalKind.RATING
        assert not assignment.extra_examples or assignment.signal.source == "person"
    by_user = [each for each in signals if each.source == "person"]
    assert [r for r in assignments if r.signal in by_user and (r.lesson or r.extra_examples)] == [
        r for r in assign(by_user, turn) if r.lesson or r.extra_examples
    ]


@given(signals=ledgers())
def test_request_has_one_wanted_answer_per_layer_and_it_is_the_latest(
    signals: list[Signal],
) -> None:
    assignments = assign(signals, turn)
    written = [r for r in assignments if r.lesson and r.lesson.kind is not SignalKind.RATING]
    assert len({(r.layer, r.lesson.messages) for r in written if r.lesson}) == len(written)
    followed = {r.signal.id: r.superseded_by for r in assignments}
    for assignment in assignments:
        # A superseded signal leads to the current lesson in a finite number of steps.
        at, steps = assignment.signal.id, 0
        while (after := followed[at]) is not None:
            at, steps = after, steps + 1
            assert steps <= len(signals)


@given(signals=ledgers())
def test_turn_has_at_most_one_lesson_from_its_strongest_and_latest_signal(
    signals: list[Signal],
) -> None:
    strength = {
        SignalKind.RATING: 1,
        SignalKind.REWARD: 1,
        SignalKind.PREFERENCE: 2,
        SignalKind.EDIT: 3,
    }
    taught = {r.signal.turn: r.signal for r in assign(signals, turn) if r.lesson and r.signal.turn}
    assert len(taught) == sum(bool(r.lesson and r.signal.turn) for r in assign(signals, turn))
    for about, by in taught.items():
        on_it = [s for s in signals if s.turn == about and s.kind in strength]
        # Implicit feedback counts where the user gave none.
        rivals = [s for s in on_it if s.source == "person"] or [
            s for s in on_it if s.payload.get(TRAINS)
        ]
        clear = [
            s for s in rivals if s.kind is not SignalKind.REWARD or abs(s.payload["value"]) >= 0.5
        ]
        assert by == max(clear, key=lambda s: (strength[s.kind], s.at))


@given(signals=ledgers())
def test_lesson_belongs_to_one_layer_in_ledger_order(
    signals: list[Signal],
) -> None:
    assignments = assign(signals, turn)
    found = [
        lesson.signal
        for layer in ("style", "skill.email", "memory")
        for lesson in lessons_for(assignments, layer)
    ]
    assert sorted(found) == sorted(
        lesson.signal
        for r in assignments
        for lesson in (r.lesson, *r.extra_examples)
        if lesson is not None
    )
    style = [lesson.signal for lesson in lessons_for(assignments, "style")]
    assert style == [s.id for s in signals if s.id in set(style)]


def test_edit_trains_its_text_against_the_original_reply() -> None:
    lesson = only(assign([edit(1)], turn)).lesson
    assert lesson is not None
    assert (lesson.chosen, lesson.rejected) == ("Eight minutes.", "Boil it.")
    assert lesson.messages == turn("turn_1").messages


def test_edit_of_an_empty_reply_has_no_rejected_text() -> None:
    lesson = only(assign([edit(1, on="turn_3")], turn)).lesson
    assert lesson is not None
    assert lesson.rejected is None


def test_edit_outranks_a_rating_in_either_order() -> None:
    for signals in ([edit(1), rating(2, 1)], [rating(1, 1), edit(2)]):
        kept, learned = sorted(assign(signals, turn), key=lambda r: r.place == "layer")
        assert learned.signal.kind is SignalKind.EDIT
        assert kept.place == "unused"
        assert kept.reason == reason(ReasonCode.STRONGER_SIGNAL, kind="edit")


def test_edit_outranks_a_preference_and_a_preference_outranks_a_rating() -> None:
    assert [r.place for r in assign([edit(1), prefer(2)], turn)] == ["layer", "unused"]
    assert [r.place for r in assign([prefer(1), rating(2, 1)], turn)] == ["layer", "unused"]


def test_later_of_two_signals_of_one_kind_counts() -> None:
    first, second = assign([edit(1, "Six minutes."), edit(2, "Nine minutes.")], turn)
    assert (first.place, second.place) == ("unused", "layer")
    assert second.lesson is not None
    assert second.lesson.chosen == "Nine minutes."


def test_liked_reply_is_a_lesson_with_less_weight_than_written_text() -> None:
    liked, written = assign([rating(1, 1), edit(2, on="turn_2")], turn)
    assert liked.lesson is not None
    assert written.lesson is not None
    assert (liked.lesson.chosen, liked.lesson.rejected) == ("Boil it.", None)
    assert liked.lesson.weight < written.lesson.weight


def test_single_dislike_and_liked_empty_reply_are_unused_with_a_reason() -> None:
    down, silence = assign([rating(1, -1), rating(2, 1, on="turn_3")], turn)
    assert (down.place, silence.place) == ("unused", "unused")
    assert down.reason.code is ReasonCode.TOO_FEW_THUMBS
    assert silence.reason.code is ReasonCode.EMPTY_REPLY


def test_dislike_after_an_edit_does_not_cancel_the_edit() -> None:
    assert [r.place for r in assign([edit(1), rating(2, -1)], turn)] == ["layer", "unused"]


def test_demonstration_belongs_to_the_style_or_to_its_skill() -> None:
    assert [r.layer for r in assign([demonstration(1), demonstration(2, "email")], turn)] == [
        "style",
        "skill.email",
    ]


def test_comment_is_a_rule_and_fact_belongs_to_memory() -> None:
    signals = [
        signal(1, SignalKind.COMMENT, {"text": "Be brief."}),
        signal(2, SignalKind.FACT, {"text": "My dog is Biscuit."}, None),
    ]
    assert [r.place for r in assign(signals, turn)] == ["rule", "memory"]


def test_app_demonstration_is_unused_and_supersedes_nothing() -> None:
    by_user, theirs = assign(
        [demonstration(1), demonstration(2, answer="Yo Bo", source="judge")], turn
    )
    assert (by_user.place, theirs.place) == ("layer", "unused")
    assert theirs.reason.code is ReasonCode.NOT_USER_ACT
    assert only(assign([demonstration(3, "email", source="judge")], turn)).place == "unused"


def test_app_fact_is_retrieved_and_not_trained() -> None:
    assignment = only(assign([fact(1, "Biscuit", "judge")], turn))
    assert (assignment.place, assignment.layer, assignment.extra_examples) == ("memory", None, ())
    assert only(assign([fact(1, "Biscuit")], turn)).extra_examples


@pytest.mark.parametrize(("source", "learned"), [("person", True), ("judge", False)])
def test_app_fact_is_not_trained_however_often_it_helped(source: str, learned: bool) -> None:
    stated = signal(1, SignalKind.FACT, {"text": "My dog is Biscuit."}, None, source)
    helped = [
        replace(turn("turn_1"), id=f"turn_{n}", reply="It is Biscuit.", used=(stated.id,))
        for n in range(4)
    ]
    assert bool(only(assign([stated], turn, turns=helped)).extra_examples) == learned


@pytest.mark.parametrize("order", [("person", "judge"), ("judge", "person")])
def test_user_fact_outranks_an_app_fact_in_either_order(
    order: tuple[str, str],
) -> None:
    signals = [
        fact(number, "Biscuit" if source == "person" else "Rex", source)
        for number, source in enumerate(order)
    ]
    stated = {assignment.signal.source: assignment for assignment in assign(signals, turn)}
    assert stated["person"].extra_examples
    assert (stated["judge"].place, stated["judge"].superseded_by) == (
        "unused",
        stated["person"].signal.id,
    )
    assert stated["judge"].reason.code is ReasonCode.USER_FACT


def test_later_of_two_app_facts_counts() -> None:
    older, newer = assign([fact(1, "Biscuit", "judge"), fact(2, "Rex", "app")], turn)
    assert (older.place, older.superseded_by, newer.place) == ("unused", newer.signal.id, "memory")


def test_reward_is_a_rating_weighted_by_its_value() -> None:
    thumb, reward_ = (only(assign([each], turn)).lesson for each in (rating(1, 1), reward(1, 0.6)))
    assert thumb is not None
    assert reward_ == replace(thumb, weight=0.6 * thumb.weight)
    assert reward_.kind is SignalKind.RATING


@pytest.mark.parametrize("value", [-0.4, 0.0, 0.4])
def test_small_reward_is_unused(value: float) -> None:
    kept = only(assign([reward(1, value)], turn))
    assert (kept.place, kept.lesson) == ("unused", None)
    assert kept.reason == reason(ReasonCode.UNCLEAR_REWARD, limit=0.5)


def test_negative_reward_needs_as_many_signals_as_a_dislike() -> None:
    alone = only(assign([reward(1, -1.0)], turn))
    assert (alone.place, alone.reason.code) == ("unused", ReasonCode.TOO_FEW_THUMBS)
    thumbs, of_many = _thumbs(MIN_THUMBS, MIN_THUMBS)
    rewards = [replace(thumb, kind=SignalKind.REWARD) for thumb in thumbs]
    assert {r.place for r in assign(rewards, of_many)} == {"layer"}


def test_later_of_rating_and_reward_on_one_reply_counts() -> None:
    assert [r.place for r in assign([rating(1, -1), reward(2, 1.0)], turn)] == ["unused", "layer"]
    assert [r.place for r in assign([rating(1, 1), reward(2, 0.1)], turn)] == ["layer", "unused"]
    assert [r.place for r in assign([edit(1), reward(2, -1.0)], turn)] == ["layer", "unused"]


def test_only_the_users_own_rewards_are_trained() -> None:
    judged = signal(1, SignalKind.REWARD, {"value": 1.0}, source="judge")
    assert only(assign([judged], turn)).place == "unused"


def test_signal_without_its_required_turn_is_unused() -> None:
    assert only(assign([signal(1, SignalKind.EDIT, {"text": "x"}, None)], turn)).place == "unused"


def test_later_of_two_answers_to_one_request_supersedes_the_older() -> None:
    older, other, later = assign(
        [demonstration(1), demonstration(2, "email"), demonstration(3, answer="Hello Bo")], turn
    )
    assert (older.place, older.superseded_by, other.place) == ("unused", "sig_3", "layer")
    assert later.lesson is not None
    assert later.lesson.chosen == "Hello Bo"


def test_repeated_demonstration_keeps_the_older_lesson() -> None:
    first, again = assign([demonstration(1), demonstration(2)], turn)
    assert (first.place, again.place, again.superseded_by) == ("layer", "unused", "sig_1")
    back = assign([demonstration(1), demonstration(2, answer="Hello Bo"), demonstration(3)], turn)
    assert [r.place for r in back] == ["unused", "unused", "layer"]


def test_implicit_feedback_is_a_weak_rating_that_never_outranks_the_user() -> None:
    assert only(assign([rating(1, 1, source="app")], turn)).place == "unused"
    seen = rating(1, 1, source="app", trains=True)
    (weak,) = lessons_for(assign([seen], turn), "style")
    (own,) = lessons_for(assign([rating(1, 1)], turn), "style")
    assert weak.weight < own.weight
    by_user = rating(2, 1)
    for signals in ([seen, by_user], [by_user, rating(3, -1, source="app", trains=True)]):
        used = [r.signal for r in assign(signals, turn) if r.lesson]
        assert used == [by_user]


def _thumbs(up: int, down: int) -> tuple[list[Signal], Any]:
    signals = [rating(n, 1 if n < up else -1, on=f"turn_{n}") for n in range(up + down)]

    def of(turn_id: str) -> Turn:
        asked = (Message("user", f"question of {turn_id}"),)
        return Turn(
            turn_id, "ada", NOON, asked, "Boil it.", Stack("base"), Sampling(), Usage(3, 2), "stop"
        )

    return signals, of


def test_dislikes_are_trained_with_enough_ratings_of_both_kinds() -> None:
    few = assign(*_thumbs(MIN_THUMBS, MIN_THUMBS - 1))
    assert undesirable_lessons_for(few, "style") == ()
    assert few[-1].reason.data["up"] == MIN_THUMBS
    assert few[-1].reason.data["down"] == MIN_THUMBS - 1
    enough = assign(*_thumbs(MIN_THUMBS, MIN_THUMBS))
    assert (
        len(undesirable_lessons_for(enough, "style"))
        == len(lessons_for(enough, "style"))
        == MIN_THUMBS
    )
    assert {
        (lesson.chosen, lesson.rejected) for lesson in undesirable_lessons_for(enough, "style")
    } == {("", "Boil it.")}


def test_dislike_of_an_edited_reply_is_not_counted() -> None:
    signals, of = _thumbs(MIN_THUMBS, MIN_THUMBS)
    explained = assign([*signals, edit(99, on=signals[-1].turn or "")], of)
    assert undesirable_lessons_for(explained, "style") == ()


def test_ledger_page_documents_the_policy_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs/explanation/ledger.md").read_text("utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    table = {row[1].strip(): (row[3].strip(), row[4].strip()) for row in rows if len(row) == 6}
    many, of_many = _thumbs(MIN_THUMBS, MIN_THUMBS)
    cases = {
        "edit": only(assign([edit(1)], turn)),
        "preference": only(
            assign([signal(2, SignalKind.PREFERENCE, {"text": "Seven."}, "turn_2")], turn)
        ),
        "thumb up": only(assign([rating(3, 1)], turn)),
        "thumb down": only(assign([rating(4, -1)], turn)),
        "reward between": only(assign([reward(5, 0.4)], turn)),
        "demonstration": only(assign([demonstration(6)], turn)),
        "comment": only(assign([signal(7, SignalKind.COMMENT, {"text": "Be brief."})], turn)),
        "fact": only(assign([signal(8, SignalKind.FACT, {"text": "A dog."}, None)], turn)),
        "implicit feedback": only(assign([rating(9, 1, source="app")], turn)),
    }
    places = {"rule": "the prompt", "memory": "memory", "unused": "unused"}
    for name, assignment in cases.items():
        place, weight = table[name]
        assert place.startswith(places.get(assignment.place, "`style`")), name
        if assignment.lesson is not None:
            assert float(weight) == assignment.lesson.weight, name
    assert assign(many, of_many)[-1].layer == "style"
    assert f"{MIN_THUMBS} thumbs up and {MIN_THUMBS} down" in table["thumb down"][0]


def answers_to_one_request(*signals: Signal) -> list[str | None]:
    """Return each signal's wanted answer, where turns 1 and 2 have the same request and reply."""
    one = turn("turn_1")
    return [
        r.lesson.chosen if r.lesson else None
        for r in assign(signals, lambda name: replace(one, id=name))
    ]


def test_later_of_rating_and_text_counts_between_two_turns_of_one_request() -> None:
    signals = REPLIES["turn_1"]
    assert answers_to_one_request(rating(1, 1), edit(2, on="turn_2")) == [None, "Eight minutes."]
    assert answers_to_one_request(edit(1), rating(2, 1, on="turn_2")) == [None, signals]
    assert answers_to_one_request(
        edit(1), edit(2, signals, on="turn_2"), rating(3, -1, on="turn_3")
    ) == [
        None,
        None,
        None,
    ]
    # Signals about different answers do not conflict, and an app's signal never outranks the
    # user's.
    assert answers_to_one_request(edit(1), rating(2, -1, on="turn_2")) == ["Eight minutes.", None]
    assert answers_to_one_request(edit(1), rating(2, 1, "turn_2", "app", **{TRAINS: True})) == [
        "Eight minutes.",
        None,
    ]


def test_requests_that_offer_other_tools_are_other_requests() -> None:
    one = turn("turn_1")
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    with_tool = replace(one, messages=(replace(one.messages[0], tools=(tool,)),))
    turns = {"turn_1": with_tool, "turn_2": replace(one, id="turn_2")}
    assert {each.layer for each in assign([edit(1), edit(2, "No.", "turn_2")], turns.get)} == {
        "style"
    }


def test_like_of_a_reply_with_a_fact_that_changed_is_no_lesson() -> None:
    old, new = fact(1, "Biscuit"), fact(2, "Rex")
    shown = replace(turn("turn_1"), used=(old.id,), reply="It is Biscuit.")
    other = replace(shown, reply="Boil it.")
    *_, liked = assign([new, rating(3, 1)], lambda name: other, former=[old, new])
    assert liked.layer == "style"
    for current in ([old], [new], [old, new]):
        *_, liked = assign([*current, rating(3, 1)], lambda name: shown, former=[old, new])
        assert (liked.layer == "style") is (current == [old])
        assert (liked.reason.code is ReasonCode.FACT_OUTDATED) is (current != [old])
