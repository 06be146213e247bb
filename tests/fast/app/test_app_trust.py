"""Acceptance, comparisons, summaries and withdrawals, through the command line alone."""

from __future__ import annotations

import json

import pytest
from app_makers import Shell, correct_replies


def test_a_learn_can_be_accepted_by_name_and_reports_when_that_was_unnecessary(
    corrected: Shell,
) -> None:
    report = json.loads(corrected.run("learn", "--accept", "--json").stdout)
    assert (report["verdict"], report["accepted"]) == ("promoted", False)


def test_two_revisions_are_compared_blind_and_the_choice_is_recorded(learned: Shell) -> None:
    told = json.loads(learned.run("compare", "hello", "--json").stdout)
    assert [answer["number"] for answer in told["answers"]] == [1, 2]
    assert told["choice"] is None
    assert "style@" not in json.dumps(told)
    name = told["answers"][1]["name"]
    chosen = json.loads(learned.run("compare", "hello", "--choose", name, "--json").stdout)[
        "choice"
    ]
    (turn,) = json.loads(learned.run("turns", "-n", "1", "--json").stdout)["turns"]
    assert turn["id"] == chosen["turn"]
    assert turn["signals"][0]["id"] == chosen["signal"]
    kept = {"text": told["answers"][1]["text"], "revision": chosen["chosen"], "layer": "style"}
    assert turn["signals"][0]["payload"] == kept
    assert turn["reply"] == told["answers"][0]["text"]


def test_choosing_neither_records_nothing(learned: Shell) -> None:
    before = learned.snapshot()
    result = learned.run("compare", "hello", "live", "base", "--choose", "neither")
    assert result.exit_code == 0
    assert learned.run("compare", "hello").exit_code == 0
    assert learned.snapshot() == before


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["compare", "hello", "--choose", "3"], 2),
        (["compare", "hello", "live", "live"], 2),
        (["compare", "hello", "style@none"], 3),
        (["compare", "hello", "--layer", "styl"], 3),
        (["compare", "", "--json"], 2),
        (["activity", "--since", "yesterday"], 2),
        (["activity", "--since", "99999999999d"], 2),
        (["activity", "--since", "2999-01-01"], 2),
    ],
)
def test_an_invalid_command_is_refused_and_changes_nothing(
    learned: Shell, args: list[str], code: int
) -> None:
    before = learned.snapshot()
    result = learned.run(*args)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert learned.snapshot() == before


def test_the_activity_summary_covers_one_user_or_all(learned: Shell) -> None:
    learned.run("ask", "hello", "--user", "bob")
    text = learned.run("activity").stdout
    assert "personalpeft rollback style --to base --user ada" in text
    (told,) = json.loads(learned.run("activity", "--since", "7d", "--json").stdout)["users"]
    assert (told["user"], len(told["reports"])) == ("ada", 1)
    assert (told["reports"][0]["verdict"], told["reports"][0]["probation"]) == ("promoted", True)
    everyone = json.loads(learned.run("activity", "--everyone", "--json").stdout)["users"]
    assert [each["user"] for each in everyone] == ["ada", "bob"]
    assert json.loads(learned.run("activity", "--everyone", "--since", "0m", "--json").stdout) == {
        "users": []
    }
    assert json.loads(learned.run("activity", "--since", "2026-01-01", "--json").stdout)["users"][
        0
    ]["turns"]


def test_a_withdrawn_revision_is_reported_until_the_next_answer(learned: Shell) -> None:
    said = []
    for number in range(4):
        learned.run("ask", f"later {number}")
        said.append(learned.run("feedback", "--down").stderr)
    (revision,) = json.loads(learned.run("revisions", "--json").stdout)["revisions"]
    assert [(revision["id"] in each) for each in said] == [False, False, False, True]
    assert revision["id"] in learned.run("ask", "hello").stderr
    assert revision["id"] not in learned.run("ask", "hello").stderr
    assert revision["id"] not in learned.run("ask", "hello", "-q").stderr
    (layer,) = json.loads(learned.run("stack", "--json").stdout)["layers"]
    assert layer["head"] is None
    (summary,) = json.loads(learned.run("activity", "--json").stdout)["users"]
    assert "withdrawn" in [report["event"] for report in summary["reports"]]


def test_each_refusal_says_how_to_accept_it_anyway(learned: Shell) -> None:
    for number in range(4):
        learned.run("ask", f"later {number}")
        learned.run("feedback", "--down")
    correct_replies(learned, 0)
    told = learned.run("learn", "--from-scratch").stdout
    assert "personalpeft rollback style --to style@" in told
