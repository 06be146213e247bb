"""A learn in another home gives what a learn at home gives, and is recorded once or dropped."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from runtime_makers import (
    ask,
    correct,
    home_contents,
    home_unchanged,
    open_runtime,
    quick_card,
    tiny_card,
)

from personalpeft import (
    BaseMismatch,
    BuildMismatch,
    InvalidInput,
    LearnReport,
    LedgerMoved,
    PersonalFileError,
    PersonalPeftError,
    Runtime,
    User,
)
from personalpeft import learn_bundles as learn_bundles_module
from personalpeft.learning.train import config
from personalpeft.types import canonical_json


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with open_runtime(tmp_path / "home") as opened:
        yield opened


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Runtime]:
    """A home on another machine, as far as a test can have one."""
    with open_runtime(tmp_path / "node") as opened:
        yield opened


@pytest.fixture
def ada(runtime: Runtime) -> User:
    return runtime.user("ada")


def learn_there(node: Runtime, user: User, **options: Any) -> bytes:
    (result,) = node.learn_bundles([user.bundle_learn(**options)])
    return result


def outline(user: User) -> list[tuple[Any, ...]]:
    """Return what a learn left of a user, without times."""
    moves = [(move.layer, move.before, move.after, move.cause) for move in user.history()]
    built = [
        (each.id, each.digest, each.parent, each.inputs, each.verdict, each.reason)
        for each in user.revisions()
    ]
    return [*built, *moves, *((entry.layer, entry.digest) for entry in user.stack().entries)]


def test_a_learn_elsewhere_leaves_what_a_learn_at_home_leaves(
    runtime: Runtime, node: Runtime, tmp_path: Path
) -> None:
    ada = runtime.user("ada")
    correct(ada)
    ada.export(tmp_path / "ada.personal")
    with open_runtime(tmp_path / "alone") as other:
        other.import_user(tmp_path / "ada.personal")
        alone = other.user("ada")

        def learn_in_both() -> tuple[LearnReport, LearnReport]:
            here, there = alone.learn(), ada.apply_learn(learn_there(node, ada))
            assert outline(ada) == outline(alone)
            assert (there.outcome, there.reason) == (here.outcome, here.reason)
            return here, there

        here, there = learn_in_both()
        assert there.live
        kept = [[(each.signals, each.scores) for each in user.revisions()] for user in (alone, ada)]
        assert kept[0] == kept[1]
        assert str(there).split("·")[0] == str(here).split("·")[0]
        # On top of a head, with a layer above it.
        for user in (alone, ada):
            user.feedback(user.chat("and now?", temperature=0), edit="Ahoy! Now. Arrr!")
            for number in range(5):
                user.teach(f"Write to {number}.", f"Dear {number}", skill="email")
        here, there = learn_in_both()
        assert [each.layer for each in (there, *there.above)] == ["style", "skill.email"]
    assert runtime.verify() == node.verify() == ()
    assert not ada.pending().triggers


@pytest.mark.exhaustive
def test_a_model_learns_the_same_bytes_elsewhere(tmp_path: Path) -> None:
    card = quick_card(tmp_path)
    revisions = []
    with (
        open_runtime(tmp_path / "home", card) as runtime,
        open_runtime(tmp_path / "node", card) as node,
    ):
        users = [runtime.user(name) for name in ("ada", "alone")]
        for user in users:
            for number in range(4):
                user.teach(f"question {number}", f"Ahoy! {number}")
        ada, alone = users
        ada.apply_learn(learn_there(node, ada))
        alone.learn()
        revisions = [user.stack().entries for user in users]
    assert revisions[0] == revisions[1] != ()


def test_nothing_of_a_user_stays_where_it_was_learned(node: Runtime, ada: User) -> None:
    correct(ada)
    empty = home_contents(node.settings.home)
    learn_there(node, ada)
    rows, files = home_contents(node.settings.home)
    assert (rows, files) == (empty[0], empty[1])
    everything = b"".join(
        path.read_bytes() for path in node.settings.home.rglob("*") if path.is_file()
    )
    assert b"ada" not in everything
    assert b"Arrr" not in everything


def test_a_cancelled_learn_leaves_nothing_behind_and_says_so(node: Runtime, ada: User) -> None:
    correct(ada)
    empty = home_contents(node.settings.home)
    (result,) = node.learn_bundles([ada.bundle_learn()], cancelled=lambda: True)
    assert home_contents(node.settings.home) == empty
    assert ada.apply_learn(result).error == "Cancelled"
    assert ada.learn().live


def test_the_capacity_in_the_result_of_an_earlier_version_is_read(node: Runtime, ada: User) -> None:
    def use_old_name(members: dict[str, bytes]) -> None:
        index = json.loads(members["result.json"])
        del index["report"]["capacity"]
        room = {"parameters": 9, "tokens": 3, "most": 8, "advised": 4}
        set_index(report={**index["report"], "room": room})(members)

    report = ada.apply_learn(rewritten(learn_there(node, ada), use_old_name))
    assert report.capacity["max_tokens"] == 8


def test_users_learn_together_elsewhere(runtime: Runtime, node: Runtime) -> None:
    users = [runtime.user(name) for name in ("ada", "bo", "silent")]
    for user in users[:2]:
        correct(user)
    results = node.learn_bundles([user.bundle_learn() for user in users])
    reports = [user.apply_learn(data) for user, data in zip(users, results, strict=True)]
    assert [(each.user, each.live, each.error) for each in reports] == [
        ("ada", True, ""),
        ("bo", True, ""),
        ("silent", False, "NothingToLearn"),
    ]
    assert users[2].reports() == ()


def test_a_result_is_recorded_once(runtime: Runtime, node: Runtime, ada: User) -> None:
    correct(ada)
    result = learn_there(node, ada)
    assert ada.apply_learn(result).live
    with home_unchanged(runtime.settings.home), pytest.raises(LedgerMoved):
        ada.apply_learn(result)


def test_what_the_user_says_meanwhile_stays_for_the_next_learn(node: Runtime, ada: User) -> None:
    correct(ada)
    result = learn_there(node, ada)
    (edit,) = correct(ada, 1, first=50)
    assert ada.apply_learn(result).live
    assert [each.key for each in ada.pending().triggers] == [edit]
    assert ada.learn().revision != ada.history()[0].after


def _learn(user: User) -> None:
    user.learn()


def _retract(user: User) -> None:
    user.retract(user.signals()[0].id)


def _forget(user: User) -> None:
    user.forget(user.signals()[0].id, rebuild=False)


def _roll_back(user: User) -> None:
    user.rollback("style")


@pytest.mark.parametrize("act", [_learn, _retract, _forget, _roll_back])
def test_a_result_is_dropped_when_the_ledger_moved(
    runtime: Runtime, node: Runtime, ada: User, act: Callable[[User], None]
) -> None:
    correct(ada)
    if act is _roll_back:
        ada.learn()
        correct(ada, 4, first=20)
    result = learn_there(node, ada)
    act(ada)
    with home_unchanged(runtime.settings.home), pytest.raises(LedgerMoved) as raised:
        ada.apply_learn(result)
    assert "Drop" in raised.value.hint


def test_a_result_of_an_erased_user_is_dropped(runtime: Runtime, node: Runtime, ada: User) -> None:
    correct(ada)
    result = learn_there(node, ada)
    runtime.forget_user("ada")
    again = runtime.user("ada")
    with home_unchanged(runtime.settings.home), pytest.raises(LedgerMoved):
        again.apply_learn(result)


def test_a_machine_with_another_base_build_format_or_recipe_refuses(
    ada: User, node: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct(ada)
    bundle, result = ada.bundle_learn(), learn_there(node, ada)
    with (
        open_runtime(tmp_path / "other", quick_card(tmp_path)) as other,
        home_unchanged(other.settings.home),
        pytest.raises(BaseMismatch, match="this machine has"),
    ):
        other.learn_bundles([bundle])
    monkeypatch.setattr(learn_bundles_module, "BUILD_FORMAT", config.BUILD_FORMAT + 1)
    for act in (lambda: node.learn_bundles([bundle]), lambda: ada.apply_learn(result)):
        with pytest.raises(BuildMismatch, match="format") as raised:
            act()
        assert "same version" in raised.value.hint


def test_a_card_with_another_recipe_refuses(tmp_path: Path) -> None:
    cards = []
    for rate in (0.01, 0.02):
        cards.append(tmp_path / f"{rate}.toml")
        cards[-1].write_text(tiny_card(f"\n[learning]\nlearning_rate = {rate}\n"))
    with (
        open_runtime(tmp_path / "home", cards[0]) as runtime,
        open_runtime(tmp_path / "node", cards[1]) as node,
    ):
        ada = runtime.user("ada")
        ada.teach("question", "answer")
        assert runtime.base().digest == node.base().digest
        with pytest.raises(BuildMismatch, match="recipe"):
            learn_there(node, ada)


def test_a_bundle_is_not_learned_beside_a_user_of_the_same_name(
    runtime: Runtime, node: Runtime, ada: User
) -> None:
    correct(ada)
    bundle = ada.bundle_learn()
    with home_unchanged(runtime.settings.home), pytest.raises(InvalidInput, match="has a user ada"):
        runtime.learn_bundles([bundle])
    with pytest.raises(InvalidInput, match="two bundles"):
        node.learn_bundles([bundle, bundle])
    with pytest.raises(InvalidInput, match="layer"):
        ada.bundle_learn(recipe={"rank": 4})


def test_options_of_a_learn_travel(node: Runtime, ada: User) -> None:
    correct(ada)
    for number in range(5):
        ada.teach(f"Write to {number}.", f"Dear {number}", skill="email")
    report = ada.apply_learn(learn_there(node, ada, layer="skill.email", recipe={"rank": 3}))
    assert (report.layer, report.above) == ("skill.email", ())
    assert ada.revisions()[0].recipe["overrides"] == {"rank": 3}


@pytest.fixture(scope="module")
def learned(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[User, Runtime, bytes, bytes]]:
    folder = tmp_path_factory.mktemp("learned")
    with open_runtime(folder / "home") as runtime, open_runtime(folder / "node") as node:
        ada = runtime.user("ada")
        correct(ada)
        bundle = ada.bundle_learn()
        (result,) = node.learn_bundles([bundle])
        yield ada, node, bundle, result


def rewritten(data: bytes, change: Callable[[dict[str, bytes]], None]) -> bytes:
    """Return an archive with changed members, with an index that fits them."""
    import hashlib

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    (name,) = (each for each in members if each in ("bundle.json", "result.json"))
    index = json.loads(members[name])
    index["files"] = {
        each: {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
        for each, body in members.items()
        if each != name
    }
    members[name] = canonical_json(index).encode()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for each, body in members.items():
            archive.writestr(each, body)
    return file.getvalue()


def set_index(**values: Any) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        (name,) = (each for each in members if each in ("bundle.json", "result.json"))
        members[name] = canonical_json(json.loads(members[name]) | values).encode()

    return change


def swap_adapter(members: dict[str, bytes]) -> None:
    (name,) = (each for each in members if each.startswith("blobs/"))
    members[name] = members[name][:-1] + bytes([members[name][-1] ^ 1])


def drop_adapter(members: dict[str, bytes]) -> None:
    (name,) = (each for each in members if each.startswith("blobs/"))
    del members[name]


def drop_first_entry(members: dict[str, bytes]) -> None:
    members["ledger.jsonl"] = members["ledger.jsonl"].partition(b"\n")[2]


def lie(members: dict[str, bytes]) -> None:
    members["ledger.jsonl"] = members["ledger.jsonl"].replace(b"promoted", b"refused!")


@pytest.mark.parametrize(
    "change",
    [
        set_index(seq=1),
        set_index(seq=-1),
        set_index(chain="0" * 64),
        set_index(version=2),
        set_index(format="personalpeft.personal"),
        set_index(report={}),
        set_index(at="yesterday"),
        set_index(more=1),
        swap_adapter,
        drop_adapter,
        drop_first_entry,
        lie,
    ],
)
def test_a_forged_result_changes_nothing(
    learned: tuple[User, Runtime, bytes, bytes], change: Callable[[dict[str, bytes]], None]
) -> None:
    ada, _, _, result = learned
    home = ada._services.store.home
    with home_unchanged(home), pytest.raises(PersonalFileError) as raised:
        ada.apply_learn(rewritten(result, change))
    assert raised.value.hint


@pytest.mark.parametrize(
    "change",
    [
        set_index(entries=1),
        set_index(chain="0" * 64),
        set_index(options={}),
        set_index(options={"layer": None, "start": "auto", "accept": 1, "recipe": None}),
        set_index(user="bo"),
        drop_first_entry,
    ],
)
def test_a_forged_bundle_is_not_learned(
    learned: tuple[User, Runtime, bytes, bytes], change: Callable[[dict[str, bytes]], None]
) -> None:
    _, node, bundle, _ = learned
    with home_unchanged(node.settings.home), pytest.raises(PersonalFileError) as raised:
        node.learn_bundles([rewritten(bundle, change)])
    assert raised.value.hint


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_are_an_error_and_change_nothing(
    learned: tuple[User, Runtime, bytes, bytes], data: st.DataObject
) -> None:
    ada, _, _, result = learned
    at = data.draw(st.integers(0, len(result) - 1))
    damaged = data.draw(st.sampled_from([result[:at], b"", result[at:]]))
    if damaged == result:
        return
    with home_unchanged(ada._services.store.home), pytest.raises(PersonalPeftError):
        ada.apply_learn(damaged)


def test_a_result_goes_to_its_own_user(
    learned: tuple[User, Runtime, bytes, bytes], runtime: Runtime
) -> None:
    bo = runtime.user("bo")
    ask(bo)
    with home_unchanged(runtime.settings.home), pytest.raises(InvalidInput, match="ada"):
        bo.apply_learn(learned[3])
    other = runtime.user("ada")
    with home_unchanged(runtime.settings.home), pytest.raises(LedgerMoved):
        other.apply_learn(learned[3])
