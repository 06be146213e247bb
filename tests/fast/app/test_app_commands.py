"""What each command does, through the command line alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from app_makers import Place, lines

from personalpeft_app.cli import cli
from personalpeft_app.options import Command, Group
from personalpeft_app.reference import render

_REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "commands.md"


def test_the_reference_is_what_the_commands_say() -> None:
    assert _REFERENCE.read_text("utf-8") == render(), "run: make docs"


def test_every_command_is_in_the_reference_with_an_example() -> None:
    page = _REFERENCE.read_text("utf-8")
    for name, command in cli.commands.items():
        assert f"\n## personalpeft {name}\n" in page
        assert isinstance(command, Command | Group)
        assert command.examples, name
        assert all(f"personalpeft {name}" in example for example in command.examples)
        assert f"\n  {name} " in page.partition("## personalpeft ask")[0]


@pytest.mark.parametrize(
    "args", [["--help"], ["ask", "--help"], ["path"], ["completion", "zsh"]], ids=" ".join
)
def test_what_needs_no_home_loads_nothing_heavy(place: Place, args: list[str]) -> None:
    heavy = (
        "torch",
        "transformers",
        "numpy",
        "sqlite_utils",
        "rich",
        "flask",
        "textual",
        "personalpeft.runtime",
    )
    code = (
        "import sys\nfrom personalpeft_app.cli import main\ntry:\n    main()\n"
        f"finally:\n    print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    env = {**os.environ, **place.environment}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, *args],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr.strip() == "[]"


def test_looking_at_a_home_loads_no_model(learned: Place) -> None:
    code = (
        "import sys\nfrom personalpeft_app.cli import main\ntry:\n    main()\n"
        "finally:\n    print([n for n in ('torch', 'transformers', 'sentence_transformers') if n in sys.modules],"
        " file=sys.stderr)"
    )
    env = {**os.environ, **learned.environment}
    for args in (
        ["stack"],
        ["revisions"],
        ["turns"],
        ["why"],
        ["memory", "-q"],
        ["users"],
        ["verify", "-q"],
    ):
        program = [sys.executable, "-P", "-c", code, *args]
        ran = subprocess.run(program, env=env, capture_output=True, text=True, check=True)
        assert ran.stderr.strip() == "[]", args


def test_options_are_taken_before_and_after_the_command(place: Place) -> None:
    place.run("--user", "bob", "ask", "hello")
    place.run("ask", "hello", "--user", "eve")
    place.run("--user", "bob", "ask", "hello", "--user", "zoe")
    names = [user["id"] for user in json.loads(place.run("--json", "users").stdout)["users"]]
    assert names == ["bob", "eve", "zoe"]
    assert (
        json.loads(place.run("memory", "--user", "bob", "list", "--json").stdout)["user"] == "bob"
    )
    assert (
        json.loads(place.run("memory", "--json", "list", "--user", "bob").stdout)["user"] == "bob"
    )


def test_a_group_alone_shows_its_help(place: Place) -> None:
    result = place.run("bench")
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: ")
    assert "error:" not in result.stderr


def test_users_come_in_pages_that_say_when_there_are_more(place: Place) -> None:
    for name in ("bob", "ada", "eve"):
        place.run("remember", "My dog is called Biscuit.", "--user", name)
    first = place.run("users", "--limit", "2")
    assert [line.split()[0] for line in lines(first.stdout)] == ["USER", "ada", "bob"]
    assert "personalpeft users --after bob" in first.stderr
    told = [
        json.loads(place.run("users", "--limit", "2", "--after", each, "--json").stdout)
        for each in ("a", "bob")
    ]
    assert [[user["id"] for user in page["users"]] for page in told] == [["ada", "bob"], ["eve"]]
    assert [page["next"] for page in told] == ["bob", None]
    assert place.run("users", "--limit", "3").stderr == ""
    assert json.loads(place.run("users", "--after", "eve", "--json").stdout)["users"] == []


def test_gc_takes_away_what_nothing_needs(place: Place) -> None:
    place.run("remember", "My dog is called Biscuit.")
    half = place.home / "blobs" / "ab" / ".ab-1.part"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    would = json.loads(place.run("gc", "--dry-run", "--json").stdout)
    assert would == {"blobs": 0, "parts": 1, "sessions": 0, "bytes": 4, "dry_run": True}
    assert half.exists()
    assert json.loads(place.run("gc", "--json").stdout)["bytes"] == 4
    assert not half.exists()
    assert json.loads(place.run("gc", "--json").stdout)["bytes"] == 0
    assert place.run("gc", "--home", str(place.cache / "none")).exit_code == 7


@pytest.mark.parametrize(
    ("login", "known_as"),
    [("grace", "grace"), ("Grace Hopper", "me"), ("a..b", "me"), ("-x", "me")],
)
def test_without_a_name_one_is_known_by_the_login(place: Place, login: str, known_as: str) -> None:
    place.run("ask", "hello", PERSONALPEFT_USER="", LOGNAME=login)
    (user,) = json.loads(place.run("users", "--json").stdout)["users"]
    assert user["id"] == known_as


def test_home_can_be_named(place: Place, tmp_path: Path) -> None:
    other = tmp_path / "other"
    place.run("ask", "hello", "--home", str(other))
    assert (other / "personalpeft.db").exists()
    assert not place.home.exists()
    assert place.run("path", "--home", str(other)).stdout == f"{other}\n"


def test_what_is_said_of_feedback_is_what_becomes_of_it(place: Place) -> None:
    place.run("ask", "hello")
    uses = {
        ("--up",): ("layer", "pending", "liked"),
        ("--down",): ("kept", "unused", "too_few_thumbs"),
        ("--edit", "Ahoy!"): ("layer", "pending", "edit"),
        ("--prefer", "b"): ("kept", "unused", "stronger_signal"),
        ("--comment", "Be brief."): ("profile", "in_prompt", "comment_is_rule"),
        ("--reward", "0.2"): ("kept", "unused", "stronger_signal"),
    }
    for options, use in uses.items():
        status = json.loads(place.run("feedback", *options, "--json").stdout)["status"]
        assert (status["place"], status["use_code"], status["reason"]["code"]) == use
    assert "style" in place.run("feedback", "--edit", "Ahoy there!").stderr


def test_who_corrects_an_answer_that_judges_hears_that_this_one_does_too(taught: Place) -> None:
    assert taught.run("learn").exit_code == 0
    lessons = json.loads(taught.run("lessons", "--json").stdout)["lessons"]
    held = next(each["signal"] for each in lessons if each["use_code"] == "held_out")
    edit = taught.run("feedback", held["turn"], "--edit", "Something else.", "--json")
    status = json.loads(edit.stdout)["status"]
    assert (status["layer"], status["use_code"]) == ("style", "held_out")


def test_who_removes_what_was_learned_hears_when_it_is_gone(place: Place) -> None:
    facts = {
        animal: place.run(
            "remember",
            f"My {animal} is {name}.",
            "--question",
            f"Who is my {animal}?",
            "--answer",
            name,
        ).stdout.strip()
        for animal, name in (("dog", "Biscuit"), ("cat", "Momo"))
    }
    assert place.run("learn").exit_code == 0
    removed = json.loads(place.run("memory", "remove", facts["dog"], "--json").stdout)
    assert removed["layers_to_rebuild"] == ["memory"]
    (news,) = json.loads(place.run("stack", "--json").stdout)["pending"]
    assert (news["kind"], news["layer"]) == ("taken back", "memory")
    report = json.loads(place.run("learn", "--json").stdout)
    assert report["reasons"][0]["code"] == "lessons_retracted"
    told = {
        each["signal"]["id"]: each["use_code"]
        for each in json.loads(place.run("lessons", "--json").stdout)["lessons"]
    }
    assert told == {facts["cat"]: "learned"}
    place.run("memory", "remove", facts["cat"])
    report = json.loads(place.run("learn", "--json").stdout)
    assert report["outcome"] == "retracted"


def test_who_takes_feedback_back_hears_what_it_was_and_when_it_is_gone(taught: Place) -> None:
    assert taught.run("learn").exit_code == 0
    use = {
        each["signal"]["id"]: each["use_code"]
        for each in json.loads(taught.run("lessons", "--json").stdout)["lessons"]
    }
    held = next(signal for signal, of in use.items() if of == "held_out")
    result = taught.run("retract", held)
    assert (result.exit_code, result.stdout) == (0, f"{held}\n")
    assert f"edit {held}" in result.stderr
    first, second = [signal for signal, of in use.items() if of == "learned"][:2]
    result = taught.run("retract", first, second[:-1], "--json")
    assert [each["id"] for each in json.loads(result.stdout)["retracted"]] == [first, second]
    assert json.loads(result.stdout)["layers_to_rebuild"] == ["style"]
    third = next(
        signal for signal, of in use.items() if of == "learned" and signal not in (first, second)
    )
    assert "style" in taught.run("retract", third).stderr
    report = json.loads(taught.run("learn", "--json").stdout)
    assert report["reasons"][0] == {"code": "lessons_retracted", "data": {"count": 3}}


def test_who_takes_back_what_nothing_learned_is_not_told_of_what_was_taken_back_before(
    taught: Place,
) -> None:
    fact, other = (
        taught.run(
            "remember", f"I like {what}.", "--question", f"What of {what}?", "--answer", "Yes"
        ).stdout.strip()
        for what in ("figs", "plums")
    )
    taught.run("learn")
    taught.run("ask", "hello")
    down = taught.run("feedback", "--down").stdout.strip()
    layers = [
        json.loads(taught.run(*words, "--json").stdout)["layers_to_rebuild"]
        for words in (("retract", fact), ("retract", down), ("memory", "remove", other))
    ]
    assert layers == [["memory"], [], ["memory"]]


def test_each_kind_of_feedback_is_kept(place: Place) -> None:
    place.run("ask", "hello")
    for option in (
        ["--up"],
        ["--edit", "a"],
        ["--prefer", "b"],
        ["--comment", "c"],
        ["--reward", "0.5"],
    ):
        result = place.run("feedback", *option)
        assert result.exit_code == 0, result.output
        (signal,) = lines(result.stdout)
        assert signal.startswith("s_")
    assert place.run("feedback", "--edit", "-", stdin="from\nstdin\n").exit_code == 0
    (turn,) = json.loads(place.run("turns", "--json").stdout)["turns"]
    kinds = {signal["kind"]: signal["payload"] for signal in turn["signals"]}
    assert set(kinds) == {"rating", "edit", "preference", "comment", "reward"}
    assert kinds["edit"] == {"text": "from\nstdin"}


def test_feedback_can_name_a_turn_by_the_beginning_of_its_id(place: Place) -> None:
    first = json.loads(place.run("ask", "one", "--json").stdout)["turn_id"]
    place.run("ask", "two")
    told = json.loads(place.run("feedback", first[:-1], "--down", "--json").stdout)
    assert told["turn"] == first


def test_an_editor_edits_the_reply(place: Place, tmp_path: Path) -> None:
    place.run("ask", "hello")
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\necho "as it should be" > "$1"\n')
    editor.chmod(0o700)
    result = place.run("feedback", "--editor", EDITOR=str(editor), VISUAL="")
    assert result.exit_code == 0, result.output
    (turn,) = json.loads(place.run("turns", "--json").stdout)["turns"]
    assert turn["signals"][0]["payload"] == {"text": "as it should be"}
    unsaved = place.run("feedback", "--editor", EDITOR="true", VISUAL="")
    assert unsaved.exit_code == 2
    assert unsaved.stdout == ""


def test_facts_act_at_once_and_can_be_edited_and_removed(place: Place) -> None:
    place.run("remember", "My dog is called Biscuit.")
    (item,) = json.loads(place.run("memory", "--json").stdout)["items"]
    place.run("ask", "My dog is called what?")
    assert "Biscuit" in place.run("why").stdout
    new = place.run("memory", "edit", item["id"], "My dog is called Crumpet.").stdout.strip()
    assert "Crumpet" in place.run("memory", "list").stdout
    assert place.run("memory", "remove", new).exit_code == 0
    assert json.loads(place.run("memory", "--json").stdout)["items"] == []


def test_a_learn_is_reported_shown_weighed_and_taken_back(taught: Place) -> None:
    ask = ["ask", "something else", "-q"]
    before = taught.run(*ask).stdout
    dry_run = json.loads(taught.run("learn", "--dry-run", "--json").stdout)
    assert dry_run["outcome"] == "dry_run"
    assert taught.run(*ask).stdout == before

    report = json.loads(taught.run("learn", "--json").stdout)
    assert report["verdict"] == "promoted"
    after = taught.run(*ask).stdout
    assert after != before
    assert taught.run(*ask, "--bare").stdout == before
    assert report["revision"] in taught.run("stack").stdout
    assert report["reason"] in taught.run("stack").stdout
    assert lines(taught.run("revisions").stdout)[1].startswith("*")
    assert (
        report["revision"] in taught.run("why").stdout
        or report["revision"] in taught.run("revisions").stdout
    )

    assert taught.run("set-weight", "style", "0").stdout == "style 0\n"
    assert taught.run(*ask).stdout == before
    taught.run("set-weight", "style", "1")

    assert taught.run("rollback", "style").stdout == "base\n"
    assert taught.run(*ask).stdout == before
    (layer,) = json.loads(taught.run("stack", "--json").stdout)["layers"]
    assert layer["head"] is None
    assert taught.run("rollback", "style").stdout == f"{report['revision']}\n"
    assert taught.run(*ask).stdout == after
    assert taught.run("rollback", "style", "--to", "base").exit_code == 0
    assert taught.run("rollback", "style", "--to", report["revision"][:10]).exit_code == 0
    assert taught.run(*ask).stdout == after


def test_several_users_learn_in_one_go_and_what_one_cannot_do_is_said_in_their_report(
    taught: Place,
) -> None:
    for number in range(5):
        assert (
            taught.run("teach", f"question {number}", f"Ahoy {number}", "--user", "bob").exit_code
            == 0
        )
    assert taught.run("ask", "hi", "-q", "--user", "cy").exit_code == 0
    together = taught.run("learn", "--users", "bob", "--users", "cy", "--json")
    assert together.exit_code == 0
    reports = json.loads(together.stdout)
    assert [(each["user"], each["verdict"], each["error"]) for each in reports] == [
        ("ada", "promoted", ""),
        ("bob", "promoted", ""),
        ("cy", "abstained", "NothingToLearn"),
    ]
    assert "cy" in taught.run("learn", "--users", "cy").stdout


def test_all_users_of_a_home_learn_in_one_go_and_those_with_nothing_new_are_not_listed(
    taught: Place,
) -> None:
    assert taught.run("ask", "hi", "-q", "--user", "cy").exit_code == 0
    (report,) = json.loads(taught.run("learn", "--all", "--json").stdout)
    assert (report["user"], report["verdict"]) == ("ada", "promoted")
    again = taught.run("learn", "--all")
    assert (again.exit_code, again.stdout) == (0, "")
    assert again.stderr


def test_an_adapter_goes_out_and_comes_in(learned: Place, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert learned.run("export-peft", str(folder)).stdout == f"{folder}\n"
    assert (folder / "adapter_config.json").exists()
    again = learned.run("export-peft", str(folder))
    assert again.exit_code == 2
    taken = learned.run("import-peft", str(folder), "--user", "bob")
    assert taken.exit_code == 0, taken.output
    assert taken.stdout.strip() in learned.run("stack", "--user", "bob").stdout
    assert taken.stdout.strip() in learned.run("report", "--since", "24h", "--user", "bob").stdout
    assert (
        learned.run("ask", "hi", "-q").stdout
        == learned.run("ask", "hi", "-q", "--user", "bob").stdout
    )


def test_a_user_goes_out_in_one_file_and_comes_in_under_another_name(
    learned: Place, tmp_path: Path
) -> None:
    file = tmp_path / "ada.personal"
    assert learned.run("export", str(file)).stdout == f"{file}\n"
    assert learned.run("export", str(file)).exit_code == 2
    assert learned.run("import", str(file)).exit_code == 2
    taken = learned.run("import", str(file), "--as", "eve")
    assert (taken.exit_code, taken.stdout) == (0, "eve\n"), taken.output
    assert (
        learned.run("ask", "hi", "-q").stdout
        == learned.run("ask", "hi", "-q", "--user", "eve").stdout
    )
    words = tmp_path / "words.personal"
    assert learned.run("export", "--no-adapters", str(words)).exit_code == 0
    taken = learned.run("import", str(words), "--as", "fay")
    assert "personalpeft learn --user fay" in taken.stderr
    assert learned.run("learn", "--user", "fay").exit_code == 0


def test_what_is_forgotten_is_asked_for_first_and_then_gone(learned: Place) -> None:
    fact = learned.run("remember", "My dog is called Zorblax.").stdout.strip()
    unasked = learned.run("forget", fact)
    assert (unasked.exit_code, "--yes" in unasked.stderr) == (2, True)
    assert json.loads(learned.run("forget", fact, "--dry-run", "--json").stdout)["dry_run"]
    done = learned.run("forget", fact, "--yes")
    assert done.exit_code == 0, done.output
    again = learned.run("forget", fact, "--yes", "--json")
    assert json.loads(again.stderr)["error"]["kind"] == "Forgotten"
    assert json.loads(learned.run("forget", "last", "--yes", "--later", "--json").stdout)["turns"]


def test_a_chat_remembers_what_was_said_and_does_what_slashes_say(place: Place) -> None:
    said = [
        "hello",
        "/up",
        "/edit Ahoy!",
        "/prefer Ahoy there!",
        "/comment Be brief.",
        "/remember I live in Lisbon.",
        "and you?",
        "/why",
        "/learn",
        "/nwe",
        "/edit",
        "as it should be",
        "/prefer",
        "/new",
        "/up",
        "hello",
        "/help",
        "/quit",
        "never asked",
    ]
    result = place.run("chat", stdin="\n".join(said))
    assert result.exit_code == 0, result.output
    assert result.stderr.count("error: ") == 3
    assert all(name in result.stderr for name in ("/nwe", "new", "/prefer"))
    assert "style" in result.stdout
    newest, second, first = json.loads(place.run("turns", "--json").stdout)["turns"]
    assert len(newest["messages"]) == len(first["messages"]) == 1
    assert [message["content"] for message in second["messages"]] == [
        "hello",
        "Ahoy!",
        "and you?",
    ]
    assert {signal["kind"] for signal in first["signals"]} == {
        "rating",
        "edit",
        "preference",
        "comment",
    }
    assert second["signals"][0]["payload"] == {"text": "as it should be"}


def test_a_chat_in_json_prints_a_value_for_each_reply(place: Place) -> None:
    result = place.run("chat", "--json", stdin="hello\nyou\n")
    decoder, rest, replies = json.JSONDecoder(), result.stdout.strip(), []
    while rest:
        reply, end = decoder.raw_decode(rest)
        replies.append(reply["text"])
        rest = rest[end:].strip()
    assert len(replies) == 2


def test_a_chat_that_is_too_long_goes_on_without_its_beginning(place: Place) -> None:
    long = "x" * 1500
    result = place.run("chat", stdin=f"{long}\n{long}\n{long}\n{long}\n{'y' * 5000}\nend\n")
    assert result.exit_code == 0
    assert result.stderr.count("error: ") == 1
    assert len(json.loads(place.run("turns", "--json").stdout)["turns"]) == 5


def test_completion_scripts_name_the_program(place: Place) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_PERSONALPEFT_COMPLETE" in place.run("completion", shell).stdout


def test_the_demo_learns_compares_and_takes_back(place: Place) -> None:
    result = place.run("demo")
    assert result.exit_code == 0, result.output
    assert not place.home.exists()
    told = json.loads(place.run("demo", "--json").stdout)
    assert told["restored"] == 4
    assert told["report"]["verdict"] == "promoted"
    assert [move["cause"] for move in told["history"]][-1] == "rollback"
    assert told["answers"][0]["before"] != told["answers"][0]["after"]
    assert not Path(told["home"]).exists()


def test_the_demo_can_keep_its_home(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.cache.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place.cache))
    told = json.loads(place.run("demo", "--json", "--keep").stdout)
    kept = Path(told["home"])
    assert kept.parent == place.cache
    assert (kept / "personalpeft.db").exists()
    assert place.run("verify", "--home", str(kept)).exit_code == 0


@pytest.mark.exhaustive
def test_the_catalog_benchmark_measures_a_home_of_its_own(place: Place) -> None:
    told = json.loads(place.run("bench", "catalog", "--users", "200", "--json").stdout)
    assert told["bench"] == "catalog"
    assert told["users"] == 200
    assert told["collected"] > 0
    for key in (
        "open_seconds",
        "resolve_p50_ms",
        "resolve_p99_ms",
        "list_page_ms",
        "publish_per_second",
        "collect_seconds",
    ):
        assert told[key] > 0, key
    assert place.run("bench", "catalog", "--users", "100").stdout
    assert not place.home.exists()
    assert place.run("bench", "catalog", "--users", "1").exit_code == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["weigh", "style", "0.5"], ["set-weight", "style", "0.5"]),
        (["learn", "--also=bob", "--dry-run"], ["learn", "--users=bob", "--dry-run"]),
        (["token", "make", "--administration"], ["token", "make", "--admin"]),
    ],
)
def test_former_names_of_commands_and_options_work_for_one_release_and_warn(
    learned: Place, old: list[str], new: list[str]
) -> None:
    before, now = learned.run(*old), learned.run(*new)
    assert before.exit_code == now.exit_code
    assert len(before.stderr.splitlines()) == len(now.stderr.splitlines()) + 1
    assert len(before.stdout.splitlines()) == len(now.stdout.splitlines())
    assert old[0] not in learned.run("--help").stdout.split() or old[0] == new[0]
