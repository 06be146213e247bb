"""A certificate states what was forgotten without its words. Anyone can check it without the home."""

from __future__ import annotations

import hashlib
import json
import stat
from datetime import timedelta
from pathlib import Path

import pytest
from runtime_makers import FakeTime, ask, correct, home_unchanged, open_runtime, quick_card, style

import personalpeft
from personalpeft import (
    Cancelled,
    Certificate,
    Damaged,
    InvalidInput,
    NotFound,
    Runtime,
    User,
    archive,
    verify_certificate,
)
from personalpeft.certificate import sign_statement
from personalpeft.store import user_export
from personalpeft.store.certificate_keys import CERTIFICATE_KEYS
from personalpeft.store.store import Store
from personalpeft.store.user_export import UserExport, read_user
from personalpeft.types import Message

SECRETS = ("Zorblax", "Quuxwell", "ビスケット", "4711-0815", "zorb-user", "divorce")


@pytest.fixture
def ada(runtime: Runtime) -> User:
    """A user whose id, facts, edits and skill all hold secrets, with live layers."""
    user = runtime.user("zorb-user")
    for number in range(5):
        user.feedback(ask(user, f"question {number}"), edit=style(f"Answer {number}."))
        user.teach(f"Write to {number} at {SECRETS[3]}.", f"Dear {number}", skill="divorce")
    return user


def teach_secret(user: User) -> str:
    """Give an edit with a secret, learn it, and return its id."""
    item = user.feedback(ask(user, f"Who is {SECRETS[1]}?"), edit=style(f"{SECRETS[0]} sleeps."))
    user.learn()
    return item


def certify(user: User, item: str, **options: object) -> Certificate:
    certificate = user.forget(item, certificate=True, **options).certificate  # type: ignore[arg-type]
    assert certificate is not None
    return certificate


def test_certificate_holds_no_word_of_what_was_forgotten(ada: User, runtime: Runtime) -> None:
    fact = f"My dog is {SECRETS[2]}."
    ada.remember(fact, questions=[f"{SECRETS[0]}?", "My dog?"], answer=SECRETS[2])
    first = certify(ada, teach_secret(ada))
    certificates = [first, certify(ada, "memory"), certify(ada, "skill.divorce")]
    certificates.append(certify(ada, ada.turns()[0].id, conversation=True))
    whole = runtime.forget_user(ada.id, certificate=True).certificate
    assert whole is not None
    for each in (*certificates, whole):
        text = (each.to_json() + each.to_markdown()).casefold()
        words = (*SECRETS, *(json.dumps(word)[1:-1] for word in SECRETS), "sleeps", "dog", "ahoy")
        assert [word for word in words if word.casefold() in text] == []


def test_statement_names_all_that_was_erased_and_what_is_live(ada: User, runtime: Runtime) -> None:
    item = teach_secret(ada)
    before = [entry.digest for entry in ada.stack().entries]
    report = ada.forget(item, certificate=True)
    assert report.certificate is not None
    statement = report.certificate.statement
    assert statement["request"]["kind"] == "item"
    assert [each["id"] for each in statement["items"]] == [item]
    assert statement["closure"]["signals"] == [item]
    assert len(statement["closure"]["revisions"]) == len(report.revisions)
    assert [each["digest"] for each in statement["revisions"]["before"]] == before
    after = [entry.digest for entry in ada.stack().entries]
    assert [each["digest"] for each in statement["revisions"]["after"]] == after
    assert set(statement["closure"]["revisions"]).isdisjoint(after)
    assert statement["equality"]["holds"] is True
    assert [each["digest"] for each in statement["equality"]["revisions"]] == after
    assert statement["base"] == runtime.base().digest
    assert statement["keys_destroyed"] == []
    with runtime._services.store.database.read_transaction() as db:
        (row,) = db.execute("select entries, chain from user").fetchall()
    assert statement["chain"] == {"entries": row[0], "head": row[1]}


def test_rebuilt_revisions_have_the_inputs_of_a_home_that_never_had_the_item(
    tmp_path: Path,
) -> None:
    inputs = []
    for with_secret in (True, False):
        with open_runtime(tmp_path / f"secret-{with_secret}") as runtime:
            ada = runtime.user("ada")
            for number in range(6):
                reply = ask(ada, f"question {number}")
                if number != 2:
                    ada.feedback(reply, edit=style(f"Answer {number}."))
                elif with_secret:
                    item = ada.feedback(reply, edit=style(SECRETS[0]))
            ada.learn()
            if with_secret:
                after = certify(ada, item).statement["equality"]["revisions"]
                inputs.append([each["inputs"] for each in after])
            else:
                inputs.append([each.inputs for each in ada.revisions()])
    assert inputs[0] == inputs[1]


def test_second_builds_of_the_live_revisions_are_stated_if_asked_for(ada: User) -> None:
    item = teach_secret(ada)
    correct(ada, 5, first=20)
    certificate = certify(ada, item, reproduce=True)
    equality = certificate.statement["equality"]
    live = {entry.digest for entry in ada.stack().entries}
    assert live
    assert {each["digest"] for each in equality["rebuilds"]} == live
    for each in equality["rebuilds"]:
        assert (each["outcome"], each["rebuilt"]) == ("equal", each["digest"])
    assert "built a second time: equal" in certificate.to_markdown()


def test_layer_from_elsewhere_is_not_claimed_to_be_free_of_the_item(
    tmp_path: Path, ada: User
) -> None:
    item = teach_secret(ada)
    ada.export_peft(tmp_path / "peft", layer="style")
    ada.import_peft(tmp_path / "peft", layer="skill.other")
    assert certify(ada, item).statement["equality"]["holds"] is False


@pytest.mark.parametrize("base", ["fake", pytest.param("torch", marks=pytest.mark.exhaustive)])
def test_exposure_is_measured_before_and_after(
    tmp_path: Path, base: str, request: pytest.FixtureRequest
) -> None:
    if base == "torch":
        request.getfixturevalue("tiny_base")
    with open_runtime(tmp_path / "home", "fake" if base == "fake" else quick_card(tmp_path)) as run:
        ada = run.user("ada")
        for number in range(5):
            ada.feedback(ask(ada, f"question {number}"), edit=style(f"Answer {number}."))
        stages: list[str] = []
        item = teach_secret(ada)
        statement = certify(ada, item, progress=lambda stage, done: stages.append(stage)).statement
    (result,) = statement["exposure"]["results"]
    assert result["item"] == item
    for side in (result["before"], result["after"]):
        assert 0 <= side["bits"] <= 6
        assert 1 <= side["rank"] <= 64
        assert 0 <= side["auc"] <= 1
    assert {"Matching", "Measuring before", "Measuring after"} <= set(stages)


def test_exposure_of_a_whole_user_is_measured_before_and_on_the_bare_base(
    ada: User, runtime: Runtime
) -> None:
    teach_secret(ada)
    items = {*(signal.id for signal in ada.signals()), *(turn.id for turn in ada.turns())}
    certificate = runtime.forget_user(ada.id, certificate=True).certificate
    assert certificate is not None
    exposure = certificate.statement["exposure"]
    assert 1 <= len(exposure["results"]) <= 4
    for result in exposure["results"]:
        assert result["item"] in items
        # The bare base has memorized nothing: all texts are as likely as it makes them.
        assert result["after"]["auc"] == 0.5
        assert result["before"]["rank"] >= 1


def test_exposure_is_not_measured_where_no_live_revision_saw_the_item(ada: User) -> None:
    ada.learn()
    item = ada.remember(f"My dog is {SECRETS[0]}.")
    exposure = certify(ada, item).statement["exposure"]
    assert exposure["results"] == []
    assert "no live revision" in exposure["not_measured"]


def test_cancelling_while_it_measures_erases_nothing(home: Path, ada: User) -> None:
    item = teach_secret(ada)
    ada.forget(ada.remember("Nothing."), certificate=True)
    seen: list[str] = []
    with home_unchanged(home), pytest.raises(Cancelled):
        ada.forget(
            item,
            certificate=True,
            progress=lambda stage, done: seen.append(stage),
            cancelled=lambda: "Measuring before" in seen,
        )


def test_what_remains_is_listed(tmp_path: Path, ada: User, runtime: Runtime) -> None:
    runtime.maintenance.back_up(tmp_path / "copies")
    mention = ask(ada, f"My dog is {SECRETS[0]}.")
    remains = certify(ada, ada.remember(f"My dog is {SECRETS[0]}.")).statement["remains"]
    assert remains["backups"] == [{"folder": str(tmp_path / "copies"), "copies": 1}]
    assert remains["mentions"] == [mention.turn_id]


def test_exports_and_bundles_are_listed_in_what_remains(
    tmp_path: Path, ada: User, runtime: Runtime
) -> None:
    item = teach_secret(ada)
    ada.export(tmp_path / "after.personal")
    ada.export_peft(tmp_path / "peft")
    ada.bundle_learn()
    with pytest.raises(InvalidInput):
        ada.export(tmp_path / "after.personal")
    certificate = certify(ada, item)
    exports = certificate.statement["remains"]["exports"]
    kinds = [each["kind"] for each in exports]
    assert kinds == ["personal", "peft", "learn_bundle"]
    digest = hashlib.sha256((tmp_path / "after.personal").read_bytes()).hexdigest()
    assert exports[0]["name"] not in (None, digest)
    assert digest not in certificate.to_json()
    assert "learn_bundle of 20" in certificate.to_markdown()
    # A digest could confirm a guess of what was in the file.
    exported = runtime._services.store.exports.of_user(ada.id)
    assert len(exported) == 3
    assert {each.digest for each in exported} == {None}
    whole = runtime.forget_user(ada.id, certificate=True).certificate
    assert whole is not None
    assert len(whole.statement["remains"]["exports"]) == 3


def test_export_is_listed_after_a_clock_was_set_back(tmp_path: Path) -> None:
    time = FakeTime()
    with open_runtime(tmp_path / "home", clock=time.clock()) as runtime:
        ada = runtime.user("ada")
        fact = ada.remember(f"My dog is {SECRETS[0]}.")
        time.at -= timedelta(hours=1)
        ada.export(tmp_path / "ada.personal")
        assert len(certify(ada, fact).statement["remains"]["exports"]) == 1


@pytest.mark.parametrize("form", ["personal", "learn_bundle"])
def test_export_that_read_the_item_before_it_was_forgotten_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    listed: list[str] = []
    with open_runtime(tmp_path / "home") as runtime:
        ada = runtime.user("ada")
        fact = ada.remember(f"My dog is {SECRETS[0]}.")

        def read_then_forget(store: Store, user: str) -> UserExport:
            export = read_user(store, user)
            with open_runtime(tmp_path / "home") as other:
                remains = certify(other.user(user), fact).statement["remains"]
            listed.extend(each["kind"] for each in remains["exports"])
            return export

        for module in (archive, user_export):
            monkeypatch.setattr(module, "read_user", read_then_forget)
        ada.export(tmp_path / "ada.personal") if form == "personal" else ada.bundle_learn()
    assert listed == [form]


def test_certificate_of_an_earlier_version_is_still_read(written: Path, tmp_path: Path) -> None:
    remains = dict(verify_certificate(written).statement["remains"])
    del remains["plugins"]
    remains["exports"] = "not recorded by the home"
    statement = {**verify_certificate(written).statement, "remains": remains}
    (tmp_path / "old.json").write_text(sign_statement(statement, b"k" * 32).to_json())
    assert "not recorded" in verify_certificate(tmp_path / "old.json").to_markdown()


def test_home_alone_can_tell_later_which_item_it_was(
    tmp_path: Path, home: Path, runtime: Runtime, ada: User
) -> None:
    text = f"My dog is {SECRETS[0]}."
    item = ada.remember(text)
    certificate = certify(ada, item)
    assert runtime.items_with_text(certificate, text) == (item,)
    assert runtime.items_with_text(certificate, f"My dog is {SECRETS[1]}.") == ()
    with open_runtime(tmp_path / "other") as other:
        with pytest.raises(InvalidInput):
            other.items_with_text(certificate, text)
        assert not (tmp_path / "other" / CERTIFICATE_KEYS).exists()
        certify(other.user("bo"), other.user("bo").remember(text))
        with pytest.raises(InvalidInput):
            other.items_with_text(certificate, text)
    assert stat.S_IMODE((home / CERTIFICATE_KEYS).stat().st_mode) == 0o600
    runtime.maintenance.back_up(tmp_path / "copies")
    runtime.close()
    personalpeft.restore(tmp_path / "copies", tmp_path / "again")
    with open_runtime(tmp_path / "again") as restored:
        assert restored.items_with_text(certificate, text) == (item,)


def test_each_text_of_an_erased_turn_is_known_later(runtime: Runtime, ada: User) -> None:
    texts = ["Be brief.", "My PIN is 4711.", "Noted.", "Thanks."]
    roles = ["system", "user", "assistant", "user"]
    reply = ada.chat([Message(*each) for each in zip(roles, texts, strict=True)], temperature=0)
    certificate = certify(ada, reply.turn_id)
    for text in (*texts, reply.text):
        assert runtime.items_with_text(certificate, text) == (reply.turn_id,)


def test_layer_with_too_few_lessons_left_is_certified_as_not_built_again(
    runtime: Runtime,
) -> None:
    bo = runtime.user("bo")
    items = correct(bo, 4)
    bo.learn(accept=True)
    forgotten = bo.forget(items[0], certificate=True)
    assert forgotten.certificate is not None
    assert forgotten.rebuilt == ()
    assert list(forgotten.not_rebuilt) == ["style"]
    statement = forgotten.certificate.statement
    assert (statement["rebuilt"], statement["not_rebuilt"]) == ([], ["style"])


def test_page_has_whole_paths_of_what_remains(tmp_path: Path, runtime: Runtime, ada: User) -> None:
    items = correct(ada, 4)
    ada.learn(accept=True)
    runtime.publish(to=tmp_path / "a folder with a rather long name of its own")
    certificate = certify(ada, items[0])
    (folder,) = certificate.statement["remains"]["published"]
    assert folder in certificate.to_markdown()


@pytest.fixture
def written(tmp_path: Path, ada: User) -> Path:
    path, page = certify(ada, ada.remember(f"I am {SECRETS[0]}.")).write(tmp_path / "erased")
    assert (path, page) == (tmp_path / "erased.json", tmp_path / "erased.md")
    return path


def test_certificate_is_verified_without_the_home(written: Path) -> None:
    certificate = verify_certificate(written)
    assert verify_certificate(written, key=certificate.public_key.upper()) == certificate
    assert certificate.public_key in written.with_suffix(".md").read_text()
    with pytest.raises(Damaged):
        verify_certificate(written, key="00" * 32)
    with pytest.raises(InvalidInput):
        verify_certificate(written, key="abc")
    with pytest.raises(NotFound):
        verify_certificate(written.with_name("none.json"))


def test_every_change_of_a_certificate_is_found(written: Path, tmp_path: Path) -> None:
    data = written.read_bytes()
    changed = tmp_path / "changed.json"
    want = verify_certificate(written)
    for place in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[place] ^= 1
        changed.write_bytes(flipped)
        try:
            found = verify_certificate(changed)
        except (Damaged, InvalidInput):
            continue
        # White space between the values is not signed.
        assert found == want


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "null", '{"statement": {}, "public_key": 1, "signature": 2}', "[" * 5000],
)
def test_other_files_are_no_certificates(tmp_path: Path, content: str) -> None:
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(InvalidInput):
        verify_certificate(tmp_path / "file.json")


@pytest.mark.parametrize(
    "change",
    [
        {"items": 1},
        {"items": [{"id": 1, "names": []}]},
        {"closure": {}},
        {"exposure": {"results": [{}], "unseen": "many"}},
        {"request": None},
        {"remains": {"backups": [1]}},
        {"revisions": {"before": [{"layer": 1}], "after": []}},
        {"chain": "\ud800"},
    ],
)
def test_signed_statement_without_the_keys_of_one_is_no_certificate(
    written: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    statement = {**verify_certificate(written).statement, **change}
    forged = tmp_path / "forged.json"
    try:
        forged.write_text(sign_statement(statement, b"k" * 32).to_json())
    except UnicodeEncodeError:
        forged.write_text(json.dumps({**json.loads(written.read_text()), "statement": statement}))
    with pytest.raises(InvalidInput):
        verify_certificate(forged)


def test_existing_file_is_not_overwritten(written: Path) -> None:
    with pytest.raises(InvalidInput):
        verify_certificate(written).write(written)


def test_damaged_keys_stop_a_forget_before_anything_is_erased(home: Path, ada: User) -> None:
    item = teach_secret(ada)
    (home / CERTIFICATE_KEYS).write_text("{}")
    with home_unchanged(home), pytest.raises(Damaged):
        ada.forget(item, certificate=True)
