"""A home that an earlier version wrote opens and works; see ``tests/data/README.md``."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from runtime_makers import FakeTime, ask, correct, open_runtime

from personalpeft import Runtime, User
from personalpeft.former_names import MOVE_CAUSES, ROLES, rename_report
from personalpeft.types import Stack
from personalpeft_app.cli import cli

ARCHIVE = Path(__file__).parents[2] / "data" / "home_before_layout.tar.xz"
USERS = (
    "ada",
    "ada-2",
    "bob",
    "cay",
    "dan",
    "eve",
    "fay",
    "gus",
    "hal",
    "ivy",
    "jan",
    "kim",
    "lee",
)
PROMPTS = ("hello", "question 1", "What is my dog called?")
REPORT = (
    *("user", "layer", "verdict", "reason", "at", "revision", "before", "probation", "steps"),
    *("accepted", "event", "dry_run"),
)


def entries(stack: Stack) -> list[Any]:
    return [[e.layer, e.revision, e.digest, e.weight] for e in stack.entries]


def report_values(report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: report.get(name) for name in REPORT},
        "sources": [[s["signal"], s["kind"], s["text"]] for s in report.get("sources", ())],
        "examples": [[e["prompt"], e["before"], e["after"]] for e in report.get("examples", ())],
    }


def describe(user: User, since: datetime, until: datetime) -> dict[str, Any]:
    """Return what the public surface returns for a user, under the names of ``expected.json``."""
    turns = user.turns()
    whys = [user.why(turn) for turn in turns]
    summary, digest, pending = user.summary(), user.activity_summary(since, until), user.pending()
    return {
        "summary": [
            summary.id,
            summary.since.isoformat(),
            summary.turns,
            summary.signals,
            summary.revisions,
        ],
        "turns": [
            {
                "id": t.id,
                "at": t.at.isoformat(),
                "messages": [m.to_list() for m in t.messages],
                "reply": t.reply,
                "stack": [t.stack.base, t.stack.digest, entries(t.stack)],
                "sampling": [
                    t.sampling.temperature,
                    t.sampling.top_p,
                    t.sampling.max_tokens,
                    t.sampling.seed,
                    list(t.sampling.stop),
                ],
                "usage": [t.usage.prompt_tokens, t.usage.completion_tokens],
                "finish_reason": t.finish_reason,
                "items": list(t.used),
            }
            for t in turns
        ],
        "signals": [
            {
                "id": s.id,
                "kind": str(s.kind),
                "at": s.at.isoformat(),
                "payload": dict(s.payload),
                "turn": s.turn,
                "source": s.source,
                "supersedes": s.supersedes,
            }
            for s in user.signals(current=False)
        ],
        "current": [s.id for s in user.signals()],
        "items": [[i.id, i.kind, i.text] for i in user.items()],
        "lessons": [
            [a.signal.id, a.layer, a.is_held_out, a.revision]
            for a in user.signal_statuses(current=False)
        ],
        "layers": [[x.name, x.position, x.head, x.weight, x.scope] for x in user.layers()],
        "stack": [user.stack().digest, entries(user.stack())],
        "revisions": [
            {
                "id": r.id,
                "digest": r.digest,
                "layer": r.layer,
                "base": r.base,
                "parent": r.parent,
                "below": [[e.layer, e.revision, e.digest, e.weight] for e in r.below],
                "inputs": r.inputs,
                "signals": dict(sorted(r.signals.items())),
                "verdict": str(r.verdict),
                "reason": r.reason,
                "probation": r.probation,
                "at": r.at.isoformat(),
            }
            for r in user.revisions()
        ],
        "moves": [[m.layer, m.before, m.after, m.cause, m.at.isoformat()] for m in user.history()],
        "reports": [report_values(report) for report in user.reports()],
        "why": [
            [
                why.turn.id,
                [[p.revision.id, p.weight, sorted(s.id for s in p.signals)] for p in why.parts],
                [s.id for s in why.items],
                list(why.forgotten),
            ]
            for why in whys
        ],
        "digest": [
            digest.turns,
            dict(digest.signals),
            len(digest.reports),
            len(digest.moves),
            dict(digest.live),
        ],
        "pending": [sorted([n.kind, n.layer] for n in pending.triggers), dict(pending.too_few)],
        "replies": [reply_without_items(user, prompt) for prompt in PROMPTS],
    }


def reply_without_items(user: User, prompt: str) -> str | None:
    """Return the reply, or None if its prompt had an item: their wording in prompts has changed."""
    reply = ask(user, prompt)
    return None if user.turn(reply).used else reply.text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the extracted archive. One runtime opens it for all tests of this file."""
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    return read


@pytest.fixture(scope="module")
def runtime(folder: Path, expected: dict[str, Any]) -> Iterator[Runtime]:
    time = FakeTime(datetime.fromisoformat(expected["until"]), drawn=1_000_000)
    with open_runtime(folder / "home", clock=time.clock()) as runtime:
        yield runtime


@pytest.fixture(params=USERS)
def user(request: pytest.FixtureRequest, runtime: Runtime) -> User:
    return runtime.user(request.param, create=False)


def test_home_has_no_damage(runtime: Runtime) -> None:
    assert runtime.verify() == ()


def test_home_can_be_read_without_a_migration(tmp_path: Path, expected: dict[str, Any]) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    before = (tmp_path / "home" / "personalpeft.db").read_bytes()
    with open_runtime(tmp_path / "home", read_only=True) as runtime:
        ids = [signal.id for signal in runtime.user("ada", create=False).signals(current=False)]
        assert ids == [signal["id"] for signal in expected["users"]["ada"]["signals"]]
    assert (tmp_path / "home" / "personalpeft.db").read_bytes() == before


def test_home_is_verified_and_copied_before_its_migration(tmp_path: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    home, copies = tmp_path / "home", tmp_path / "copies"
    before = (home / "personalpeft.db").read_bytes()
    common = ["--home", str(home), "--backend", "fake", "--json"]
    runner = CliRunner()
    verified = runner.invoke(cli, ["verify", *common])
    # A file that an erasure left, which opening for writing deletes.
    (problem,) = json.loads(verified.stdout)["problems"]
    assert problem["where"].startswith("blobs/"), verified.output
    copied = runner.invoke(cli, ["backup", str(copies), *common])
    assert copied.exit_code == 0, copied.output
    assert (home / "personalpeft.db").read_bytes() == before
    # What is forgotten later is listed beside the copy, which is a home of the earlier version.
    with open_runtime(home) as runtime:
        ada = runtime.user("ada", create=False)
        forgotten = ada.turns()[0].id
        ada.forget(forgotten, rebuild=False)
    assert forgotten in (copies / "forgotten.jsonl").read_text()
    with open_runtime(Path(json.loads(copied.stdout)["path"]), read_only=True) as copy:
        assert forgotten in [turn.id for turn in copy.user("ada", create=False).turns()]


def test_each_user_is_as_before(user: User, expected: dict[str, Any]) -> None:
    until = datetime.fromisoformat(expected["until"])
    found = json.loads(json.dumps(describe(user, datetime(2026, 1, 1, tzinfo=UTC), until)))
    wanted = _with_names_of_today(expected["users"][user.id])
    pairs = zip(found["replies"], wanted["replies"], strict=True)
    replies = [then if now is not None else None for now, then in pairs]
    assert found == {**wanted, "replies": replies}


def _with_names_of_today(wanted: dict[str, Any]) -> dict[str, Any]:
    revisions = [
        {
            **each,
            "signals": {signal: ROLES[role] for signal, role in each["signals"].items()},
        }
        for each in wanted["revisions"]
    ]
    return {
        **wanted,
        "revisions": revisions,
        "reports": [rename_report(each) for each in wanted["reports"]],
        "moves": [
            [*move, MOVE_CAUSES.get(cause, cause), at] for *move, cause, at in wanted["moves"]
        ],
    }


def test_no_former_name_is_left(user: User) -> None:
    for revision in user.revisions():
        assert not {"targets", "most_steps", "longest", "thumbs"} & revision.recipe.keys()
        assert not {"canaries", "bet", "pins", "sense"} & revision.scores.keys()
        assert set(revision.signals.values()) <= {"trained", "held_out"}


def test_api_keys_and_notes_are_there(runtime: Runtime, expected: dict[str, Any]) -> None:
    keys = [[key.id, key.user, key.worker] for key in runtime.api_keys.list_keys()]
    assert keys == expected["tokens"]
    assert runtime.maintenance.read_note("daemon") == expected["notes"]["daemon"]


def test_killed_erasure_is_finished(runtime: Runtime, folder: Path) -> None:
    named = {revision.digest for each in USERS for revision in runtime.user(each).revisions()}
    assert {path.name for path in (folder / "home" / "blobs").glob("*/*")} == named


def test_users_can_chat_learn_and_roll_back(runtime: Runtime) -> None:
    gus = runtime.user("gus")
    before = ask(gus, memory=False).text
    correct(gus, 6, first=100)
    report = gus.learn()
    assert report.live
    assert ask(gus, memory=False).text != before
    assert gus.rollback("style").after is None
    assert ask(gus, memory=False).text == before
    assert runtime.verify() == ()


def test_unfinished_learn_can_be_finished(runtime: Runtime) -> None:
    assert runtime.user("fay").learn().live


def test_forgetting_and_publishing_work(runtime: Runtime, folder: Path) -> None:
    cay = runtime.user("cay")
    trained = next(s for s, role in cay.revisions()[0].signals.items() if role == "trained")
    assert cay.forget(trained).revisions
    published = runtime.publish(["ada", "bob"], to=folder / "published")
    assert [each.name is None for each in published.stacks] == [False, True]
    assert runtime.verify() == ()


def test_forgetting_reaches_stacks_published_by_the_earlier_version(tmp_path: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = (tmp_path / "published").iterdir()
    note = tmp_path / "home" / "notes" / "published-ada.json"
    (record,) = json.loads(note.read_text()).values()
    note.write_text(json.dumps({str(folder): record}))
    with open_runtime(tmp_path / "home") as runtime:
        assert not note.exists()
        ada = runtime.user("ada", create=False)
        assert [path.name for path in folder.iterdir()] == [record["now"]]
        trained = next(s for s, role in ada.revisions()[0].signals.items() if role == "trained")
        assert ada.forget(trained, rebuild=False).revisions
        assert list(folder.iterdir()) == []
        assert runtime.verify() == ()


def test_personal_file_of_the_earlier_version_is_imported(runtime: Runtime, folder: Path) -> None:
    imported = runtime.import_user(folder / "ada.personal", as_user="ada-3")
    assert imported.user == "ada-3"
    ada, copy = runtime.user("ada-2"), runtime.user("ada-3")
    assert copy.stack() == ada.stack()
    assert [s.id for s in copy.signals(current=False)] == [s.id for s in ada.signals(current=False)]
    assert runtime.verify() == ()


def test_turns_of_the_earlier_version_are_in_conversations_that_can_continue(
    tmp_path: Path,
) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    with open_runtime(tmp_path / "home") as runtime:
        for name in USERS:
            user = runtime.user(name)
            listed = user.conversations()
            turns = {turn.id for turn in user.turns()}
            seen = [turn.id for each in listed for turn in user.conversation(each.id).turns]
            assert len(seen) == len(set(seen))
            assert set(seen) <= turns
            for each in listed[:1]:
                reply = user.chat("and then?", conversation_id=each.id, layers=[], max_tokens=8)
                assert user.turn(reply).previous == each.last_turn
                assert user.conversations()[0].id == each.id
