"""A ``.personal`` file carries all of a user.

Whatever its bytes are, it is imported whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from runtime_makers import (
    FakeTime,
    ask,
    correct,
    greedy,
    home_contents,
    home_unchanged,
    open_runtime,
    quick_card,
)

from personalpeft import InvalidId, InvalidInput, NotFound, PersonalFileError, Runtime, User
from personalpeft.store import archive_file
from personalpeft.types import canonical_json

many = examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def learned_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home whose user has data of each kind."""
    home = tmp_path_factory.mktemp("learned") / "home"
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        correct(ada, 6)
        ada.feedback(ask(ada), comment="Be brief.")
        ada.retract_item(ada.remember("My cat is called Tom."))
        ada.remember(
            "My dog is called Biscuit.", questions=["What is my dog called?"], answer="Biscuit"
        )
        for number in range(5):
            ada.teach(f"Write to {number}.", f"Dear {number}", skill="email")
        ada.learn()
        ada.set_weight("style", 0.5)
        ada.scope("style", "near")
        ada.forget(ada.remember("Never mind."), rebuild=False)
    return home


@pytest.mark.parametrize(
    ("limit", "size"),
    [("_MAX_TOTAL_BYTES", 40_000), ("_MAX_BLOB_BYTES", 100), ("_MAX_LINE_BYTES", 100)],
)
def test_export_that_no_import_would_read_is_refused(
    learned: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, size: int
) -> None:
    monkeypatch.setattr(archive_file, limit, size)
    with pytest.raises(InvalidInput, match="An import would refuse"):
        learned.export(tmp_path / "ada.personal")
    assert not list(tmp_path.glob("*.personal"))
    assert learned._services.store.exports.of_user(learned.id) == ()
    if limit == "_MAX_BLOB_BYTES":
        assert learned.export(tmp_path / "ada.personal", adapters=False).adapters == 0


def test_weights_and_scopes_outlive_an_import_without_adapters(
    learned: User, other_runtime: Any, tmp_path: Path
) -> None:
    learned.set_weight("style", 0.5)
    learned.scope("style", "never")
    learned.export(tmp_path / "ada.personal", adapters=False)
    other_runtime.import_user(tmp_path / "ada.personal")
    ada = other_runtime.user("ada")
    assert ada.learn(accept=True).live
    style = next(each for each in ada.layers() if each.name == "style")
    assert (style.weight, style.scope) == (0.5, "never")


@pytest.fixture
def learned(learned_home: Path, ada: User) -> User:
    return ada


@pytest.fixture(scope="module")
def exported(learned_home: Path) -> Path:
    """Return the ``.personal`` file of the user of ``learned_home``."""
    with open_runtime(learned_home) as runtime:
        return runtime.user("ada").export(learned_home.parent / "ada.personal").path


@pytest.fixture
def personal_file(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(exported, tmp_path))


@pytest.fixture
def other_runtime(tmp_path: Path) -> Any:
    with open_runtime(tmp_path / "elsewhere") as runtime:
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


def test_import_on_the_same_base_restores_everything_live(
    learned: User, personal_file: Path, other_runtime: Runtime
) -> None:
    imported = other_runtime.import_user(personal_file)
    assert (imported.user, imported.original, imported.left_out) == ("ada", "ada", 0)
    there = other_runtime.user("ada", create=False)
    assert all_of(there) == all_of(learned)
    assert greedy(there) == greedy(learned)
    assert all(revision.reason.startswith("imported: ") for revision in there.revisions())
    assert other_runtime.verify() == ()
    correct(there, 4, first=30)
    assert there.learn().steps


def test_import_under_another_id_changes_only_the_id(
    learned: User, personal_file: Path, runtime: Runtime
) -> None:
    imported = runtime.import_user(personal_file, as_user="ada.two")
    assert (imported.user, imported.original) == ("ada.two", "ada")
    two = runtime.user("ada.two", create=False)
    assert two.stack() == learned.stack()
    assert [turn.reply for turn in two.turns()] == [turn.reply for turn in learned.turns()]
    assert runtime.verify() == ()


def test_exporting_an_imported_user_gives_the_same_file(
    learned: User, personal_file: Path, tmp_path: Path
) -> None:
    assert (
        learned.export(tmp_path / "again.personal").path.read_bytes() == personal_file.read_bytes()
    )


@pytest.mark.exhaustive
def test_tiny_model_answers_as_before_after_an_import(tmp_path: Path, tiny_base: object) -> None:
    card = quick_card(tmp_path)
    with open_runtime(tmp_path / "one", card, clock=FakeTime().clock()) as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        ada.learn()
        said = greedy(ada)
        personal_file = ada.export(tmp_path / "ada.personal").path
    with open_runtime(tmp_path / "two", card) as runtime:
        runtime.import_user(personal_file)
        assert greedy(runtime.user("ada")) == said


def test_without_adapters_the_next_learn_builds_from_the_ledger(
    learned: User, tmp_path: Path, other_runtime: Runtime
) -> None:
    written = learned.export(tmp_path / "words.personal", adapters=False)
    assert (written.adapters, written.revisions) == (0, 3)
    imported = other_runtime.import_user(written.path)
    assert (imported.revisions, imported.left_out, imported.why) == (
        0,
        3,
        "the file was written without adapters",
    )
    there = other_runtime.user("ada", create=False)
    assert there.stack().entries == ()
    assert there.signals(current=False) == learned.signals(current=False)
    assert there.turns() == learned.turns()
    assert other_runtime.verify() == ()
    assert there.learn().live
    assert [entry.layer for entry in there.stack().entries] == ["style", "skill.email", "memory"]


def test_import_on_another_base_carries_the_ledger_and_not_the_revisions(
    personal_file: Path, tmp_path: Path, tiny_base: object
) -> None:
    with open_runtime(tmp_path / "tiny", quick_card(tmp_path)) as runtime:
        imported = runtime.import_user(personal_file)
        assert (imported.revisions, imported.left_out, imported.why) == (
            0,
            3,
            "they were built on another base",
        )
        there = runtime.user("ada", create=False)
        assert there.stack().entries == ()
        assert there.signals()
        assert runtime.verify() == ()


def test_import_over_an_existing_user_is_refused(
    home: Path, learned: User, personal_file: Path, runtime: Runtime
) -> None:
    with home_unchanged(home), pytest.raises(InvalidInput, match="ada"):
        runtime.import_user(personal_file)
    with home_unchanged(home), pytest.raises(InvalidId):
        runtime.import_user(personal_file, as_user="../ada")


def test_export_never_overwrites_a_file(
    home: Path, learned: User, personal_file: Path, tmp_path: Path
) -> None:
    before = personal_file.read_bytes()
    for place in (personal_file, tmp_path, tmp_path / "nowhere" / "x.personal"):
        with pytest.raises(InvalidInput):
            learned.export(place)
    assert personal_file.read_bytes() == before
    assert not list(tmp_path.glob(".*.part"))


def test_unknown_user_has_nothing_to_export(runtime: Runtime, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        runtime.user("bob", create=False)
    assert runtime.user("cy").export(tmp_path / "cy.personal").turns == 0


def unzip_members(personal_file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(personal_file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zip_members(place: Path, members: dict[str, bytes], *, sealed: bool = True) -> Path:
    """Write a file of these members, with correct digests where it is ``sealed``."""
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
    "an unreferenced blob": lambda m: {**m, "blobs/" + hashlib.sha256(b"x").hexdigest(): b"x"},
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
def test_hostile_file_is_refused_and_nothing_changes(
    personal_file: Path,
    tmp_path: Path,
    other_runtime: Runtime,
    hurt: Callable[[dict[str, bytes]], dict[str, bytes]],
) -> None:
    members = hurt(unzip_members(personal_file))
    try:
        bad = zip_members(tmp_path / "bad.personal", members)
    except (KeyError, ValueError):
        bad = zip_members(tmp_path / "bad.personal", members, sealed=False)
    with (
        home_unchanged(tmp_path / "elsewhere"),
        pytest.raises((PersonalFileError, InvalidId)) as error,
    ):
        other_runtime.import_user(bad)
    assert error.value.hint
    assert other_runtime.users() == ()
    assert not (tmp_path.parent / "evil").exists()


def rechained(
    members: dict[str, bytes], change: Callable[[dict[str, Any]], object]
) -> dict[str, bytes]:
    """Return the members after ``change`` on their entries, with correct digests and chains."""
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
    "a consent that is no yes or no": of("signal", payload='{"text":"x","trains":"no"}'),
    "a retraction for nothing that is known": of("retraction", purpose="fun"),
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
    "unknown signals": of("judgement", signals='{"s_nobody":"train"}'),
    "a column more": of("turn", more="x"),
    "JSON that is not canonical": of("turn", used="[ ]"),
    "a number that is text": of("turn", completion_tokens="5"),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED.keys())
def test_forged_file_with_correct_digests_is_refused(
    personal_file: Path,
    tmp_path: Path,
    other_runtime: Runtime,
    change: Callable[[dict[str, Any]], None],
) -> None:
    bad = zip_members(tmp_path / "bad.personal", rechained(unzip_members(personal_file), change))
    with home_unchanged(tmp_path / "elsewhere"), pytest.raises(PersonalFileError):
        other_runtime.import_user(bad)


def test_forged_adapter_is_refused(
    personal_file: Path, tmp_path: Path, other_runtime: Runtime
) -> None:
    members = unzip_members(personal_file)
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
    with home_unchanged(tmp_path / "elsewhere"), pytest.raises(PersonalFileError, match="blobs/"):
        other_runtime.import_user(zip_members(tmp_path / "bad.personal", members))


def test_zip_bomb_is_not_extracted(tmp_path: Path, other_runtime: Runtime) -> None:
    bomb = zip_members(
        tmp_path / "bomb.personal", {"personal.json": b" " * (64 << 20)}, sealed=False
    )
    assert bomb.stat().st_size < 100_000
    with pytest.raises(PersonalFileError):
        other_runtime.import_user(bomb)


def test_duplicate_member_name_is_refused(
    personal_file: Path, tmp_path: Path, other_runtime: Runtime
) -> None:
    twice = tmp_path / "twice.personal"
    twice.write_bytes(personal_file.read_bytes())
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(twice, "a") as archive:
        archive.writestr("ledger.jsonl", b"")
    with pytest.raises(PersonalFileError, match="twice"):
        other_runtime.import_user(twice)


@pytest.mark.parametrize(
    "content", [b"", b"PK", b"PK\x05\x06" + b"\0" * 18, b"\x80\x04]."], ids=repr
)
def test_file_that_is_no_zip_is_refused(
    tmp_path: Path, other_runtime: Runtime, content: bytes
) -> None:
    bad = tmp_path / "bad.personal"
    bad.write_bytes(content)
    with pytest.raises(PersonalFileError):
        other_runtime.import_user(bad)
    with pytest.raises(PersonalFileError):
        other_runtime.import_user(tmp_path / "nowhere")
    with pytest.raises(PersonalFileError):
        other_runtime.import_user(tmp_path)


@many
@given(data=st.data())
def test_changed_byte_gives_the_same_user_or_none(
    personal_file: Path, tmp_path: Path, other_runtime: Runtime, data: st.DataObject
) -> None:
    content = bytearray(personal_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # Half of the changes are among names and sizes at the end, where each byte matters most.
        least = data.draw(st.sampled_from([0, len(content) - 600]))
        at = data.draw(st.integers(least, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    bad = tmp_path / "bad.personal"
    bad.write_bytes(content)
    name = f"u{len(other_runtime.users(limit=100_000))}"
    before = home_contents(tmp_path / "elsewhere")
    try:
        imported = other_runtime.import_user(bad, as_user=name)
    except (PersonalFileError, InvalidId):
        assert home_contents(tmp_path / "elsewhere") == before
    else:
        assert (imported.original, imported.left_out) == ("ada", 0)
        assert other_runtime.user(name, create=False).summary().turns == imported.turns
