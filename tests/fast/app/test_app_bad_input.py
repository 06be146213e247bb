"""Bad input gives a message with a way out, its exit code, no traceback, and no change."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from app_makers import Shell, lines

from personalpeft.base_models.types import Base

_LOOK_ALIKE = "\u0430da"  # Its first letter is Cyrillic.


@pytest.mark.parametrize(
    ("args", "code", "phrase"),
    [
        (["ask", ""], 2, "prompt"),
        (["ask", " \n\u200b"], 2, "prompt"),
        (["ask", "x" * 100_001], 2, "100001"),
        (["ask", "x" * 5000], 2, "4096 of fake"),
        (["ask", "hi", "--layer", "stile"], 2, "layer"),
        (["ask", "hi", "--layer", "skill.email"], 3, "has no layer skill.email"),
        (["ask", "hi", "--temperature", "11"], 2, "11"),
        (["ask", "hi", "--max-tokens", "0"], 2, "0"),
        (["ask", "hi", "--bare", "--layer", "style"], 2, "--bare"),
        (["ask", "hi", "--user", "../ada"], 2, "user id"),
        (["ask", "hi", "--user", "Ada Lovelace"], 2, "'ada-lovelace'"),
        (["ask", "hi", "--user", "a..b"], 2, "user id"),
        (["ask", "hi", "--user", "a/b"], 2, "user id"),
        (["ask", "hi", "--user", _LOOK_ALIKE], 2, "\\u0430da"),
        (["ask", "hi", "--user", "a" * 300], 2, "user id"),
        (["ask", "hi", "--user", ""], 2, "user id"),
        (["ask", "hi", "--backend", "torsch"], 3, "'torch'"),
        (["feedback"], 2, "--up"),
        (["feedback", "--up", "--edit", "x"], 2, "--up"),
        (["feedback", "--up", "--down"], 2, "--down"),
        (["feedback", "--edit", ""], 2, "edit"),
        (["feedback", "--reward", "3"], 2, "3"),
        (["feedback", "t_nothing", "--up"], 3, "t_0"),
        (["feedback", "--up", "--user", "adda"], 3, "'ada'"),
        (["feedback", "--edit", "x", "--editor"], 2, "--editor"),
        (["feedback", "--edit", "--up"], 2, "--edit=--up"),
        (["feedback", "--edit", "-q"], 2, "--edit=-q"),
        (["feedback", "--comment", "--short"], 2, "--comment=--short"),
        (["ask", "how", "do", "I"], 2, "quotation marks"),
        (["learn", "style"], 2, "--layer style"),
        (["rollback", "style@1"], 2, "--to style@1"),
        (["set-weight", "style", "-3"], 2, "-2"),
        (["api-key", "make", "--user", "ada", "--worker"], 2, "--user"),
        (["ask", "hi", "--temp", "1"], 2, "--temperature"),
        (["teach", "", "answer"], 2, "prompt"),
        (["teach", "prompt", ""], 2, "answer"),
        (["teach", "prompt", "answer", "--skill", "../x"], 2, "skill.../x"),
        (["teach", "-", "-"], 2, "stdin"),
        (["remember", ""], 2, "fact"),
        (["remember", "x" * 2001], 2, "2001"),
        (["remember", "x", "--answer", "y"], 2, "--question"),
        (["learn"], 4, "style"),
        (["learn", "--layer", "stile"], 2, "layer"),
        (["learn", "--layer", "memory"], 4, "memory"),
        (["learn", "--seconds", "0"], 2, "seconds"),
        (["learn", "--seconds", "nan"], 2, "seconds"),
        (["learn", "--user", "adda"], 3, "'ada'"),
        (["learn", "--steps", "0"], 2, "steps"),
        (["learn", "--users", "Bo!"], 2, "Bo!"),
        (["rollback", "stil"], 3, "'style'"),
        (["rollback", "style", "--to", "style@nope"], 3, "style@"),
        (["set-weight", "style", "3"], 2, "2"),
        (["set-weight", "style", "nan"], 2, "2"),
        (["set-weight", "stil", "1"], 3, "'style'"),
        (["why", "t_nothing"], 3, "t_0"),
        (["revisions", "--layer", "stil"], 3, "'style'"),
        (["memory", "edit", "s_nothing", "text"], 3, "s_nothing"),
        (["memory", "retract", "s_nothing"], 3, "s_nothing"),
        (["retract", "s_nothing"], 3, "s_nothing"),
        (["retract"], 2, "ID..."),
        (["turns", "-n", "0"], 2, "0"),
        (["turns", "--user", "adda"], 3, "'ada'"),
        (["users", "--limit", "0"], 2, "0"),
        (["users", "--after", "../ada"], 2, "user id"),
        (["export", "/proc/version/x"], 2, "/proc/version"),
        (["export-peft", "/proc/version/x"], None, "/proc/version"),
        (["import", "/nowhere/at/all"], 2, "/nowhere/at/all"),
        (["import-peft", "/nowhere/at/all"], 2, "/nowhere/at/all"),
        (["forget", "s_nothing", "--yes"], 3, "s_nothing"),
        (["forget", "s_nothing"], 3, "s_nothing"),
        (["forget-user", "nobody"], 3, "nobody"),
        (["export", "/"], 2, "folder"),
        (["forget", "style@1", "--yes"], 2, "style@1"),
        (["path", "hoem"], 2, "hoem"),
        (["sack"], 2, "'stack'"),
        (["memory", "lsit"], 2, "'list'"),
        (["stack", "--jsn"], 2, "--json"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_input_is_reported_and_changes_nothing(
    learned: Shell, args: list[str], code: int | None, phrase: str
) -> None:
    before = learned.snapshot()
    result = learned.run(*args)
    assert phrase in result.stderr
    assert "error: " in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert result.exit_code == code if code is not None else result.exit_code not in (0, 70)
    assert learned.snapshot() == before
    error = json.loads(learned.run(*args, "--json").stderr)["error"]
    assert (error["exit_code"], error["kind"] != "Bug") == (result.exit_code, True)
    assert phrase in error["message"] + error["hint"]


def test_a_mistyped_turn_id_suggests_the_nearest(corrected: Shell) -> None:
    turn = json.loads(corrected.run("turns", "--json").stdout)["turns"][2]["id"]
    result = corrected.run("feedback", turn[:-1] + "u", "--up")
    assert result.exit_code == 3
    assert turn in result.stderr


def test_options_are_texts_only_after_an_equals_sign(corrected: Shell) -> None:
    assert corrected.run("feedback", "--comment=--short").exit_code == 0
    assert json.loads(corrected.run("memory", "--json").stdout)["items"][0]["text"] == "--short"


def test_the_variable_of_an_invalid_user_is_named(shell: Shell) -> None:
    result = shell.run("remember", "x", PERSONALPEFT_USER="Ada")
    assert result.exit_code == 2
    assert "PERSONALPEFT_USER" in result.stderr
    assert not shell.home.exists()


@pytest.mark.parametrize("table", ["[gate]\n", "[demon]\n", "[daemon]\nidel = 1\n"])
def test_doctor_reports_unknown_settings(shell: Shell, table: str) -> None:
    shell.run("ask", "hello")
    (shell.home / "config.toml").write_text(table)
    result = shell.run("doctor", "--json")
    wrong = [check["name"] for check in json.loads(result.stdout)["checks"] if not check["ok"]]
    assert (result.exit_code, wrong) == (2, ["config.toml"])
    assert shell.run("daemon", "run-once").exit_code == 2


def test_last_names_the_newest_feedback_and_the_newest_item(shell: Shell) -> None:
    first, second = (
        lines(shell.run("remember", text).stdout)[0] for text in ("I like tea.", "I have a dog.")
    )
    shell.run("ask", "hello")
    thumb = lines(shell.run("feedback", "--up").stdout)[0]
    assert (
        json.loads(shell.run("memory", "retract", "last", "--json").stdout)["retracted"] == second
    )
    assert lines(shell.run("retract", "last").stdout) == [thumb]
    assert shell.run("memory", "edit", "last", "I like coffee.").exit_code == 0
    assert first not in shell.run("memory").stdout


def test_a_full_disk_behind_stdout_is_no_bug(corrected: Shell) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full")
    with full.open("wb") as stdout:
        ran = subprocess.run(
            [sys.executable, "-c", "from personalpeft_app.cli import main; main()", "turns"],
            env={**os.environ, **corrected.environment},
            stdout=stdout,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (ran.returncode, b"Traceback" in ran.stderr) == (7, False)


def test_an_unchanged_edit_is_refused(corrected: Shell) -> None:
    reply = json.loads(corrected.run("turns", "--json").stdout)["turns"][0]["reply"]
    before = corrected.snapshot()
    result = corrected.run("feedback", "--edit", f"  {reply}\n")
    assert result.exit_code == 2
    assert corrected.snapshot() == before


def test_repeated_feedback_is_kept_but_counts_once(shell: Shell) -> None:
    shell.run("ask", "hello")
    shell.run("feedback", "--up")
    shell.run("feedback", "--down")
    (turn,) = json.loads(shell.run("turns", "--json").stdout)["turns"]
    assert [signal["payload"] for signal in turn["signals"]] == [{"value": -1}]
    assert json.loads(shell.run("users", "--json").stdout)["users"][0]["signals"] == 2


@pytest.mark.parametrize(
    "args",
    [
        ["stack"],
        ["revisions"],
        ["turns"],
        ["why"],
        ["memory"],
        ["users"],
        ["verify"],
        ["feedback", "--up"],
        ["learn"],
        ["rollback", "style"],
        ["set-weight", "style", "1"],
        ["memory", "retract", "s_x"],
        ["retract", "s_x"],
        ["export", "x"],
        ["export-peft", "x"],
        ["forget", "s_x", "--yes"],
        ["ask", ""],
        ["ask", "hi", "--user", "../x"],
        ["teach", "", "x"],
        ["remember", ""],
    ],
    ids=" ".join,
)
def test_a_command_with_nothing_to_store_creates_no_home(shell: Shell, args: list[str]) -> None:
    result = shell.run(*args)
    assert result.exit_code in (2, 7)
    assert "error: " in result.stderr
    assert not shell.home.exists()


@pytest.mark.parametrize(
    "args", [["doctor"], ["models"], ["path"], ["completion", "fish"]], ids=" ".join
)
def test_a_command_that_needs_no_home_creates_none(shell: Shell, args: list[str]) -> None:
    assert shell.run(*args).exit_code == 0
    assert not shell.home.exists()


@pytest.mark.parametrize(
    "args", [["stack"], ["turns"], ["feedback", "--up"], ["learn"]], ids=" ".join
)
def test_reading_commands_create_no_user(learned: Shell, args: list[str]) -> None:
    before = learned.snapshot()
    assert learned.run(*args, "--user", "bob").exit_code == 3
    assert learned.snapshot() == before


def test_a_home_of_a_newer_version_is_left_unchanged(learned: Shell) -> None:
    database = learned.home / "personalpeft.db"
    with sqlite3.connect(database) as db:
        db.execute("pragma user_version=99")
    db.close()
    for args in (["turns"], ["ask", "hello"], ["verify"]):
        result = learned.run(*args)
        assert result.exit_code == 7
        assert "hint:" in result.stderr


def test_a_foreign_folder_is_left_unchanged(shell: Shell) -> None:
    shell.home.mkdir()
    (shell.home / "thesis.txt").write_text("mine")
    for args in (["turns"], ["ask", "hello"]):
        result = shell.run(*args)
        assert result.exit_code == 7
        assert str(shell.home) in result.stderr
    assert [path.name for path in shell.home.iterdir()] == ["thesis.txt"]


def test_a_file_in_place_of_a_home_is_left_unchanged(shell: Shell) -> None:
    shell.home.write_text("mine")
    assert shell.run("ask", "hello").exit_code == 7
    assert shell.home.read_text() == "mine"


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes everywhere"
)
def test_a_read_only_home_can_be_read_and_explains_refused_changes(
    learned: Shell,
) -> None:
    try:
        (learned.home / "personalpeft.db").chmod(0o400)
        learned.home.chmod(0o500)
        assert learned.run("turns").exit_code == 0
        result = learned.run("feedback", "--up")
        assert result.exit_code == 7
        assert "read-only" in result.stderr
    finally:
        learned.home.chmod(0o700)


def test_an_invalid_card_is_reported_with_file_and_line(shell: Shell, tmp_path: Path) -> None:
    card = tmp_path / "mine.toml"
    card.write_text('name = "mine"\ntitel = "Mine"\n')
    result = shell.run("ask", "hello", "--base", str(card), backend="torch")
    assert result.exit_code == 2
    assert f"{card}:2" in result.stderr or "line 2" in result.stderr
    assert "titel" in result.stderr
    assert not shell.home.exists()


def test_an_unknown_base_suggests_the_nearest(shell: Shell) -> None:
    result = shell.run("ask", "hello", "--base", "smollm2-135m", backend="torch")
    assert result.exit_code == 3
    assert "smollm2-135m-instruct" in result.stderr
    assert not shell.home.exists()


def test_an_unreachable_server_is_an_error_and_records_no_turn(
    shell: Shell, tiny_base: Base
) -> None:
    command = ("ask", "hello", "--base", "tiny-random")
    there = {
        "PERSONALPEFT_VLLM_URL": "http://127.0.0.1:9",
        "PERSONALPEFT_VLLM_RETRY_SECONDS": "0.1",
    }
    plain, data = (
        shell.run(*command, *more, backend="vllm", **there) for more in ((), ("--json",))
    )
    assert (plain.exit_code, data.exit_code) == (12, 12)
    assert "PERSONALPEFT_VLLM_URL" in plain.stderr
    assert json.loads(data.stderr.splitlines()[-1])["error"]["kind"] == "ServingFailed"
    assert json.loads(shell.run("turns", "--json").stdout)["turns"] == []


def test_verify_and_doctor_report_a_damaged_home(learned: Shell) -> None:
    (blob,) = [path for path in (learned.home / "blobs").rglob("*") if path.is_file()]
    blob.chmod(0o600)
    blob.write_bytes(b"x" + blob.read_bytes()[1:])
    result = learned.run("verify", "--json")
    assert result.exit_code == 8
    assert blob.name in json.loads(result.stdout)["problems"][0]["where"]
    assert blob.name in learned.run("verify").stdout
    doctor = learned.run("doctor")
    assert doctor.exit_code == 8
    assert "personalpeft verify" in doctor.stdout
    shutil.rmtree(learned.home)
