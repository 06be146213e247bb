"""The ledger keeps turns and signals exactly as recorded."""

from __future__ import annotations

from datetime import UTC
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from store_makers import add_fact, add_turn, opened

from personalpeft.errors import HomeError, InvalidId, InvalidInput, NotFound
from personalpeft.store.integrity import verify
from personalpeft.store.store import Store
from personalpeft.types import Message, Sampling, SignalKind, Stack, StackEntry, Usage

_NUMBERS = count()


def test_turn_is_returned_as_recorded(store: Store) -> None:
    stack = Stack("base", (StackEntry("style", "style@0123456789ab", "0" * 64, 0.5),))
    turn = store.ledger.add_turn(
        "ada",
        messages=[Message("user", 'naïve \x00 \U0001f95a "quotes"')],
        reply="",
        stack=stack,
        sampling=Sampling(0.7, 0.9, 17, 3, ("a", "b")),
        usage=Usage(5, 0),
        finish_reason="cancelled",
        used=["s_1", "s_2"],
    )
    assert store.ledger.turn("ada", turn.id) == turn
    assert turn.stack == stack
    assert turn.stack.digest == stack.digest
    assert turn.messages[0].content == 'naïve \x00 \U0001f95a "quotes"'
    assert turn.sampling == Sampling(0.7, 0.9, 17, 3, ("a", "b"))
    assert turn.used == ("s_1", "s_2")
    assert turn.at.utcoffset() == UTC.utcoffset(None)


def test_ledger_persists_when_the_home_is_opened_again(home: Path) -> None:
    with opened(home) as store:
        turn = add_turn(store)
        signal = store.ledger.add_signal(
            "ada", SignalKind.EDIT, {"text": "Simmer it."}, turn=turn.id, source="import"
        )
    with opened(home) as store:
        assert store.ledger.turns("ada") == (turn,)
        assert store.ledger.signals("ada") == (signal,)
        assert signal.source == "import"


def test_turns_are_listed_newest_first_up_to_the_limit(store: Store) -> None:
    turns = [add_turn(store, reply=str(number)) for number in range(4)]
    assert [turn.reply for turn in store.ledger.turns("ada")] == ["3", "2", "1", "0"]
    assert store.ledger.turns("ada", limit=2) == (turns[3], turns[2])
    assert store.ledger.turns("ada", limit=0) == ()
    with pytest.raises(InvalidInput):
        store.ledger.turns("ada", limit=-1)


@examples(10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    used=st.lists(st.lists(st.sampled_from("abc"), max_size=3), max_size=8),
    asked=st.sets(st.sampled_from("abcd")),
    limit=st.none() | st.integers(0, 4),
)
def test_turns_are_found_by_the_items_they_used(
    store: Store, used: list[list[str]], asked: set[str], limit: int | None
) -> None:
    user = f"user-{next(_NUMBERS)}"
    store.catalog.ensure_user(user)
    turns = [add_turn(store, user, used=each) for each in used]
    wanted = [turn for turn in reversed(turns) if asked & set(turn.used)]
    assert store.ledger.turns(user, using=asked, limit=limit) == tuple(wanted[:limit])


def test_users_see_only_their_own_data(store: Store) -> None:
    by_user, his = add_turn(store, "ada"), add_turn(store, "bob")
    assert store.ledger.turns("ada") == (by_user,)
    with pytest.raises(NotFound):
        store.ledger.turn("ada", his.id)
    with pytest.raises(NotFound):
        store.ledger.add_signal("ada", SignalKind.RATING, {"value": 1}, turn=his.id)
    assert store.ledger.signals("ada") == ()


def test_unknown_user_suggests_the_nearest(store: Store) -> None:
    store.catalog.ensure_user("ada")
    store.catalog.ensure_user("grace")
    for look_up in (
        store.ledger.turns,
        store.ledger.signals,
        store.catalog.user,
        store.catalog.layers,
    ):
        with pytest.raises(NotFound) as error:
            look_up("adda")
        assert "'ada'" in error.value.hint
    for hostile in ("", "\ud800", "a" * 10_000, "../../etc"):
        with pytest.raises(NotFound):
            store.catalog.user(hostile)


def test_unknown_id_suggests_the_nearest(store: Store) -> None:
    turn, signal = add_turn(store), add_fact(store)
    with pytest.raises(NotFound) as error:
        store.ledger.turn("ada", turn.id[:-1] + "?")
    assert turn.id in error.value.hint
    with pytest.raises(NotFound) as error:
        store.ledger.signal("ada", signal.id + "0")
    assert signal.id in error.value.hint


def test_unique_id_prefix_is_enough(store: Store) -> None:
    first = add_fact(store)
    assert store.ledger.signal("ada", first.id[:10]) == first
    second = add_fact(store)
    common = next(
        length for length in range(len(first.id)) if first.id[length] != second.id[length]
    )
    with pytest.raises(InvalidInput) as error:
        store.ledger.signal("ada", first.id[:common])
    assert first.id in error.value.message
    assert second.id in error.value.message
    assert store.ledger.signal("ada", second.id[: common + 1]) == second
    for nothing in ("", "zzz", "é", "\ud800", "%", "s_%", "%%%%", "____"):
        with pytest.raises(NotFound):
            store.ledger.signal("ada", nothing)


def test_unique_ending_of_an_id_is_enough_for_its_user(store: Store) -> None:
    turn, first, second = add_turn(store), add_fact(store), add_fact(store)
    bo = add_fact(store, "bo")
    assert store.ledger.turn("ada", turn.id[-6:]) == turn
    assert store.ledger.signal("ada", first.id[-6:]) == first
    assert store.ledger.signal("ada", second.id[-8:]) == second
    for other in (bo.id[-6:], first.id[-3:], turn.id[-6:]):
        with pytest.raises(NotFound):
            store.ledger.signal("ada", other)


@pytest.mark.parametrize("user", ["", "Ada", "a/b", "..", "a..b", "-a", "a" * 65, "ａda", "a\n"])
def test_user_with_an_invalid_id_is_not_created(store: Store, user: str) -> None:
    with pytest.raises(InvalidId):
        add_turn(store, user)
    assert store.catalog.users() == ()


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "payload",
    [
        {"value": float("nan")},
        {"text": "\ud800"},
        {"text": b"x"},
        {1: 1, "a": 2},
        {"text": _nested(100_000)},
    ],
    ids=["nan", "surrogate", "bytes", "mixed keys", "nesting"],
)
def test_payload_that_json_cannot_represent_changes_nothing(
    store: Store, payload: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInput):
        store.ledger.add_signal("ada", SignalKind.FACT, payload)
    assert store.catalog.users() == ()
    assert verify(store) == ()


def test_reply_with_a_lone_surrogate_changes_nothing(store: Store) -> None:
    with pytest.raises(InvalidInput):
        add_turn(store, reply="\udcff")
    assert store.catalog.users() == ()


def test_second_signal_of_a_kind_on_a_turn_supersedes_the_first(store: Store) -> None:
    turn, other = add_turn(store), add_turn(store)
    first = store.ledger.add_signal("ada", SignalKind.RATING, {"value": 1}, turn=turn.id)
    elsewhere = store.ledger.add_signal("ada", SignalKind.RATING, {"value": 1}, turn=other.id)
    comment = store.ledger.add_signal("ada", SignalKind.COMMENT, {"text": "Shorter."}, turn=turn.id)
    second = store.ledger.add_signal("ada", SignalKind.RATING, {"value": -1}, turn=turn.id)
    assert second.supersedes == first.id
    assert store.ledger.signals("ada") == (elsewhere, comment, second)
    assert store.ledger.signals("ada", current=False) == (first, elsewhere, comment, second)
    assert store.ledger.signals("ada", kinds=[SignalKind.COMMENT]) == (comment,)
    assert store.ledger.signals("ada", kinds=[]) == ()


def test_comments_on_one_turn_coexist_unless_superseded_by_id(
    store: Store,
) -> None:
    turn = add_turn(store)
    brief = store.ledger.add_signal("ada", SignalKind.COMMENT, {"text": "Be brief."}, turn=turn.id)
    metric = store.ledger.add_signal(
        "ada", SignalKind.COMMENT, {"text": "Use metric units."}, turn=turn.id
    )
    assert store.ledger.signals("ada") == (brief, metric)
    anew = store.ledger.add_signal(
        "ada", SignalKind.COMMENT, {"text": "One word."}, turn=turn.id, supersedes=brief.id
    )
    assert store.ledger.signals("ada") == (metric, anew)


def test_app_signal_never_supersedes_a_user_signal(store: Store) -> None:
    turn = add_turn(store)
    by_user = store.ledger.add_signal("ada", SignalKind.RATING, {"value": 1}, turn=turn.id)
    seen = store.ledger.add_signal(
        "ada", SignalKind.RATING, {"value": -1}, turn=turn.id, source="app"
    )
    again = store.ledger.add_signal(
        "ada", SignalKind.RATING, {"value": 1}, turn=turn.id, source="app"
    )
    assert again.supersedes == seen.id
    assert store.ledger.signals("ada") == (by_user, again)
    assert (
        store.ledger.add_signal("ada", SignalKind.RATING, {"value": -1}, turn=turn.id).supersedes
        == by_user.id
    )


def test_home_with_a_cross_source_supersession_accepts_further_signals(store: Store) -> None:
    turn = add_turn(store)
    by_user = store.ledger.add_signal("ada", SignalKind.RATING, {"value": 1}, turn=turn.id)
    app = store.ledger.add_signal(
        "ada", SignalKind.RATING, {"value": -1}, turn=turn.id, source="app", supersedes=by_user.id
    )
    new = store.ledger.add_signal("ada", SignalKind.RATING, {"value": 1}, turn=turn.id)
    assert (new.supersedes, store.ledger.signals("ada")) == (None, (app, new))


def test_facts_coexist_unless_superseded_by_id(store: Store) -> None:
    old, beside = (
        add_fact(store, text="My dog is Biscuit."),
        add_fact(store, text="I live in Turin."),
    )
    new = store.ledger.add_signal(
        "ada", SignalKind.FACT, {"text": "My dog is Rusk."}, supersedes=old.id
    )
    assert store.ledger.signals("ada") == (beside, new)
    with pytest.raises(InvalidInput) as error:
        store.ledger.add_signal(
            "ada", SignalKind.FACT, {"text": "My dog is Crumb."}, supersedes=old.id
        )
    assert new.id in error.value.hint
    with pytest.raises(InvalidInput):
        store.ledger.add_signal("ada", SignalKind.COMMENT, {"text": "No."}, supersedes=new.id)
    with pytest.raises(NotFound):
        store.ledger.add_signal("ada", SignalKind.FACT, {"text": "No."}, supersedes="s_nothing")


def test_retracted_signal_is_off_and_stays_in_the_history(store: Store) -> None:
    fact = add_fact(store)
    store.ledger.retract("ada", fact.id)
    store.ledger.retract("ada", fact.id)
    assert store.ledger.signals("ada") == ()
    assert store.ledger.signals("ada", current=False) == (fact,)
    assert store.ledger.signal("ada", fact.id) == fact
    other = add_fact(store)
    with pytest.raises(NotFound):
        store.ledger.retract("ada", other.id, "s_nothing")
    assert store.ledger.signals("ada") == (other,)
    store.ledger.retract("ada", fact.id, other.id)
    assert store.ledger.signals("ada") == ()
    assert verify(store) == ()


def test_failed_transaction_leaves_nothing(store: Store) -> None:
    with pytest.raises(NotFound):
        store.ledger.add_signal("new-user", SignalKind.RATING, {"value": 1}, turn="t_nothing")
    assert store.catalog.users() == ()


def test_closed_store_says_so(home: Path) -> None:
    store = opened(home)
    add_fact(store)
    store.close()
    store.close()
    with pytest.raises(HomeError):
        store.ledger.signals("ada")


_ACTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "supersede", "retract"]),
        st.sampled_from([SignalKind.RATING, SignalKind.COMMENT, SignalKind.FACT]),
        st.sampled_from([None, 0, 1]),
        st.integers(0, 9),
    ),
    max_size=12,
)


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=_ACTS)
def test_current_signals_match_a_simple_model(tmp_path: Path, acts: list[Any]) -> None:
    """The model: a list of signals and a set of those that are off."""
    home = tmp_path / "homes" / str(len(list((tmp_path / "homes").glob("*"))))
    recorded: list[tuple[str, SignalKind, int | None]] = []
    superseded: set[str] = set()
    retracted: set[str] = set()
    with opened(home) as store:
        turns = [add_turn(store).id, add_turn(store).id]
        for act, kind, turn, which in acts:
            on = None if turn is None else turns[turn]
            target = recorded[which % len(recorded)] if recorded else None
            if act == "retract" and target:
                store.ledger.retract("ada", target[0])
                retracted.add(target[0])
            elif act == "supersede" and target:
                fits = target[1] == kind and target[0] not in superseded
                fits = fits and (kind is SignalKind.FACT or target[2] == turn)
                try:
                    made = store.ledger.add_signal("ada", kind, {}, turn=on, supersedes=target[0])
                except InvalidInput:
                    assert not fits
                else:
                    assert fits
                    recorded.append((made.id, kind, turn))
                    superseded.add(target[0])
            else:
                made = store.ledger.add_signal("ada", kind, {}, turn=on)
                if kind is SignalKind.RATING and turn is not None:
                    same = [
                        i for i, k, t in recorded if (k, t) == (kind, turn) and i not in superseded
                    ]
                    superseded.update(same[-1:])
                recorded.append((made.id, kind, turn))
        current = [i for i, _, _ in recorded if i not in superseded | retracted]
        assert [signal.id for signal in store.ledger.signals("ada")] == current
        assert [signal.id for signal in store.ledger.signals("ada", current=False)] == [
            i for i, _, _ in recorded
        ]
        assert verify(store) == ()
