"""Revisions are recorded with their provenance, and a head can always be served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from store_makers import BASE, add_fact, add_revision, add_turn, opened, packed

from personalpeft.errors import BaseMismatch, Damaged, InvalidId, InvalidInput, NotFound
from personalpeft.store.integrity import verify
from personalpeft.store.store import Store
from personalpeft.types import Json, Revision, Stack, StackEntry, Verdict


@pytest.fixture
def ada(store: Store) -> Store:
    store.catalog.ensure_user("ada")
    return store


def test_revision_is_returned_as_recorded(ada: Store) -> None:
    fact, question = add_fact(ada), add_fact(ada)
    parent = add_revision(ada, b"parent")
    revision = add_revision(
        ada,
        b"child",
        parent=parent.id,
        below=(StackEntry("style", "style@0", "0" * 64, 0.5),),
        signals={fact.id: "trained", question.id: "held_out"},
        probation=True,
    )
    assert ada.catalog.revision("ada", revision.id) == revision
    assert ada.catalog.revision("ada", revision.id[:9]) == revision
    assert ada.catalog.revision("ada", revision.digest[:9]) == revision
    assert ada.catalog.revision("ada", revision.digest) == revision
    assert ada.catalog.revisions("ada") == (parent, revision)
    assert ada.blobs.read(revision.digest) == b"packed child"
    assert ada.catalog.holdout("ada", "style") == (question.id,)
    assert ada.catalog.used_signals("ada", "style") == {fact.id, question.id}
    assert ada.catalog.holdout("ada", "memory") == ()
    assert ada.catalog.used_signals("ada", "memory") == frozenset()


def test_users_may_share_a_blob_and_not_a_revision(ada: Store) -> None:
    ada.catalog.ensure_user("bob")
    of_ada, of_bob = add_revision(ada), add_revision(ada, user="bob")
    assert of_ada.id == of_bob.id
    assert ada.catalog.revision("bob", of_bob.id).user == "bob"
    add_revision(ada, b"two")
    assert len(ada.catalog.revisions("bob")) == 1
    assert verify(ada) == ()


def test_revision_is_recorded_only_if_its_parent_head_is_unchanged(
    ada: Store,
) -> None:
    first = add_revision(ada, b"first")
    second, blob = packed(content=b"second")
    for over in (None, "style@000000000000"):
        assert not ada.catalog.add_revision(
            second, blob, {}, promote=True, cause="learn", expected_head=over
        )
    assert ada.catalog.revisions("ada") == (first,)
    assert ada.catalog.reports("ada") == ({"verdict": "promoted"},)
    assert ada.catalog.add_revision(
        second, blob, {}, promote=False, cause="learn", expected_head=None
    )
    assert ada.catalog.add_revision(
        second, blob, {}, promote=True, cause="learn", expected_head=first.id
    )
    assert ada.catalog.layers("ada")[0].head == second.id


def test_only_a_promoted_revision_becomes_the_head(ada: Store) -> None:
    refused = add_revision(ada, b"refused", promote=False, verdict=Verdict.REFUSED)
    assert ada.catalog.stack("ada", BASE) == Stack(BASE)
    assert [layer.head for layer in ada.catalog.layers("ada")] == [None]
    promoted = add_revision(ada, b"promoted")
    assert ada.catalog.stack("ada", BASE).entries == (
        StackEntry("style", promoted.id, promoted.digest, 1.0),
    )
    assert ada.catalog.revisions("ada") == (refused, promoted)
    assert [(move.before, move.after) for move in ada.catalog.head_moves("ada")] == [
        (None, promoted.id)
    ]


def test_layers_are_ordered_style_skills_by_age_memory(ada: Store) -> None:
    for layer in ("memory", "skill.zeta", "skill.alpha", "style"):
        add_revision(ada, layer.encode(), layer=layer)
    layers = ada.catalog.layers("ada")
    assert [layer.name for layer in layers] == ["style", "skill.zeta", "skill.alpha", "memory"]
    assert [layer.position for layer in layers] == [0, 1, 2, 3]
    assert [entry.layer for entry in ada.catalog.stack("ada", BASE).entries] == [
        layer.name for layer in layers
    ]


def test_user_without_layers_has_the_bare_base(ada: Store) -> None:
    assert ada.catalog.layers("ada") == ()
    assert ada.catalog.revisions("ada") == ()
    assert ada.catalog.head_moves("ada") == ()
    assert ada.catalog.stack("ada", BASE) == Stack(BASE)


def test_head_can_move_back_forward_and_to_the_base(ada: Store) -> None:
    first, second = add_revision(ada, b"first"), add_revision(ada, b"second")
    back = ada.catalog.move_head("ada", "style", first.id, base=BASE, cause="rollback")
    assert (back.before, back.after, back.cause) == (second.id, first.id, "rollback")
    ada.catalog.move_head("ada", "style", None, base=BASE, cause="to the base")
    assert ada.catalog.stack("ada", BASE) == Stack(BASE)
    ada.catalog.move_head("ada", "style", second.digest[:10], base=BASE, cause="again")
    assert ada.catalog.stack("ada", BASE).entries[0].revision == second.id
    assert [move.after for move in ada.catalog.head_moves("ada", layer="style")] == [
        first.id,
        second.id,
        first.id,
        None,
        second.id,
    ]
    assert verify(ada) == ()


def test_moving_a_head_to_itself_records_nothing(ada: Store) -> None:
    revision = add_revision(ada)
    move = ada.catalog.move_head("ada", "style", revision.id, base=BASE, cause="again")
    assert move.before == move.after == revision.id
    assert len(ada.catalog.head_moves("ada")) == 1


def test_refused_revision_goes_live_only_by_name(ada: Store) -> None:
    refused = add_revision(ada, promote=False, verdict=Verdict.REFUSED)
    ada.catalog.move_head("ada", "style", refused.id, base=BASE, cause="she insists")
    assert ada.catalog.stack("ada", BASE).entries[0].revision == refused.id


def test_unknown_layer_or_revision_suggests_the_nearest(ada: Store) -> None:
    style, memory = add_revision(ada), add_revision(ada, layer="memory", content=b"memory")
    for act in (
        lambda: ada.catalog.move_head("ada", "stile", None, base=BASE, cause=""),
        lambda: ada.catalog.set_weight("ada", "stile", 0.5),
        lambda: ada.catalog.set_scope("ada", "stile", "never"),
        lambda: ada.catalog.revisions("ada", layer="stile"),
        lambda: ada.catalog.head_moves("ada", layer="stile"),
    ):
        with pytest.raises(NotFound) as error:
            act()
        assert "'style'" in error.value.hint
    with pytest.raises(NotFound) as error:
        ada.catalog.move_head("ada", "style", memory.id, base=BASE, cause="")
    assert style.id in error.value.hint


def test_head_never_moves_to_another_base(ada: Store) -> None:
    first = add_revision(ada, b"first")
    other = add_revision(ada, b"other", promote=False, base="base-two")
    with pytest.raises(BaseMismatch):
        ada.catalog.move_head("ada", "style", other.id, base=BASE, cause="")
    assert ada.catalog.stack("ada", BASE).entries[0].revision == first.id
    with pytest.raises(BaseMismatch):
        ada.catalog.stack("ada", "base-two")


def test_head_never_moves_to_a_damaged_blob(ada: Store) -> None:
    first, second = add_revision(ada, b"first"), add_revision(ada, b"second")
    ada.blobs.path(first.digest).write_bytes(b"packed firsT")
    with pytest.raises(Damaged):
        ada.catalog.move_head("ada", "style", first.id, base=BASE, cause="")
    ada.blobs.path(first.digest).unlink()
    with pytest.raises(Damaged):
        ada.catalog.move_head("ada", "style", first.id, base=BASE, cause="")
    assert ada.catalog.stack("ada", BASE).entries[0].revision == second.id
    assert len(ada.catalog.head_moves("ada")) == 2


def test_identical_revision_is_judged_again_and_keeps_its_earlier_verdict(
    ada: Store,
) -> None:
    first = add_revision(
        ada, promote=False, verdict=Verdict.ABSTAINED, reason="Too few questions.", probation=True
    )
    question = add_fact(ada)
    add_revision(
        ada, reason="Better on 5 of 5.", scores={"pinned": 1.0}, signals={question.id: "held_out"}
    )
    (now,) = ada.catalog.revisions("ada")
    assert (now.verdict, now.reason, now.probation) == (
        Verdict.PROMOTED,
        "Better on 5 of 5.",
        False,
    )
    assert now.scores == {"pinned": 1.0}
    assert now.signals == {question.id: "held_out"}
    assert (now.id, now.at, now.seconds) == (first.id, first.at, first.seconds)
    assert ada.catalog.reports("ada") == ({"verdict": "abstained"}, {"verdict": "promoted"})
    assert ada.catalog.stack("ada", BASE).entries[0].revision == first.id
    assert verify(ada) == ()


def judge(
    store: Store, revision: Revision, report: Json, *, before: str, after: str | None
) -> bool:
    """Judge a revision of a style and move the head."""
    return store.catalog.switch_heads(
        revision.user,
        {"style": after},
        expected={"style": before},
        judged=[(revision, report)],
        base=revision.base,
        cause="withdrawn",
    )


def test_head_is_judged_again_and_moved_in_one_step(ada: Store) -> None:
    first, second = add_revision(ada, b"first"), add_revision(ada, b"second", probation=True)
    worse = replace(
        second, verdict=Verdict.REFUSED, reason="withdrawn: nobody liked it", probation=False
    )
    assert judge(ada, worse, {"event": "withdrawn"}, before=second.id, after=first.id)
    assert ada.catalog.revision("ada", second.id) == worse
    assert [layer.head for layer in ada.catalog.layers("ada")] == [first.id]
    assert [(m.before, m.after, m.cause) for m in ada.catalog.head_moves("ada")][-1] == (
        second.id,
        first.id,
        "withdrawn",
    )
    assert ada.catalog.reports("ada")[-1] == {"event": "withdrawn"}
    assert not judge(ada, worse, {"event": "again"}, before=second.id, after=first.id)
    confirmed = replace(first, reason="confirmed")
    assert judge(ada, confirmed, {"event": "confirmed"}, before=first.id, after=first.id)
    assert len(ada.catalog.head_moves("ada")) == 3
    assert verify(ada) == ()


def test_head_never_moves_back_to_an_unservable_revision(ada: Store) -> None:
    first, second = add_revision(ada, b"first"), add_revision(ada, b"second")
    ada.blobs.path(first.digest).unlink()
    worse = replace(second, reason="withdrawn")
    with pytest.raises(Damaged):
        judge(ada, worse, {}, before=second.id, after=first.id)
    assert ada.catalog.revision("ada", second.id) == second


def test_judging_again_repairs_a_damaged_blob(ada: Store) -> None:
    revision = add_revision(ada)
    ada.blobs.path(revision.digest).write_bytes(b"")
    add_revision(ada)
    assert ada.blobs.read(revision.digest) == b"packed one"
    assert verify(ada) == ()


def test_held_out_signal_is_never_trained_in_its_layer(ada: Store) -> None:
    question = add_fact(ada)
    add_revision(ada, b"first", signals={question.id: "held_out"})
    with pytest.raises(InvalidInput) as error:
        add_revision(ada, b"second", signals={question.id: "trained"})
    assert question.id in error.value.message
    add_revision(ada, b"third", layer="memory", signals={question.id: "trained"})
    add_revision(ada, b"fourth", signals={question.id: "held_out"})


def test_old_revision_is_judged_again_after_one_of_its_signals_was_held_out(ada: Store) -> None:
    fact = add_fact(ada)
    old = add_revision(ada, b"old", signals={fact.id: "trained"})
    add_revision(ada, b"new", signals={fact.id: "held_out"})
    add_revision(ada, b"old", signals={fact.id: "trained"})
    assert ada.catalog.revision("ada", old.id).signals == {fact.id: "trained"}
    assert verify(ada) == ()


def test_invalid_revision_is_refused_whole(ada: Store) -> None:
    sound, blob = packed()
    cases: list[tuple[object, type[Exception]]] = [
        (replace(sound, user="bob"), NotFound),
        (replace(sound, layer="style/..", id=f"style/..@{sound.digest[:12]}"), InvalidId),
        (replace(sound, id="style@000000000000"), InvalidInput),
        (replace(sound, digest="0" * 64, id="style@" + "0" * 12), Damaged),
        (replace(sound, parent="style@000000000000"), NotFound),
        (replace(sound, signals={"s_nothing": "trained"}), NotFound),
        (replace(sound, recipe={"lr": float("inf")}), InvalidInput),
        (replace(sound, seconds=float("nan")), InvalidInput),
        (replace(sound, reason="\ud800"), InvalidInput),
    ]
    for revision, error in cases:
        with pytest.raises(error):
            ada.catalog.add_revision(revision, blob, {}, promote=True, cause="learn")  # type: ignore[arg-type]
    fact = add_fact(ada)
    with pytest.raises(InvalidInput):
        add_revision(ada, signals={fact.id: "test"})
    assert ada.catalog.layers("ada") == ()
    assert ada.catalog.reports("ada") == ()


def test_style_is_attached_always_and_other_layers_near_by_default(
    home: Path,
) -> None:
    with opened(home) as store:
        store.catalog.ensure_user("ada")
        for layer in ("style", "skill.email", "memory"):
            add_revision(store, layer.encode(), layer=layer)
        assert [layer.scope for layer in store.catalog.layers("ada")] == ["always", "near", "near"]
        store.catalog.set_scope("ada", "skill.email", "never")
        with pytest.raises(InvalidInput):
            store.catalog.set_scope("ada", "style", "sometimes")  # type: ignore[arg-type]
    with opened(home) as store:
        assert [layer.scope for layer in store.catalog.layers("ada")] == ["always", "never", "near"]
        assert len(store.catalog.stack("ada", BASE).entries) == 3
        assert verify(store) == ()


def test_weight_is_stored_and_part_of_the_stack(home: Path) -> None:
    with opened(home) as store:
        store.catalog.ensure_user("ada")
        add_revision(store)
        whole = store.catalog.stack("ada", BASE)
        store.catalog.set_weight("ada", "style", 0.25)
        for weight in (float("nan"), float("inf")):
            with pytest.raises(InvalidInput):
                store.catalog.set_weight("ada", "style", weight)
    with opened(home) as store:
        assert store.catalog.stack("ada", BASE).entries[0].weight == 0.25
        assert store.catalog.layers("ada")[0].weight == 0.25
        assert store.catalog.stack("ada", BASE).digest != whole.digest


def test_learn_without_a_revision_keeps_its_report(ada: Store) -> None:
    ada.catalog.add_report("ada", {"verdict": "abstained", "reason": "one signal"})
    assert ada.catalog.reports("ada") == ({"verdict": "abstained", "reason": "one signal"},)
    with pytest.raises(NotFound):
        ada.catalog.add_report("adda", {})


def test_users_are_listed_with_their_counts(ada: Store) -> None:
    turn = add_turn(ada, "bob")
    add_fact(ada, "bob")
    add_revision(ada)
    listed = {user.id: (user.turns, user.signals, user.revisions) for user in ada.catalog.users()}
    assert listed == {"ada": (0, 0, 1), "bob": (1, 1, 0)}
    assert ada.catalog.user("bob").since <= turn.at


def test_vectors_are_stored_per_embedder_and_replaced(ada: Store) -> None:
    fact, other = add_fact(ada), add_fact(ada)
    vector = np.linspace(-1, 1, 5, dtype=np.float32)
    ada.catalog.add_vectors("ada", "minilm", {fact.id: -vector, other.id: vector})
    ada.catalog.add_vectors("ada", "minilm", {fact.id: vector})
    known = ada.catalog.vectors("ada", "minilm")
    assert list(known) == [fact.id, other.id]
    assert all(np.array_equal(each, vector) for each in known.values())
    assert ada.catalog.vectors("ada", "another") == {}
    for bad in (
        np.array([np.nan], np.float32),
        np.zeros((2, 2), np.float32),
        np.zeros(0, np.float32),
    ):
        with pytest.raises(InvalidInput):
            ada.catalog.add_vectors("ada", "minilm", {fact.id: bad})
    with pytest.raises(NotFound):
        ada.catalog.add_vectors("ada", "minilm", {"s_nothing": vector})


def test_blob_is_found_by_its_digest_alone(store: Store) -> None:
    digest = store.blobs.put("ada", b"bytes")
    assert store.blobs.put("ada", b"bytes") == digest
    assert store.blobs.read(digest) == b"bytes"
    assert store.blobs.path(digest).read_bytes() == b"bytes"
    for nothing in ("0" * 64, digest[:-1], digest.upper(), "../personalpeft.db", "", "\ud800"):
        with pytest.raises(Damaged):
            store.blobs.path(nothing)
        with pytest.raises(Damaged):
            store.blobs.read(nothing)


def test_heads_of_several_layers_switch_together_or_not_at_all(ada: Store) -> None:
    layers = ("style", "memory")
    old = {layer: add_revision(ada, f"old {layer}".encode(), layer=layer) for layer in layers}
    new = {
        layer: add_revision(ada, f"new {layer}".encode(), layer=layer, promote=False, base="b")
        for layer in layers
    }
    heads = {layer: each.id for layer, each in old.items()}
    targets = {layer: each.id for layer, each in new.items()}

    def switch(to: dict[str, str], expected: dict[str, str], base: str = "b") -> bool:
        judged = [(replace(each, reason="as good"), {"kept": "this"}) for each in new.values()]
        return ada.catalog.switch_heads(
            "ada", to, expected=expected, judged=judged, base=base, cause="rebase"
        )

    def live() -> dict[str, str | None]:
        return {each.name: each.head for each in ada.catalog.layers("ada")}

    assert not switch(targets, {**heads, "memory": new["memory"].id})
    with pytest.raises(BaseMismatch):
        switch(targets, heads, base=BASE)
    with pytest.raises(NotFound):
        switch({**targets, "memory": "memory@000000000000"}, heads)
    assert live() == heads
    assert len(ada.catalog.head_moves("ada")) == 2
    assert ada.catalog.revision("ada", new["style"].id).reason != "as good"
    assert switch(targets, heads)
    assert live() == targets
    assert [each.cause for each in ada.catalog.head_moves("ada")][2:] == ["rebase"] * 2
    assert ada.catalog.revision("ada", new["style"].id).reason == "as good"
    assert verify(ada) == ()
