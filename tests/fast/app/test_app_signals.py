"""The command line shows where each signal went and when a layer is active."""

from __future__ import annotations

import json

from app_makers import Shell, lines


def test_signals_show_where_each_signal_went_and_its_source(shell: Shell) -> None:
    assert shell.run("signals").exit_code == 7
    assert not shell.home.exists()
    shell.run("ask", "How do I boil an egg?")
    shell.run("feedback", "--edit", "Six minutes.")
    edit = shell.run("feedback", "--edit", "Eight minutes.").stdout.strip()
    rule = shell.run("feedback", "--comment", "Be brief.").stdout.strip()
    shown = shell.run("signals").stdout
    assert [line.split()[0] for line in shown.splitlines()[1:]] == [edit, rule]
    assert all(" person " in line for line in shown.splitlines()[1:])
    current = json.loads(shell.run("signals", "--json").stdout)["signals"]
    assert all(each["use"] in shown and each["why"] in shown for each in current)
    everything = json.loads(shell.run("signals", "--all", "--json").stdout)
    assert [each["use"] for each in everything["signals"]] == [
        "superseded",
        "waits for the next learn",
        "applies in the prompt",
    ]
    assert {each["signal"]["source"] for each in everything["signals"]} == {"person"}


def test_feedback_excluded_from_training_is_listed_and_consent_can_be_withdrawn(
    shell: Shell,
) -> None:
    def lessons() -> dict[str, str]:
        data = json.loads(shell.run("signals", "--json").stdout)["signals"]
        return {each["signal"]["id"]: each["reason"]["code"] for each in data}

    shell.run("ask", "How do I boil an egg?")
    edit = shell.run("feedback", "--edit", "Six minutes.", "--no-train")
    assert "training" in edit.stderr
    shown = shell.run("teach", "Write to Bo.", "Dear Bo", "--no-train")
    assert "learn" not in shown.stderr
    fact = shell.run(
        *("remember", "My dog is Rex.", "--question", "Who is my dog?", "--answer", "Rex"),
        "--no-train",
    )
    ids = [result.stdout.strip() for result in (edit, shown, fact)]
    assert lessons() == dict.fromkeys(ids, "training_forbidden")
    later = shell.run("teach", "Write to Cy.", "Dear Cy").stdout.strip()
    assert lessons()[later] == "demonstration"
    assert shell.run("retract", later, "--training-only").stdout.strip() == later
    assert lessons() == dict.fromkeys([*ids, later], "training_forbidden")
    assert shell.run("retract", later, "--training-only").exit_code == 3


def test_a_user_switches_training_off_once(shell: Shell) -> None:
    assert shell.run("set-training", "off").stdout == "training off\n"
    withheld = shell.run("teach", "Write to Bo.", "Dear Bo")
    assert "learn" not in withheld.stderr
    data = json.loads(shell.run("signals", "--json").stdout)
    assert data["training"] is False
    assert [each["reason"]["code"] for each in data["signals"]] == ["training_forbidden"]
    assert "set-training on" in shell.run("signals").stderr
    assert json.loads(shell.run("users", "--json").stdout)["users"][0]["training"] is False
    shell.run("set-training", "on")
    shell.run("teach", "Write to Cy.", "Dear Cy")
    data = json.loads(shell.run("signals", "--json").stdout)
    assert (data["training"], data["signals"][1]["reason"]["code"]) == (True, "demonstration")
    assert shell.run("set-training", "maybe").exit_code == 2


def test_feedback_in_a_chat_without_training_is_recorded_so(shell: Shell) -> None:
    lines = ["hello", "/up", "/remember My dog is called Biscuit.", "/quit"]
    assert shell.run("chat", "--no-train", stdin="\n".join(lines)).exit_code == 0
    data = json.loads(shell.run("signals", "--json").stdout)["signals"]
    assert [each["reason"]["code"] for each in data] == ["training_forbidden"] * 2


def test_a_scope_is_set_and_shown_with_the_stack(shell: Shell) -> None:
    for number in range(5):
        shell.run("teach", f"Write to friend {number}.", f"Dear {number}", "--skill", "email")
    assert shell.run("learn", "--layer", "skill.email").exit_code == 0
    (layer,) = json.loads(shell.run("stack", "--json").stdout)["layers"]
    assert layer["scope"] == "near"
    assert shell.run("scope", "skill.email", "never").stdout == "skill.email never\n"
    assert "never" in shell.run("stack").stdout.splitlines()[1].split()
    assert shell.run("scope", "skill.email", "sometimes").exit_code == 2
    assert shell.run("scope", "skill.none", "near").exit_code == 3


def test_a_fact_that_is_told_twice_is_stored_once_and_no_hint_removes_it(shell: Shell) -> None:
    first, second = (shell.run("remember", "My dog is called Biscuit.") for _ in range(2))
    assert lines(second.stdout) == lines(first.stdout)
    assert "memory retract" not in second.stderr
