"""Data goes to stdout and everything else to stderr; commands end cleanly when interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from app_makers import Shell, read_to_end, wait_for

import personalpeft

ANSI = re.compile(r"\x1b")


def test_stdout_holds_the_reply_and_nothing_else(shell: Shell) -> None:
    result = shell.run("ask", "hello")
    told = json.loads(shell.run("ask", "hello", "--json").stdout)
    assert result.stdout == told["text"] + "\n"
    assert told["turn_id"].startswith("t_")
    assert told["finish_reason"] == "stop"
    assert "t_" in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="The shell closes the streams.")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_parent_may_close_the_standard_streams(shell: Shell, closed: str) -> None:
    """As cron, supervisors and launchers without a terminal do."""
    shell.run("ask", "hello")
    command = [sys.executable, "-m", "personalpeft_app", "teach", f"prompt {closed}", "answer"]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *command],
        env={**os.environ, **shell.environment, "PERSONALPEFT_BACKEND": "fake"},
        check=False,
    )
    assert done.returncode == 0
    with personalpeft.open(shell.home, backend="fake") as runtime:
        assert runtime.verify() == ()
        assert f"prompt {closed}" in str(runtime.user("ada").signals()[-1].payload)


def test_quiet_prints_nothing_but_data(shell: Shell) -> None:
    assert shell.run("ask", "hello", "--quiet").stderr == ""
    assert shell.run("feedback", "--up", "-q").stderr == ""


@pytest.mark.parametrize(
    "args",
    [
        ["ask", "again"],
        ["feedback", "--up"],
        ["teach", "prompt", "answer"],
        ["remember", "My dog is called Biscuit."],
        ["learn", "--dry-run", "--from-scratch"],
        ["rollback", "style"],
        ["set-weight", "style", "0.5"],
        ["stack"],
        ["revisions"],
        ["turns"],
        ["why"],
        ["memory"],
        ["memory", "list"],
        ["users"],
        ["models"],
        ["doctor"],
        ["verify"],
        ["path"],
        ["completion", "bash"],
    ],
    ids=" ".join,
)
def test_each_command_prints_one_json_value_without_colours(
    learned: Shell, args: list[str]
) -> None:
    result = learned.run(*args, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)
    plain = learned.run(*args)
    assert plain.exit_code == 0, plain.output
    assert not ANSI.search(plain.stdout + plain.stderr)


def test_json_output_holds_what_text_output_holds(learned: Shell) -> None:
    learned.run("remember", "I live in Lisbon.")
    for command in ("revisions", "turns", "users", "memory", "stack"):
        data = learned.run(command, "--json").stdout
        for word in learned.run(command).stdout.split("\n", 1)[1].split():
            if len(word) > 8 and not re.fullmatch(r"[\d: -]+", word):
                assert word.rstrip(",") in data, (command, word)


def test_text_cannot_control_the_terminal(shell: Shell) -> None:
    shell.run("remember", "My cat is \tTom.")
    with_escape = shell.run("teach", "prompt", "red \x1b[31m text\x9b2J")
    assert with_escape.exit_code == 0
    shown = shell.run("learn", "--dry-run").stdout
    assert not re.search(r"[\x1b\x9b]", shown)
    assert "\\x1b[31m" in shown
    assert not re.search(r"[\x1b\x9b]", shell.run("learn", "--dry-run", "--json").stdout)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "value", "coloured"), [("NO_COLOR", "1", False), ("NO_COLOR", "", True)]
)
def test_no_color_is_respected(shell: Shell, name: str, value: str, coloured: bool) -> None:
    ours, theirs = pytest.importorskip("pty").openpty()
    env = {**os.environ, **shell.environment, "TERM": "xterm", name: value}
    program = [sys.executable, "-P", "-c", "from personalpeft_app.cli import main; main()", "stack"]
    subprocess.run(program, env=env, stderr=theirs, stdout=subprocess.PIPE, check=False)
    os.close(theirs)
    errors = os.read(ours, 65536).decode()
    os.close(ours)
    assert "error:" in errors
    assert bool(ANSI.search(errors)) is coloured


def test_stdin_is_read_for_a_dash_and_for_a_missing_prompt(shell: Shell) -> None:
    direct = shell.run("ask", "hello\nyou").stdout
    assert shell.run("ask", "-", stdin="hello\nyou\n").stdout == direct
    assert shell.run("ask", stdin="hello\nyou\n").stdout == direct
    not_text = shell.run("ask", "-", stdin=b"\xff\xfe\xfa")
    assert not_text.exit_code == 2
    assert "UTF-8" in not_text.stderr


def test_a_broken_pipe_is_silent(learned: Shell) -> None:
    process = learned.spawn("turns", "--json")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


def test_a_reader_that_leaves_during_a_reply_leaves_a_cancelled_turn(
    shell: Shell,
) -> None:
    process = shell.spawn("ask", "hello", slowly=0.3)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    assert process.wait() == 141
    (turn,) = json.loads(shell.run("turns", "--json").stdout)["turns"]
    assert turn["finish_reason"] == "cancelled"


def test_ctrl_c_ends_a_reply_and_records_its_beginning(shell: Shell) -> None:
    process = shell.spawn("ask", "hello", slowly=0.3)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, errors = read_to_end(process)
    assert process.returncode == 130
    assert "Traceback" not in errors
    (turn,) = json.loads(shell.run("turns", "--json").stdout)["turns"]
    assert turn["finish_reason"] == "cancelled"
    assert turn["reply"] + "\n" == first.decode() + rest
    assert shell.run("verify").exit_code == 0


def test_ctrl_c_stops_a_learn_which_resumes_from_there(corrected: Shell) -> None:
    process = corrected.spawn("learn", slowly=0.1)
    session = corrected.home / "sessions" / "ada" / "style.session"
    with personalpeft.open(corrected.home, backend="fake") as runtime:
        ada = runtime.user("ada")
        wait_for(lambda: (status := ada.training_status()) and status.step > 1, "two steps")
    process.send_signal(signal.SIGINT)
    out, errors = read_to_end(process)
    assert process.returncode == 130, errors
    assert session.exists()
    assert out == ""
    assert "Traceback" not in errors
    assert corrected.run("verify").exit_code == 0
    assert json.loads(corrected.run("learn", "--json").stdout)["verdict"] == "promoted"
    assert not session.exists()


@pytest.mark.exhaustive
def test_a_second_ctrl_c_stops_a_learn_at_once(corrected: Shell) -> None:
    process = corrected.spawn("learn", slowly=3)
    assert process.stderr is not None
    wait_for(lambda: b"Reading" in process.stderr.readline(), "learning")
    process.send_signal(signal.SIGINT)
    wait_for(lambda: b"Stopping" in process.stderr.readline(), "the note")
    process.send_signal(signal.SIGINT)
    errors = read_to_end(process)[1]
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert corrected.run("verify").exit_code == 0


@pytest.mark.exhaustive
def test_ctrl_c_in_a_chat_stops_the_reply_but_not_the_chat(shell: Shell) -> None:
    process = shell.spawn("chat", slowly=0.3)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.stdin.write(b"and again\n/quit\n")
    process.stdin.flush()
    errors = read_to_end(process)[1]
    assert process.returncode == 0, errors
    newest, oldest = json.loads(shell.run("turns", "--json").stdout)["turns"]
    assert oldest["finish_reason"] == "cancelled"
    assert newest["finish_reason"] == "stop"
    assert [message["role"] for message in newest["messages"]] == ["user", "assistant", "user"]


def test_a_bug_prints_where_it_is_and_no_traceback(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **more: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("personalpeft.user.User.stream", broken)
    result = shell.run("ask", "hello")
    assert result.exit_code == 70
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "ZeroDivisionError" in result.stderr
    assert ".broken" in result.stderr
    told = json.loads(shell.run("ask", "hello", "--json").stderr)
    assert (told["error"]["kind"], told["error"]["exit_code"]) == ("Bug", 70)


@pytest.mark.exhaustive
def test_ask_notes_a_piped_text_that_it_does_not_read(shell: Shell) -> None:
    with_text, without = (
        shell.spawn("ask", "Summarize this letter.").communicate(text, timeout=60)
        for text in (b"Dear Ada", b"")
    )
    assert b"stdin" in with_text[1]
    assert b"stdin" not in without[1]
