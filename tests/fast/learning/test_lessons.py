"""The write policy: each signal goes to one place, the strongest and latest word on a turn is the lesson."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from personalpeft.learning.lessons import Routing, lessons_for, route
from personalpeft.types import Message, Sampling, Signal, SignalKind, Stack, Turn, Usage

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
REPLIES = {"turn_1": "Boil it.", "turn_2": "No idea.", "turn_3": ""}


def turn(turn_id: str) -> Turn:
    asked = (Message("user", f"question of {turn_id}"),)
    reply = REPLIES[turn_id]
    return Turn(turn_id, "ada", NOON, asked, reply, Stack("base"), Sampling(), Usage(3, 2), "stop")


def signal(number: int, kind: SignalKind, payload: dict[str, Any], on: str | None = "turn_1") -> Signal:
    return Signal(f"sig_{number}", "ada", kind, NOON + timedelta(seconds=number), payload, on)


def edit(number: int, text: str = "Eight minutes.", on: str = "turn_1") -> Signal:
    return signal(number, SignalKind.EDIT, {"text": text}, on)


def rating(number: int, value: int, on: str = "turn_1") -> Signal:
    return signal(number, SignalKind.RATING, {"value": value}, on)


def prefer(number: int, text: str = "Seven minutes.") -> Signal:
    return signal(number, SignalKind.PREFERENCE, {"text": text})


def demonstration(number: int, skill: str | None = None) -> Signal:
    payload = {"prompt": "Write to Bo.", "answer": "Dear Bo", "skill": skill}
    return signal(number, SignalKind.DEMONSTRATION, payload, None)


TURNS = st.sampled_from(sorted(REPLIES))
PAYLOADS: dict[SignalKind, st.SearchStrategy[tuple[dict[str, Any], str | None]]] = {
    SignalKind.RATING: st.tuples(st.fixed_dictionaries({"value": st.sampled_from([-1, 1])}), TURNS),
    SignalKind.EDIT: st.tuples(st.fixed_dictionaries({"text": st.text(min_size=1)}), TURNS),
    SignalKind.PREFERENCE: st.tuples(st.fixed_dictionaries({"text": st.text(min_size=1)}), TURNS),
    SignalKind.COMMENT: st.tuples(st.fixed_dictionaries({"text": st.text(min_size=1)}), TURNS),
    SignalKind.REWARD: st.tuples(st.fixed_dictionaries({"value": st.floats(-1, 1)}), TURNS),
    SignalKind.DEMONSTRATION: st.tuples(
        st.fixed_dictionaries(
            {"prompt": st.text(min_size=1), "answer": st.text(min_size=1), "skill": st.sampled_from([None, "email"])}
        ),
        st.none(),
    ),
    SignalKind.FACT: st.tuples(st.fixed_dictionaries({"text": st.text(min_size=1)}), st.none()),
}


@st.composite
def ledgers(draw: st.DrawFn) -> list[Signal]:
    kinds = draw(st.lists(st.sampled_from(sorted(SignalKind)), max_size=12))
    said = [(kind, *draw(PAYLOADS[kind])) for kind in kinds]
    return [signal(number, *each) for number, each in enumerate(said)]


def only(routings: tuple[Routing, ...]) -> Routing:
    (routing,) = routings
    return routing


@given(said=ledgers())
def test_each_signal_has_one_routing_with_a_reason_and_its_place_decides_what_it_holds(said: list[Signal]) -> None:
    routings = route(said, turn)
    assert [routing.signal for routing in routings] == said
    for routing in routings:
        assert len(routing.why) > 10
        assert (routing.place == "layer") == (routing.layer is not None) == (routing.lesson is not None)


@given(said=ledgers())
def test_a_turn_teaches_at_most_once_and_by_its_strongest_and_latest_word(said: list[Signal]) -> None:
    strength = {SignalKind.RATING: 1, SignalKind.PREFERENCE: 2, SignalKind.EDIT: 3}
    taught = {r.signal.turn: r.signal for r in route(said, turn) if r.lesson and r.signal.turn}
    assert len(taught) == sum(bool(r.lesson and r.signal.turn) for r in route(said, turn))
    for about, by in taught.items():
        rivals = [s for s in said if s.turn == about and s.kind in strength]
        assert by == max(rivals, key=lambda s: (strength[s.kind], s.at))


@given(said=ledgers())
def test_a_lesson_is_found_in_its_layer_alone_and_in_the_order_of_the_ledger(said: list[Signal]) -> None:
    routings = route(said, turn)
    found = [lesson.signal for layer in ("style", "skill.email", "memory") for lesson in lessons_for(routings, layer)]
    assert sorted(found) == sorted(r.signal.id for r in routings if r.lesson)
    style = [lesson.signal for lesson in lessons_for(routings, "style")]
    assert style == [s.id for s in said if s.id in set(style)]


def test_an_edit_teaches_its_text_against_the_reply_it_corrects() -> None:
    lesson = only(route([edit(1)], turn)).lesson
    assert lesson is not None
    assert (lesson.wanted, lesson.rejected) == ("Eight minutes.", "Boil it.")
    assert lesson.messages == turn("turn_1").messages


def test_an_edit_of_an_empty_reply_has_nothing_to_be_better_than() -> None:
    lesson = only(route([edit(1, on="turn_3")], turn)).lesson
    assert lesson is not None
    assert lesson.rejected is None


def test_an_edit_says_more_than_a_rating_whichever_came_later() -> None:
    for said in ([edit(1), rating(2, 1)], [rating(1, 1), edit(2)]):
        kept, learned = sorted(route(said, turn), key=lambda r: r.place == "layer")
        assert learned.signal.kind is SignalKind.EDIT
        assert (kept.place, kept.why) == ("kept", "the edit of the same turn says more")


def test_an_edit_says_more_than_a_preferred_text_and_that_more_than_a_rating() -> None:
    assert [r.place for r in route([edit(1), prefer(2)], turn)] == ["layer", "kept"]
    assert [r.place for r in route([prefer(1), rating(2, 1)], turn)] == ["layer", "kept"]


def test_of_two_of_a_kind_the_later_counts() -> None:
    first, second = route([edit(1, "Six minutes."), edit(2, "Nine minutes.")], turn)
    assert (first.place, second.place) == ("kept", "layer")
    assert second.lesson is not None
    assert second.lesson.wanted == "Nine minutes."


def test_a_liked_reply_is_given_again_but_weighs_less_than_what_was_written() -> None:
    liked, written = route([rating(1, 1), edit(2, on="turn_2")], turn)
    assert liked.lesson is not None
    assert written.lesson is not None
    assert (liked.lesson.wanted, liked.lesson.rejected) == ("Boil it.", None)
    assert liked.lesson.weight < written.lesson.weight


def test_a_thumb_down_alone_and_a_liked_silence_teach_nothing_and_say_why() -> None:
    down, silence = route([rating(1, -1), rating(2, 1, on="turn_3")], turn)
    assert (down.place, silence.place) == ("kept", "kept")
    assert "an edit would" in down.why
    assert "empty" in silence.why


def test_a_thumb_down_after_an_edit_does_not_unteach_it() -> None:
    assert [r.place for r in route([edit(1), rating(2, -1)], turn)] == ["layer", "kept"]


def test_a_demonstration_goes_to_the_style_or_to_its_own_skill() -> None:
    assert [r.layer for r in route([demonstration(1), demonstration(2, "email")], turn)] == ["style", "skill.email"]


def test_comments_and_facts_act_at_once_and_rewards_wait() -> None:
    said = [
        signal(1, SignalKind.COMMENT, {"text": "Be brief."}),
        signal(2, SignalKind.FACT, {"text": "My dog is Biscuit."}, None),
        signal(3, SignalKind.REWARD, {"value": 0.5}),
    ]
    assert [r.place for r in route(said, turn)] == ["profile", "memory", "kept"]


def test_a_signal_about_no_turn_that_needs_one_is_only_kept() -> None:
    assert only(route([signal(1, SignalKind.EDIT, {"text": "x"}, None)], turn)).place == "kept"
