"""The write policy: each signal goes to one place, the strongest and latest word on a turn is the lesson."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.learning.data.assignment import (
    MIN_THUMBS,
    TRAINABLE_KEY,
    Assignment,
    assign,
    lessons_for,
    undesirable_lessons_for,
)
from personalpeft.learning.outcomes import ReasonCode, reason
from personalpeft.types import Message, Sampling, Signal, SignalKind, Stack, Turn, Usage

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
            {"value": st.sampled_from([-1, 1])}, optional={TRAINABLE_KEY: st.booleans()}
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
    said = [
        (kind, *draw(PAYLOADS[kind]), draw(st.sampled_from(["person", "app"]))) for kind in kinds
    ]
    return [signal(number, *each) for number, each in enumerate(said)]


def only(routings: tuple[Assignment, ...]) -> Assignment:
    (routing,) = routings
    return routing


@given(said=ledgers())
def test_each_signal_has_one_routing_with_a_reason_and_its_place_decides_what_it_holds(
    said: list[Signal],
) -> None:
    routings = assign(said, turn)
    assert [routing.signal for routing in routings] == said
    for routing in routings:
        assert len(routing.why) > 10
        assert (routing.place == "layer") == (routing.lesson is not None)
        assert (routing.layer is not None) == (
            routing.lesson is not None or bool(routing.extra_examples)
        )
        assert routing.place == "memory" or not routing.extra_examples
        assert routing.superseded_by is None or routing.place == "kept"


@given(said=ledgers())
def test_only_a_persons_own_acts_are_lessons_and_what_an_app_saw_where_that_was_switched_on(
    said: list[Signal],
) -> None:
    routings = assign(said, turn)
    for routing in routings:
        if routing.lesson is not None and routing.signal.source != "person":
            assert routing.signal.payload[TRAINABLE_KEY]
            assert routing.signal.kind is SignalKind.RATING
        assert not routing.extra_examples or routing.signal.source == "person"
    hers = [each for each in said if each.source == "person"]
    assert [r for r in routings if r.signal in hers and (r.lesson or r.extra_examples)] == [
        r for r in assign(hers, turn) if r.lesson or r.extra_examples
    ]


@given(said=ledgers())
def test_a_request_has_one_wanted_answer_in_a_layer_and_it_is_the_latest(
    said: list[Signal],
) -> None:
    routings = assign(said, turn)
    written = [r for r in routings if r.lesson and r.lesson.kind is not SignalKind.RATING]
    assert len({(r.layer, r.lesson.messages) for r in written if r.lesson}) == len(written)
    followed = {r.signal.id: r.superseded_by for r in routings}
    for routing in routings:
        # Whoever is not the lesson leads to the one that is, in however many steps.
        at, steps = routing.signal.id, 0
        while (after := followed[at]) is not None:
            at, steps = after, steps + 1
            assert steps <= len(said)


@given(said=ledgers())
def test_a_turn_teaches_at_most_once_and_by_its_strongest_and_latest_word(
    said: list[Signal],
) -> None:
    strength = {
        SignalKind.RATING: 1,
        SignalKind.REWARD: 1,
        SignalKind.PREFERENCE: 2,
        SignalKind.EDIT: 3,
    }
    taught = {r.signal.turn: r.signal for r in assign(said, turn) if r.lesson and r.signal.turn}
    assert len(taught) == sum(bool(r.lesson and r.signal.turn) for r in assign(said, turn))
    for about, by in taught.items():
        on_it = [s for s in said if s.turn == about and s.kind in strength]
        # Where a person said nothing, what an app saw counts.
        rivals = [s for s in on_it if s.source == "person"] or [
            s for s in on_it if s.payload.get(TRAINABLE_KEY)
        ]
        clear = [
            s for s in rivals if s.kind is not SignalKind.REWARD or abs(s.payload["value"]) >= 0.5
        ]
        assert by == max(clear, key=lambda s: (strength[s.kind], s.at))


@given(said=ledgers())
def test_a_lesson_is_found_in_its_layer_alone_and_in_the_order_of_the_ledger(
    said: list[Signal],
) -> None:
    routings = assign(said, turn)
    found = [
        lesson.signal
        for layer in ("style", "skill.email", "memory")
        for lesson in lessons_for(routings, layer)
    ]
    assert sorted(found) == sorted(
        lesson.signal
        for r in routings
        for lesson in (r.lesson, *r.extra_examples)
        if lesson is not None
    )
    style = [lesson.signal for lesson in lessons_for(routings, "style")]
    assert style == [s.id for s in said if s.id in set(style)]


def test_an_edit_teaches_its_text_against_the_reply_it_corrects() -> None:
    lesson = only(assign([edit(1)], turn)).lesson
    assert lesson is not None
    assert (lesson.chosen, lesson.rejected) == ("Eight minutes.", "Boil it.")
    assert lesson.messages == turn("turn_1").messages


def test_an_edit_of_an_empty_reply_has_nothing_to_be_better_than() -> None:
    lesson = only(assign([edit(1, on="turn_3")], turn)).lesson
    assert lesson is not None
    assert lesson.rejected is None


def test_an_edit_says_more_than_a_rating_whichever_came_later() -> None:
    for said in ([edit(1), rating(2, 1)], [rating(1, 1), edit(2)]):
        kept, learned = sorted(assign(said, turn), key=lambda r: r.place == "layer")
        assert learned.signal.kind is SignalKind.EDIT
        assert (kept.place, kept.why) == ("kept", "the edit of the same turn says more")


def test_an_edit_says_more_than_a_preferred_text_and_that_more_than_a_rating() -> None:
    assert [r.place for r in assign([edit(1), prefer(2)], turn)] == ["layer", "kept"]
    assert [r.place for r in assign([prefer(1), rating(2, 1)], turn)] == ["layer", "kept"]


def test_of_two_of_a_kind_the_later_counts() -> None:
    first, second = assign([edit(1, "Six minutes."), edit(2, "Nine minutes.")], turn)
    assert (first.place, second.place) == ("kept", "layer")
    assert second.lesson is not None
    assert second.lesson.chosen == "Nine minutes."


def test_a_liked_reply_is_given_again_but_weighs_less_than_what_was_written() -> None:
    liked, written = assign([rating(1, 1), edit(2, on="turn_2")], turn)
    assert liked.lesson is not None
    assert written.lesson is not None
    assert (liked.lesson.chosen, liked.lesson.rejected) == ("Boil it.", None)
    assert liked.lesson.weight < written.lesson.weight


def test_a_thumb_down_alone_and_a_liked_silence_teach_nothing_and_say_why() -> None:
    down, silence = assign([rating(1, -1), rating(2, 1, on="turn_3")], turn)
    assert (down.place, silence.place) == ("kept", "kept")
    assert down.reason.code is ReasonCode.TOO_FEW_THUMBS
    assert silence.reason.code is ReasonCode.EMPTY_REPLY


def test_a_thumb_down_after_an_edit_does_not_unteach_it() -> None:
    assert [r.place for r in assign([edit(1), rating(2, -1)], turn)] == ["layer", "kept"]


def test_a_demonstration_goes_to_the_style_or_to_its_own_skill() -> None:
    assert [r.layer for r in assign([demonstration(1), demonstration(2, "email")], turn)] == [
        "style",
        "skill.email",
    ]


def test_comments_and_facts_act_at_once() -> None:
    said = [
        signal(1, SignalKind.COMMENT, {"text": "Be brief."}),
        signal(2, SignalKind.FACT, {"text": "My dog is Biscuit."}, None),
    ]
    assert [r.place for r in assign(said, turn)] == ["profile", "memory"]


def test_what_an_app_demonstrates_is_kept_and_stands_in_nobodys_way() -> None:
    hers, theirs = assign(
        [demonstration(1), demonstration(2, answer="Yo Bo", source="judge")], turn
    )
    assert (hers.place, theirs.place, theirs.why) == (
        "layer",
        "kept",
        "only a person's own acts are trained on",
    )
    assert only(assign([demonstration(3, "email", source="judge")], turn)).place == "kept"


def test_a_fact_of_an_app_is_looked_up_and_not_learned() -> None:
    routing = only(assign([fact(1, "Biscuit", "judge")], turn))
    assert (routing.place, routing.layer, routing.extra_examples) == ("memory", None, ())
    assert only(assign([fact(1, "Biscuit")], turn)).extra_examples


@pytest.mark.parametrize(("source", "learned"), [("person", True), ("judge", False)])
def test_a_fact_of_an_app_is_not_learned_however_often_it_helped(
    source: str, learned: bool
) -> None:
    told = signal(1, SignalKind.FACT, {"text": "My dog is Biscuit."}, None, source)
    helped = [
        replace(turn("turn_1"), id=f"turn_{n}", reply="It is Biscuit.", used=(told.id,))
        for n in range(4)
    ]
    assert bool(only(assign([told], turn, turns=helped)).extra_examples) == learned


@pytest.mark.parametrize("order", [("person", "judge"), ("judge", "person")])
def test_what_a_person_told_stands_whatever_an_app_says_of_it_before_or_later(
    order: tuple[str, str],
) -> None:
    said = [
        fact(number, "Biscuit" if source == "person" else "Rex", source)
        for number, source in enumerate(order)
    ]
    told = {routing.signal.source: routing for routing in assign(said, turn)}
    assert told["person"].extra_examples
    assert (told["judge"].place, told["judge"].superseded_by) == ("kept", told["person"].signal.id)
    assert told["judge"].reason.code is ReasonCode.USER_FACT


def test_of_two_facts_of_apps_the_later_counts() -> None:
    older, newer = assign([fact(1, "Biscuit", "judge"), fact(2, "Rex", "app")], turn)
    assert (older.place, older.superseded_by, newer.place) == ("kept", newer.signal.id, "memory")


def test_a_reward_is_a_thumb_of_its_size() -> None:
    thumb, reward_ = (only(assign([each], turn)).lesson for each in (rating(1, 1), reward(1, 0.6)))
    assert thumb is not None
    assert reward_ == replace(thumb, weight=0.6 * thumb.weight)
    assert reward_.kind is SignalKind.RATING


@pytest.mark.parametrize("value", [-0.4, 0.0, 0.4])
def test_a_reward_that_says_little_is_kept(value: float) -> None:
    kept = only(assign([reward(1, value)], turn))
    assert (kept.place, kept.lesson) == ("kept", None)
    assert kept.reason == reason(ReasonCode.UNCLEAR_REWARD, limit=0.5)


def test_a_reward_below_0_waits_for_as_many_as_a_thumb_down_does() -> None:
    alone = only(assign([reward(1, -1.0)], turn))
    assert (alone.place, alone.why.partition(" says")[0]) == ("kept", "a reward below 0")
    thumbs, of_many = _thumbs(MIN_THUMBS, MIN_THUMBS)
    rewards = [replace(thumb, kind=SignalKind.REWARD) for thumb in thumbs]
    assert {r.place for r in assign(rewards, of_many)} == {"layer"}


def test_of_a_thumb_and_a_reward_on_one_reply_the_later_counts() -> None:
    assert [r.place for r in assign([rating(1, -1), reward(2, 1.0)], turn)] == ["kept", "layer"]
    assert [r.place for r in assign([rating(1, 1), reward(2, 0.1)], turn)] == ["layer", "kept"]
    assert [r.place for r in assign([edit(1), reward(2, -1.0)], turn)] == ["layer", "kept"]


def test_only_a_persons_own_rewards_train() -> None:
    judged = signal(1, SignalKind.REWARD, {"value": 1.0}, source="judge")
    assert only(assign([judged], turn)).place == "kept"


def test_a_signal_about_no_turn_that_needs_one_is_only_kept() -> None:
    assert only(assign([signal(1, SignalKind.EDIT, {"text": "x"}, None)], turn)).place == "kept"


def test_of_two_answers_to_one_request_the_later_counts_and_the_older_says_what_came_in_its_place() -> (
    None
):
    older, other, later = assign(
        [demonstration(1), demonstration(2, "email"), demonstration(3, answer="Hello Bo")], turn
    )
    assert (older.place, older.superseded_by, other.place) == ("kept", "sig_3", "layer")
    assert later.lesson is not None
    assert later.lesson.chosen == "Hello Bo"


def test_saying_the_same_again_leaves_the_older_lesson_in_place() -> None:
    first, again = assign([demonstration(1), demonstration(2)], turn)
    assert (first.place, again.place, again.superseded_by) == ("layer", "kept", "sig_1")
    back = assign([demonstration(1), demonstration(2, answer="Hello Bo"), demonstration(3)], turn)
    assert [r.place for r in back] == ["kept", "kept", "layer"]


def test_what_an_app_saw_is_a_weak_rating_and_no_word_against_a_persons() -> None:
    assert only(assign([rating(1, 1, source="app")], turn)).place == "kept"
    seen = rating(1, 1, source="app", trains=True)
    (weak,) = lessons_for(assign([seen], turn), "style")
    (own,) = lessons_for(assign([rating(1, 1)], turn), "style")
    assert weak.weight < own.weight
    hers = rating(2, 1)
    for said in ([seen, hers], [hers, rating(3, -1, source="app", trains=True)]):
        taken = [r.signal for r in assign(said, turn) if r.lesson]
        assert taken == [hers]


def _thumbs(up: int, down: int) -> tuple[list[Signal], Any]:
    said = [rating(n, 1 if n < up else -1, on=f"turn_{n}") for n in range(up + down)]

    def of(turn_id: str) -> Turn:
        asked = (Message("user", f"question of {turn_id}"),)
        return Turn(
            turn_id, "ada", NOON, asked, "Boil it.", Stack("base"), Sampling(), Usage(3, 2), "stop"
        )

    return said, of


def test_thumbs_down_are_learned_from_where_there_are_enough_of_both_kinds() -> None:
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


def test_a_thumb_that_an_edit_explains_is_not_counted_among_the_thumbs() -> None:
    said, of = _thumbs(MIN_THUMBS, MIN_THUMBS)
    explained = assign([*said, edit(99, on=said[-1].turn or "")], of)
    assert undesirable_lessons_for(explained, "style") == ()


def test_the_page_on_the_ledger_has_the_policy_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs/explanation/ledger.md").read_text("utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    table = {row[4].strip(): row[3].strip() for row in rows if len(row) == 6}
    few, of_few = _thumbs(1, 1)
    many, of_many = _thumbs(MIN_THUMBS, MIN_THUMBS)
    said = [
        edit(1),
        signal(2, SignalKind.PREFERENCE, {"text": "Seven."}, "turn_2"),
        demonstration(3),
        demonstration(4, "email"),
        signal(5, SignalKind.COMMENT, {"text": "Be brief."}),
        signal(6, SignalKind.FACT, {"text": "My dog is Biscuit."}, None),
        rating(8, 1, on="turn_2", source="app"),
        replace(demonstration(10), source="app"),
        replace(fact(11, "Biscuit"), source="app"),
        fact(12, "Rex"),
    ]
    rewards = [only(assign([reward(7, value)], turn)) for value in (1.0, 0.4, -1.0)]
    seen = assign([rating(9, 1, source="app", trains=True)], turn)
    places = {"profile": "the profile", "memory": "memory", "kept": "kept"}
    for routing in (
        *assign(said, turn),
        *assign(few, of_few),
        *assign(many, of_many),
        *rewards,
        *seen,
    ):
        why = routing.why.partition(" (learned from")[0]
        assert table[why].startswith(places.get(routing.place, "`style`")), why
        assert routing.layer is None or routing.layer in table[why].replace("<name>", "email")
    assert f"from {MIN_THUMBS} up and {MIN_THUMBS} down" in page


def on_one_request(*said: Signal) -> list[str | None]:
    """Of each signal the answer that is wanted of it, where turns 1 and 2 asked the same and were answered so."""
    one = turn("turn_1")
    return [
        r.lesson.chosen if r.lesson else None
        for r in assign(said, lambda name: replace(one, id=name))
    ]


def test_the_later_word_wins_between_a_thumb_and_a_text_on_two_turns_of_one_request() -> None:
    said = REPLIES["turn_1"]
    assert on_one_request(rating(1, 1), edit(2, on="turn_2")) == [None, "Eight minutes."]
    assert on_one_request(edit(1), rating(2, 1, on="turn_2")) == [None, said]
    assert on_one_request(edit(1), edit(2, said, on="turn_2"), rating(3, -1, on="turn_3")) == [
        None,
        None,
        None,
    ]
    # What does not meet stands beside it, and an app's word is none against a person's.
    assert on_one_request(edit(1), rating(2, -1, on="turn_2")) == ["Eight minutes.", None]
    assert on_one_request(edit(1), rating(2, 1, "turn_2", "app", **{TRAINABLE_KEY: True})) == [
        "Eight minutes.",
        None,
    ]
