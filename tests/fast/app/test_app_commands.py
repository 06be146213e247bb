"""Each command's effect, through the command line alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from app_makers import Shell, lines

import personalpeft
from personalpeft_app.cli import cli
from personalpeft_app.options import Command, Group

_REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "commands.md"


def test_every_command_is_in_the_reference_with_an_example() -> None:
    page = _REFERENCE.read_text("utf-8")
    for name, command in cli.commands.items():
        assert f"\n## personalpeft {name}\n" in page
        assert isinstance(command, Command | Group)
        assert command.examples, name
        assert all(f"personalpeft {name}" in example for example in command.examples)
        assert f"\n  {name} " in page.partition("## personalpeft ask")[0]


def test_commands_without_a_home_import_nothing_heavy(shell: Shell) -> None:
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
    code = f"""if True:
        import sys
        from personalpeft_app.cli import main
        for args in ("--help", "ask --help", "path", "completion zsh"):
            sys.argv[1:] = args.split()
            try:
                main()
            except SystemExit as ended:
                assert not ended.code, args
            loaded = set({heavy}) & sys.modules.keys()
            assert not loaded, (args, loaded)
    """
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, **shell.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_reading_a_home_loads_no_model(learned: Shell) -> None:
    code = """if True:
        import sys
        from personalpeft_app.cli import cli
        for args in ("stack", "revisions", "turns", "why", "memory -q", "users", "verify -q"):
            try:
                cli.main(args.split())
            except SystemExit as ended:
                assert not ended.code, args
            loaded = {"torch", "transformers", "sentence_transformers"} & sys.modules.keys()
            assert not loaded, (args, loaded)
    """
    subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, **learned.environment},
        capture_output=True,
        check=True,
    )


def test_options_are_accepted_before_and_after_the_command(shell: Shell) -> None:
    shell.run("--user", "bob", "ask", "hello")
    shell.run("ask", "hello", "--user", "eve")
    shell.run("--user", "bob", "ask", "hello", "--user", "zoe")
    names = [user["id"] for user in json.loads(shell.run("--json", "users").stdout)["users"]]
    assert names == ["bob", "eve", "zoe"]
    assert (
        json.loads(shell.run("memory", "--user", "bob", "list", "--json").stdout)["user"] == "bob"
    )
    assert (
        json.loads(shell.run("memory", "--json", "list", "--user", "bob").stdout)["user"] == "bob"
    )


@pytest.mark.parametrize("arguments", [["-5", "-"], ["--", "-5", "-"]])
def test_standard_input_keeps_its_place_beside_a_negative_number(
    shell: Shell, arguments: list[str]
) -> None:
    assert shell.run("teach", *arguments, stdin="minus five").exit_code == 0
    with personalpeft.open(shell.home, backend="fake") as runtime:
        (signal,) = runtime.user("ada", create=False).signals()
    assert (signal.payload["prompt"], signal.payload["answer"]) == ("-5", "minus five")


def test_a_command_group_alone_shows_its_help(shell: Shell) -> None:
    result = shell.run("bench")
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: ")
    assert "error:" not in result.stderr


def test_users_are_listed_in_pages_with_a_continuation(shell: Shell) -> None:
    for name in ("bob", "ada", "eve"):
        shell.run("remember", "My dog is called Biscuit.", "--user", name)
    first = shell.run("users", "--limit", "2")
    assert [line.split()[0] for line in lines(first.stdout)] == ["USER", "ada", "bob"]
    assert "personalpeft users --after bob" in first.stderr
    output = [
        json.loads(shell.run("users", "--limit", "2", "--after", each, "--json").stdout)
        for each in ("a", "bob")
    ]
    assert [[user["id"] for user in page["users"]] for page in output] == [["ada", "bob"], ["eve"]]
    assert [page["next"] for page in output] == ["bob", None]
    assert shell.run("users", "--limit", "3").stderr == ""
    assert json.loads(shell.run("users", "--after", "eve", "--json").stdout)["users"] == []


def test_gc_deletes_unreferenced_files(shell: Shell) -> None:
    shell.run("remember", "My dog is called Biscuit.")
    half = shell.home / "blobs" / "ab" / ".ab-1.part"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    would = json.loads(shell.run("gc", "--dry-run", "--json").stdout)
    assert would == {
        "blobs": 0,
        "parts": 1,
        "sessions": 0,
        "bases": 0,
        "bytes": 4,
        "dry_run": True,
    }
    assert half.exists()
    assert json.loads(shell.run("gc", "--json").stdout)["bytes"] == 4
    assert not half.exists()
    assert json.loads(shell.run("gc", "--json").stdout)["bytes"] == 0
    assert shell.run("gc", "--home", str(shell.cache / "none")).exit_code == 7


def test_people_with_different_login_names_are_different_users(shell: Shell) -> None:
    logins = ["grace", "Grace Hopper", "Grace", "a..b", "-x", "李雷", "Müller", "DOMAIN\\grace"]
    for login in logins:
        for _ in range(2):
            shell.run("ask", "hello", PERSONALPEFT_USER="", LOGNAME=login)
    ids = [user["id"] for user in json.loads(shell.run("users", "--json").stdout)["users"]]
    assert len(set(ids)) == len(logins)
    assert "grace" in ids


def test_the_home_can_be_named(shell: Shell, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shell.run("ask", "hello", "--home", str(other))
    assert (other / "personalpeft.db").exists()
    assert not shell.home.exists()
    assert shell.run("path", "--home", str(other)).stdout == f"{other}\n"


def test_the_message_about_feedback_matches_its_later_use(shell: Shell) -> None:
    shell.run("ask", "hello")
    uses = {
        ("--up",): ("layer", "pending", "liked"),
        ("--down",): ("unused", "unused", "too_few_thumbs"),
        ("--edit", "Ahoy!"): ("layer", "pending", "edit"),
        ("--prefer", "b"): ("unused", "unused", "stronger_signal"),
        ("--comment", "Be brief."): ("rule", "in_prompt", "comment_is_rule"),
        ("--reward", "0.2"): ("unused", "unused", "stronger_signal"),
    }
    for options, use in uses.items():
        status = json.loads(shell.run("feedback", *options, "--json").stdout)["status"]
        assert (status["place"], status["use_code"], status["reason"]["code"]) == use
    assert "style" in shell.run("feedback", "--edit", "Ahoy there!").stderr


def test_correcting_a_holdout_answer_reports_the_holdout(corrected: Shell) -> None:
    assert corrected.run("learn").exit_code == 0
    lessons = json.loads(corrected.run("signals", "--json").stdout)["signals"]
    held = next(each["signal"] for each in lessons if each["use_code"] == "held_out")
    edit = corrected.run("feedback", held["turn"], "--edit", "Something else.", "--json")
    status = json.loads(edit.stdout)["status"]
    assert (status["layer"], status["use_code"]) == ("style", "held_out")


def test_removed_fact_is_gone_with_the_next_learn(shell: Shell) -> None:
    facts = {
        animal: shell.run(
            "remember",
            f"My {animal} is {name}.",
            "--question",
            f"Who is my {animal}?",
            "--answer",
            name,
        ).stdout.strip()
        for animal, name in (("dog", "Biscuit"), ("cat", "Momo"))
    }
    assert shell.run("learn").exit_code == 0
    removed = json.loads(shell.run("memory", "retract", facts["dog"], "--json").stdout)
    assert removed["retracted"] == facts["dog"]
    (trigger,) = json.loads(shell.run("stack", "--json").stdout)["pending"]
    assert (trigger["kind"], trigger["layer"]) == ("lessons_retracted", "memory")
    report = json.loads(shell.run("learn", "--json").stdout)
    assert report["reasons"][0]["code"] == "lessons_retracted"
    output = {
        each["signal"]["id"]: each["use_code"]
        for each in json.loads(shell.run("signals", "--json").stdout)["signals"]
    }
    assert output == {facts["cat"]: "learned"}
    shell.run("memory", "retract", facts["cat"])
    report = json.loads(shell.run("learn", "--json").stdout)
    assert report["outcome"] == "retracted"


def test_retracted_feedback_is_gone_with_the_next_learn(corrected: Shell) -> None:
    assert corrected.run("learn").exit_code == 0
    use = {
        each["signal"]["id"]: each["use_code"]
        for each in json.loads(corrected.run("signals", "--json").stdout)["signals"]
    }
    held = next(signal for signal, of in use.items() if of == "held_out")
    result = corrected.run("retract", held)
    assert (result.exit_code, result.stdout) == (0, f"{held}\n")
    assert f"edit {held}" in result.stderr
    first, second = [signal for signal, of in use.items() if of == "learned"][:2]
    result = corrected.run("retract", first, second[:-1], "--json")
    assert [each["id"] for each in json.loads(result.stdout)["retracted"]] == [first, second]
    report = json.loads(corrected.run("learn", "--json").stdout)
    assert report["reasons"][0] == {"code": "lessons_retracted", "data": {"count": 2}}


def test_each_kind_of_feedback_is_recorded(shell: Shell) -> None:
    shell.run("ask", "hello")
    for option in (
        ["--up"],
        ["--edit", "a"],
        ["--prefer", "b"],
        ["--comment", "c"],
        ["--reward", "0.5"],
    ):
        result = shell.run("feedback", *option)
        assert result.exit_code == 0, result.output
        (signal,) = lines(result.stdout)
        assert signal.startswith("s_")
    assert shell.run("feedback", "--edit", "-", stdin="from\nstdin\n").exit_code == 0
    (turn,) = json.loads(shell.run("turns", "--json").stdout)["turns"]
    kinds = {signal["kind"]: signal["payload"] for signal in turn["signals"]}
    assert set(kinds) == {"rating", "edit", "preference", "comment", "reward"}
    assert kinds["edit"] == {"text": "from\nstdin"}


def test_feedback_accepts_the_beginning_of_a_turn_id(shell: Shell) -> None:
    first = json.loads(shell.run("ask", "one", "--json").stdout)["turn_id"]
    shell.run("ask", "two")
    output = json.loads(shell.run("feedback", first[:-1], "--down", "--json").stdout)
    assert output["turn"] == first


def test_an_editor_edits_the_reply(shell: Shell, tmp_path: Path) -> None:
    shell.run("ask", "hello")
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\necho "as it should be" > "$1"\n')
    editor.chmod(0o700)
    result = shell.run("feedback", "--editor", EDITOR=str(editor), VISUAL="")
    assert result.exit_code == 0, result.output
    (turn,) = json.loads(shell.run("turns", "--json").stdout)["turns"]
    assert turn["signals"][0]["payload"] == {"text": "as it should be"}
    unsaved = shell.run("feedback", "--editor", EDITOR="true", VISUAL="")
    assert unsaved.exit_code == 2
    assert unsaved.stdout == ""


def test_facts_take_effect_at_once_and_can_be_edited_and_removed(shell: Shell) -> None:
    shell.run("remember", "My dog is called Biscuit.")
    (item,) = json.loads(shell.run("memory", "--json").stdout)["items"]
    shell.run("ask", "My dog is called what?")
    assert "Biscuit" in shell.run("why").stdout
    new = shell.run("memory", "edit", item["id"], "My dog is called Crumpet.").stdout.strip()
    assert "Crumpet" in shell.run("memory", "list").stdout
    assert shell.run("memory", "retract", new).exit_code == 0
    assert json.loads(shell.run("memory", "--json").stdout)["items"] == []


def test_a_learn_is_reported_listed_weighted_and_rolled_back(corrected: Shell) -> None:
    ask = ["ask", "something else", "-q"]
    before = corrected.run(*ask).stdout
    dry_run = json.loads(corrected.run("learn", "--dry-run", "--json").stdout)
    assert dry_run["outcome"] == "dry_run"
    assert corrected.run(*ask).stdout == before

    report = json.loads(corrected.run("learn", "--json").stdout)
    assert report["verdict"] == "promoted"
    after = corrected.run(*ask).stdout
    assert after != before
    assert corrected.run(*ask, "--bare").stdout == before
    assert report["revision"] in corrected.run("stack").stdout
    assert report["reason"] in corrected.run("stack").stdout
    assert lines(corrected.run("revisions").stdout)[1].startswith("*")
    assert (
        report["revision"] in corrected.run("why").stdout
        or report["revision"] in corrected.run("revisions").stdout
    )

    assert corrected.run("set-weight", "style", "0").stdout == "style 0\n"
    assert corrected.run(*ask).stdout == before
    corrected.run("set-weight", "style", "1")

    assert corrected.run("rollback", "style").stdout == "base\n"
    assert corrected.run(*ask).stdout == before
    (layer,) = json.loads(corrected.run("stack", "--json").stdout)["layers"]
    assert layer["head"] is None
    assert corrected.run("rollback", "style").stdout == f"{report['revision']}\n"
    assert corrected.run(*ask).stdout == after
    assert corrected.run("rollback", "style", "--to", "base").exit_code == 0
    assert corrected.run("rollback", "style", "--to", report["revision"][:10]).exit_code == 0
    assert corrected.run(*ask).stdout == after


def test_several_users_learn_in_one_command_and_errors_stay_in_their_reports(
    corrected: Shell,
) -> None:
    for number in range(5):
        assert (
            corrected.run(
                "teach", f"question {number}", f"Ahoy {number}", "--user", "bob"
            ).exit_code
            == 0
        )
    assert corrected.run("ask", "hi", "-q", "--user", "cy").exit_code == 0
    together = corrected.run("learn", "--users", "bob", "--users", "cy", "--json")
    assert together.exit_code == 0
    reports = json.loads(together.stdout)
    assert [(each["user"], each["verdict"], each["error"]) for each in reports] == [
        ("ada", "promoted", ""),
        ("bob", "promoted", ""),
        ("cy", None, "NothingToLearn"),
    ]
    assert "cy" in corrected.run("learn", "--users", "cy").stdout


def test_all_users_of_a_home_learn_and_users_without_new_feedback_are_not_listed(
    corrected: Shell,
) -> None:
    assert corrected.run("ask", "hi", "-q", "--user", "cy").exit_code == 0
    (report,) = json.loads(corrected.run("learn", "--all", "--json").stdout)
    assert (report["user"], report["verdict"]) == ("ada", "promoted")
    again = corrected.run("learn", "--all")
    assert (again.exit_code, again.stdout) == (0, "")
    assert again.stderr


def test_an_adapter_is_exported_and_imported(learned: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert learned.run("export-peft", str(folder)).stdout == f"{folder}\n"
    assert (folder / "adapter_config.json").exists()
    again = learned.run("export-peft", str(folder))
    assert again.exit_code == 2
    taken = learned.run("import-peft", str(folder), "--user", "bob")
    assert taken.exit_code == 0, taken.output
    assert taken.stdout.strip() in learned.run("stack", "--user", "bob").stdout
    assert taken.stdout.strip() in learned.run("activity", "--since", "24h", "--user", "bob").stdout
    assert (
        learned.run("ask", "hi", "-q").stdout
        == learned.run("ask", "hi", "-q", "--user", "bob").stdout
    )


def test_a_user_archive_is_imported_under_another_name(learned: Shell, tmp_path: Path) -> None:
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


def test_erasure_asks_for_confirmation_first(learned: Shell) -> None:
    fact = learned.run("remember", "My dog is called Zorblax.").stdout.strip()
    unasked = learned.run("forget", fact)
    assert (unasked.exit_code, "--yes" in unasked.stderr) == (2, True)
    assert json.loads(learned.run("forget", fact, "--dry-run", "--json").stdout)["dry_run"]
    done = learned.run("forget", fact, "--yes")
    assert done.exit_code == 0, done.output
    again = learned.run("forget", fact, "--yes", "--json")
    assert json.loads(again.stderr)["error"]["kind"] == "Forgotten"
    assert json.loads(learned.run("forget", "last", "--yes", "--later", "--json").stdout)["turns"]
    whole = learned.run("forget", "last", "--conversation", "--yes", "--later", "--json")
    assert json.loads(whole.stdout)["turns"]
    layer = json.loads(learned.run("forget", "style", "--yes", "--json").stdout)
    assert (layer["item"], layer["rebuilt"]) == ("style", [])


def test_a_user_is_erased_only_after_confirmation(learned: Shell) -> None:
    unconfirmed = learned.run("forget-user", "ada")
    assert (unconfirmed.exit_code, "--yes" in unconfirmed.stderr) == (2, True)
    dry = json.loads(learned.run("forget-user", "ada", "--dry-run", "--json").stdout)
    assert (dry["dry_run"], dry["signals"] > 0) == (True, True)
    done = json.loads(learned.run("forget-user", "ada", "--yes", "--json").stdout)
    assert (done["dry_run"], done["signals"]) == (False, dry["signals"])
    assert json.loads(learned.run("users", "--json").stdout)["users"] == []
    assert learned.run("forget-user", "ada", "--yes").exit_code == 3


def test_a_chat_keeps_its_context_and_runs_slash_commands(shell: Shell) -> None:
    transcript = [
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
    result = shell.run("chat", stdin="\n".join(transcript))
    assert result.exit_code == 0, result.output
    assert result.stderr.count("error: ") == 3
    assert all(name in result.stderr for name in ("/nwe", "new", "/prefer"))
    assert "style" in result.stdout
    newest, second, first = json.loads(shell.run("turns", "--json").stdout)["turns"]
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


def test_a_json_chat_prints_a_value_for_each_reply(shell: Shell) -> None:
    result = shell.run("chat", "--json", stdin="hello\nyou\n")
    decoder, rest, replies = json.JSONDecoder(), result.stdout.strip(), []
    while rest:
        reply, end = decoder.raw_decode(rest)
        replies.append(reply["text"])
        rest = rest[end:].strip()
    assert len(replies) == 2


def test_a_chat_beyond_the_context_continues_without_its_beginning(shell: Shell) -> None:
    long = "x" * 1500
    result = shell.run("chat", stdin=f"{long}\n{long}\n{long}\n{long}\n{'y' * 5000}\nend\n")
    assert result.exit_code == 0
    assert result.stderr.count("error: ") == 1
    assert len(json.loads(shell.run("turns", "--json").stdout)["turns"]) == 5


def test_completion_scripts_name_the_program(shell: Shell) -> None:
    for name in ("bash", "zsh", "fish"):
        assert "_PERSONALPEFT_COMPLETE" in shell.run("completion", name).stdout


def test_the_demo_learns_compares_and_rolls_back(shell: Shell) -> None:
    result = shell.run("demo")
    assert result.exit_code == 0, result.output
    assert not shell.home.exists()
    output = json.loads(shell.run("demo", "--json").stdout)
    assert output["restored"] == 4
    assert output["report"]["verdict"] == "promoted"
    assert [move["cause"] for move in output["history"]][-1] == "rollback"
    assert output["answers"][0]["before"] != output["answers"][0]["after"]
    assert not Path(output["home"]).exists()


def test_the_demo_can_keep_its_home(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.cache.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(shell.cache))
    output = json.loads(shell.run("demo", "--json", "--keep").stdout)
    path = Path(output["home"])
    assert path.parent == shell.cache
    assert (path / "personalpeft.db").exists()
    assert shell.run("verify", "--home", str(path)).exit_code == 0


@pytest.mark.exhaustive
def test_the_catalog_benchmark_measures_a_home_of_its_own(shell: Shell) -> None:
    output = json.loads(shell.run("bench", "catalog", "--users", "200", "--json").stdout)
    assert output["bench"] == "catalog"
    assert output["users"] == 200
    assert output["collected"] > 0
    for key in (
        "open_seconds",
        "resolve_p50_ms",
        "resolve_p99_ms",
        "list_page_ms",
        "publish_per_second",
        "collect_seconds",
    ):
        assert output[key] > 0, key
    assert shell.run("bench", "catalog", "--users", "100").stdout
    assert not shell.home.exists()
    assert shell.run("bench", "catalog", "--users", "1").exit_code == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["weigh", "style", "0.5"], ["set-weight", "style", "0.5"]),
        (["learn", "--also=bob", "--dry-run"], ["learn", "--users=bob", "--dry-run"]),
        (["lessons"], ["signals"]),
        (["report"], ["activity"]),
        (["memory", "remove", "last"], ["memory", "retract", "last"]),
        (["api-key", "make", "--administration"], ["api-key", "make", "--admin"]),
        (["token"], ["api-key"]),
    ],
)
def test_former_names_of_commands_and_options_work_for_one_release_and_warn(
    learned: Shell, old: list[str], new: list[str]
) -> None:
    before, now = learned.run(*old), learned.run(*new)
    assert before.exit_code == now.exit_code
    assert len(before.stderr.splitlines()) == len(now.stderr.splitlines()) + 1
    assert len(before.stdout.splitlines()) == len(now.stdout.splitlines())
    assert old[0] not in learned.run("--help").stdout.split() or old[0] == new[0]


def test_a_certificate_is_written_and_checked(learned: Shell, tmp_path: Path) -> None:
    text = "My dog is called Zorblax."
    fact = learned.run("remember", text).stdout.strip()
    file = tmp_path / "erased.json"
    dry = learned.run("forget", fact, "--dry-run", "--certificate", str(file))
    assert dry.exit_code == 2
    done = learned.run("forget", fact, "--yes", "--certificate", str(file))
    assert done.exit_code == 0, done.output
    assert "Zorblax" not in file.read_text() + file.with_suffix(".md").read_text()
    shown = learned.run("verify-certificate", str(file), "--text", text)
    assert shown.stdout == file.with_suffix(".md").read_text()
    assert fact in shown.stderr
    checked = json.loads(learned.run("verify-certificate", str(file), "--json").stdout)
    assert (checked["valid"], checked["statement"]["items"][0]["id"]) == (True, fact)
    again = learned.run("forget", "last", "--yes", "--certificate", str(file))
    assert (again.exit_code, "exists" in again.stderr) == (2, True)
    file.write_text(file.read_text().replace(fact, "s_other"))
    assert learned.run("verify-certificate", str(file)).exit_code == 8
    whole = learned.run("forget-user", "ada", "--yes", "--certificate", str(tmp_path / "user"))
    assert whole.exit_code == 0, whole.output
    assert learned.run("verify-certificate", str(tmp_path / "user.json")).exit_code == 0


def test_a_negative_weight_needs_no_separator(learned: Shell) -> None:
    assert learned.run("set-weight", "style", "-1", "--json").exit_code == 0
    layers = json.loads(learned.run("stack", "--json").stdout)["layers"]
    assert [layer["weight"] for layer in layers] == [-1]
