"""A ``.personal`` file carries all of a user; whatever its bytes are, it is taken in whole or not at all."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from runtime_makers import (
    Time,
    ask,
    correct,
    everything,
    greedy,
    nothing_changes,
    opened,
    quick_card,
)

from personalpeft import InvalidId, InvalidInput, NotFound, PersonalFileError, Runtime, User
from personalpeft.types import canonical_json

many = examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def learned(ada: User) -> User:
    """A user with something of everything."""
    correct(ada, 6)
    ada.feedback(ask(ada), comment="Be brief.")
    ada.remove_item(ada.remember("My cat is called Tom."))
    ada.remember(
        "My dog is called Biscuit.", questions=["What is my dog called?"], answer="Biscuit"
    )
    for number in range(5):
        ada.teach(f"Write to {number}.", f"Dear {number}", skill="email")
    ada.learn()
    ada.set_weight("style", 0.5)
    ada.scope("style", "near")
    ada.forget(ada.remember("Never mind."), rebuild=False)
    return ada


@pytest.fixture
def file(learned: User, tmp_path: Path) -> Path:
    return learned.export(tmp_path / "ada.personal").path


@pytest.fixture
def elsewhere(tmp_path: Path) -> Any:
    with opened(tmp_path / "elsewhere") as runtime:
        yield runtime


def all_of(user: User) -> dict[str, Any]:
    return {
        "turns": user.turns(),
        "signals": user.signals(current=False),
        "items": user.items(),
        "layers": user.layers(),
        "stack": user.stack(),
        "history": user.history(),
        "reports": user.reports(),
        "revisions": [
            (r.id, r.digest, r.signals, r.scores, r.verdict, r.below, r.parent)
            for r in user.revisions()
        ],
    }


def test_on_the_same_base_everything_is_there_and_live_at_once(
    learned: User, file: Path, elsewhere: Runtime
) -> None:
    taken = elsewhere.import_user(file)
    assert (taken.user, taken.original, taken.left_out) == ("ada", "ada", 0)
    there = elsewhere.user("ada", create=False)
    assert all_of(there) == all_of(learned)
    assert greedy(there) == greedy(learned)
    assert all(revision.reason.startswith("imported: ") for revision in there.revisions())
    assert elsewhere.verify() == ()
    correct(there, 4, first=30)
    assert there.learn().steps


def test_under_another_name_it_is_the_same_but_for_the_name(
    learned: User, file: Path, runtime: Runtime
) -> None:
    taken = runtime.import_user(file, as_user="ada.two")
    assert (taken.user, taken.original) == ("ada.two", "ada")
    two = runtime.user("ada.two", create=False)
    assert two.stack() == learned.stack()
    assert [turn.reply for turn in two.turns()] == [turn.reply for turn in learned.turns()]
    assert runtime.verify() == ()


def test_what_it_carries_again_is_the_same_file(learned: User, file: Path, tmp_path: Path) -> None:
    assert learned.export(tmp_path / "again.personal").path.read_bytes() == file.read_bytes()


def test_a_tiny_model_answers_as_it_did(tmp_path: Path, tiny_base: object) -> None:
    card = quick_card(tmp_path)
    with opened(tmp_path / "one", card, clock=Time().clock()) as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        ada.learn()
        said = greedy(ada)
        file = ada.export(tmp_path / "ada.personal").path
    with opened(tmp_path / "two", card) as runtime:
        runtime.import_user(file)
        assert greedy(runtime.user("ada")) == said


def test_without_adapters_the_next_learn_builds_from_what_was_said(
    learned: User, tmp_path: Path, elsewhere: Runtime
) -> None:
    written = learned.export(tmp_path / "words.personal", adapters=False)
    assert (written.adapters, written.revisions) == (0, 3)
    taken = elsewhere.import_user(written.path)
    assert (taken.revisions, taken.left_out, taken.why) == (
        0,
        3,
        "the file was written without adapters",
    )
    there = elsewhere.user("ada", create=False)
    assert there.stack().entries == ()
    assert there.signals(current=False) == learned.signals(current=False)
    assert there.turns() == learned.turns()
    assert elsewhere.verify() == ()
    assert there.learn().live
    assert [entry.layer for entry in there.stack().entries] == ["style", "skill.email", "memory"]


def test_on_another_base_the_ledger_comes_along_and_the_revisions_do_not(
    file: Path, tmp_path: Path, tiny_base: object
) -> None:
    with opened(tmp_path / "tiny", quick_card(tmp_path)) as runtime:
        taken = runtime.import_user(file)
        assert (taken.revisions, taken.left_out, taken.why) == (
            0,
            3,
            "they were built on another base",
        )
        there = runtime.user("ada", create=False)
        assert there.stack().entries == ()
        assert there.signals()
        assert runtime.verify() == ()


def test_over_somebody_who_is_there_it_is_refused(
    home: Path, learned: User, file: Path, runtime: Runtime
) -> None:
    with nothing_changes(home), pytest.raises(InvalidInput, match="ada"):
        runtime.import_user(file)
    with nothing_changes(home), pytest.raises(InvalidId):
        runtime.import_user(file, as_user="../ada")


def test_a_file_that_is_there_is_not_written_over(
    home: Path, learned: User, file: Path, tmp_path: Path
) -> None:
    before = file.read_bytes()
    for place in (file, tmp_path, tmp_path / "nowhere" / "x.personal"):
        with pytest.raises(InvalidInput):
            learned.export(place)
    assert file.read_bytes() == before
    assert not list(tmp_path.glob(".personal-*"))


def test_a_user_who_is_not_there_has_nothing_to_export(runtime: Runtime, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        runtime.user("bob", create=False)
    assert runtime.user("cy").export(tmp_path / "cy.personal").turns == 0


def unpacked(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(place: Path, members: dict[str, bytes], *, sealed: bool = True) -> Path:
    """A file of these members, whose digests are right where it is ``sealed``."""
    members = dict(members)
    if sealed:
        about = json.loads(members["personal.json"])
        about["files"] = {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in members.items()
            if name != "personal.json"
        }
        members["personal.json"] = canonical_json(about).encode()
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return place


def about(
    change: Callable[[dict[str, Any]], object],
) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    def changed(members: dict[str, bytes]) -> dict[str, bytes]:
        said = json.loads(members["personal.json"])
        change(said)
        return {**members, "personal.json": json.dumps(said).encode()}

    return changed


HOSTILE: dict[str, Callable[[dict[str, bytes]], dict[str, bytes]]] = {
    "a newer version": about(lambda said: said.update(version=2)),
    "no version": about(lambda said: said.pop("version")),
    "another format": about(lambda said: said.update(format="zip")),
    "another key": about(lambda said: said.update(more=1)),
    "a user that cannot be": about(lambda said: said.update(user="../../ada")),
    "another user": about(lambda said: said.update(user="bob")),
    "fewer entries": about(lambda said: said.update(entries=1)),
    "another end": about(lambda said: said.update(chain="0" * 64)),
    "another head": about(lambda said: said["layers"][0].update(head=None)),
    "a layer that cannot be": about(lambda said: said["layers"][0].update(name="../x")),
    "a weight without end": about(lambda said: said["layers"][0].update(weight=1e300)),
    "no beginning": about(lambda said: said.update(since="yesterday")),
    "nothing about itself": lambda m: {n: d for n, d in m.items() if n != "personal.json"},
    "no ledger": lambda m: {n: d for n, d in m.items() if n != "ledger.jsonl"},
    "a path": lambda m: {**m, "../../evil": b"x"},
    "an absolute path": lambda m: {**m, "/etc/passwd": b"x"},
    "a folder": lambda m: {**m, "blobs/": b""},
    "a blob of another name": lambda m: {**m, "blobs/" + "0" * 64: b"x"},
    "a blob that nobody names": lambda m: {**m, "blobs/" + hashlib.sha256(b"x").hexdigest(): b"x"},
    "a line that is cut": lambda m: {**m, "ledger.jsonl": m["ledger.jsonl"][:-20]},
    "a line that is gone": lambda m: {**m, "ledger.jsonl": m["ledger.jsonl"].split(b"\n", 1)[1]},
    "a line twice": lambda m: {
        **m,
        "ledger.jsonl": m["ledger.jsonl"].split(b"\n")[0] + b"\n" + m["ledger.jsonl"],
    },
    "another word": lambda m: {
        **m,
        "ledger.jsonl": m["ledger.jsonl"].replace(b"Biscuit", b"Tristan"),
    },
    "deep nesting": lambda m: {**m, "ledger.jsonl": b"[" * 100_000 + b"]" * 100_000},
    "nothing in the ledger": lambda m: {**m, "ledger.jsonl": b""},
    "not JSON": lambda m: {**m, "personal.json": b"\x80\x04."},
}


@pytest.mark.parametrize("hurt", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_refused_and_nothing_changes(
    file: Path,
    tmp_path: Path,
    elsewhere: Runtime,
    hurt: Callable[[dict[str, bytes]], dict[str, bytes]],
) -> None:
    members = hurt(unpacked(file))
    try:
        bad = packed(tmp_path / "bad.personal", members)
    except (KeyError, ValueError):
        bad = packed(tmp_path / "bad.personal", members, sealed=False)
    with (
        nothing_changes(tmp_path / "elsewhere"),
        pytest.raises((PersonalFileError, InvalidId)) as error,
    ):
        elsewhere.import_user(bad)
    assert error.value.hint
    assert elsewhere.users() == ()
    assert not (tmp_path.parent / "evil").exists()


def rechained(
    members: dict[str, bytes], change: Callable[[dict[str, Any]], object]
) -> dict[str, bytes]:
    """The members with entries changed by somebody who knows how digests and chains are made."""
    from personalpeft.store import hash_chain

    said = json.loads(members["personal.json"])
    chain, lines = "", []
    for line in members["ledger.jsonl"].splitlines():
        entry = json.loads(line)
        change(entry)
        table = "tombstone" if entry["forgotten"] else entry["kind"]
        entry["digest"] = hash_chain.row_digest(
            table, {"user": said["user"], "seq": entry["seq"], **entry["content"]}
        )
        chain = entry["chain"] = hash_chain.chain_digest(
            chain, entry["seq"], entry["kind"], entry["digest"]
        )
        lines.append(canonical_json(entry))
    said["chain"] = chain
    return {
        **members,
        "personal.json": canonical_json(said).encode(),
        "ledger.jsonl": "".join(line + "\n" for line in lines).encode(),
    }


def of(kind: str, /, **columns: Any) -> Callable[[dict[str, Any]], None]:
    def change(entry: dict[str, Any]) -> None:
        if entry["kind"] == kind and not entry["forgotten"]:
            entry["content"].update(columns)

    return change


def continue_itself(entry: dict[str, Any]) -> None:
    if entry["kind"] == "turn" and not entry["forgotten"]:
        entry["content"]["previous"] = entry["content"]["id"]


FORGED = {
    "a turn that continues itself": continue_itself,
    "a payload of another shape": of("signal", payload='{"text":5}'),
    "a kind that is none": of("signal", kind="secret"),
    "a role that is none": of("turn", messages='[["root","x"]]'),
    "messages that are none": of("turn", messages="[]"),
    "a stack of numbers": of("turn", stack='{"base":"x","entries":[[1,2,3,4]]}'),
    "a reason to stop that is none": of("turn", finish_reason="bored"),
    "a time that is none": of("turn", at="now"),
    "tokens below none": of("turn", prompt_tokens=-1),
    "a turn that is not there": of("signal", turn="t_nobody"),
    "a report of another shape": of("report", body='{"verdict":"promoted"}'),
    "a report that is a list": of("report", body="[]"),
    "a recipe without a rank": of("revision", recipe="{}"),
    "a recipe without end": of("revision", recipe='{"alpha":1e300,"rank":1,"targets":[]}'),
    "a base that is not ours": of("revision", base=5),
    "another digest": of("revision", digest="0" * 64),
    "scores of another shape": of("judgement", scores='{"pins":5}'),
    "a verdict that is none": of("judgement", verdict="perfect"),
    "signals of nobody": of("judgement", signals='{"s_nobody":"train"}'),
    "a column more": of("turn", more="x"),
    "JSON that is not canonical": of("turn", used="[ ]"),
    "a number that is text": of("turn", completion_tokens="5"),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED.keys())
def test_a_forged_file_whose_digests_are_right_is_refused(
    file: Path, tmp_path: Path, elsewhere: Runtime, change: Callable[[dict[str, Any]], None]
) -> None:
    bad = packed(tmp_path / "bad.personal", rechained(unpacked(file), change))
    with nothing_changes(tmp_path / "elsewhere"), pytest.raises(PersonalFileError):
        elsewhere.import_user(bad)


def test_a_forged_adapter_is_refused(file: Path, tmp_path: Path, elsewhere: Runtime) -> None:
    members = unpacked(file)
    name = next(name for name in members if name.startswith("blobs/"))
    evil = b"\x00" * len(members[name])
    digest = hashlib.sha256(evil).hexdigest()
    old = name.removeprefix("blobs/")

    def change(entry: dict[str, Any]) -> None:
        text = canonical_json(entry["content"]).replace(old, digest).replace(old[:12], digest[:12])
        entry["content"] = json.loads(text)

    members["personal.json"] = members["personal.json"].replace(
        old[:12].encode(), digest[:12].encode()
    )
    members = rechained(
        {n: d for n, d in members.items() if n != name} | {f"blobs/{digest}": evil}, change
    )
    with nothing_changes(tmp_path / "elsewhere"), pytest.raises(PersonalFileError, match="blobs/"):
        elsewhere.import_user(packed(tmp_path / "bad.personal", members))


def test_a_bomb_is_not_unpacked(tmp_path: Path, elsewhere: Runtime) -> None:
    bomb = packed(tmp_path / "bomb.personal", {"personal.json": b" " * (64 << 20)}, sealed=False)
    assert bomb.stat().st_size < 100_000
    with pytest.raises(PersonalFileError):
        elsewhere.import_user(bomb)


def test_a_name_that_occurs_twice_is_refused(
    file: Path, tmp_path: Path, elsewhere: Runtime
) -> None:
    twice = tmp_path / "twice.personal"
    twice.write_bytes(file.read_bytes())
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(twice, "a") as archive:
        archive.writestr("ledger.jsonl", b"")
    with pytest.raises(PersonalFileError, match="twice"):
        elsewhere.import_user(twice)


@pytest.mark.parametrize(
    "content", [b"", b"PK", b"PK\x05\x06" + b"\0" * 18, b"\x80\x04]."], ids=repr
)
def test_what_is_no_zip_is_refused(tmp_path: Path, elsewhere: Runtime, content: bytes) -> None:
    bad = tmp_path / "bad.personal"
    bad.write_bytes(content)
    with pytest.raises(PersonalFileError):
        elsewhere.import_user(bad)
    with pytest.raises(PersonalFileError):
        elsewhere.import_user(tmp_path / "nowhere")
    with pytest.raises(PersonalFileError):
        elsewhere.import_user(tmp_path)


@many
@given(data=st.data())
def test_whatever_byte_is_changed_it_is_the_same_user_or_none(
    file: Path, tmp_path: Path, elsewhere: Runtime, data: st.DataObject
) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # Half of the time among the names and sizes at the end, where a few bytes decide everything.
        least = data.draw(st.sampled_from([0, len(content) - 600]))
        at = data.draw(st.integers(least, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    bad = tmp_path / "bad.personal"
    bad.write_bytes(content)
    name = f"u{len(elsewhere.users(limit=100_000))}"
    before = everything(tmp_path / "elsewhere")
    try:
        taken = elsewhere.import_user(bad, as_user=name)
    except (PersonalFileError, InvalidId):
        assert everything(tmp_path / "elsewhere") == before
    else:
        assert (taken.original, taken.left_out) == ("ada", 0)
        assert elsewhere.user(name, create=False).summary().turns == taken.turns
