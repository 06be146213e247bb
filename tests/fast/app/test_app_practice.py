"""Practice on the command line: a report as text or data, and errors in two lines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from app_makers import Place

from personalpeft import LearnReport, User


@pytest.fixture
def taught(place: Place) -> Place:
    for number in range(6):
        assert (
            place.run(
                "teach", f"What is {number} + 1?", str(number + 1), "--skill", "sums"
            ).exit_code
            == 0
        )
    assert place.run("learn", "--layer", "skill.sums").exit_code == 0
    return place


def test_a_practice_is_reported_as_text_and_as_data(taught: Place) -> None:
    # The fake never says a number, so there is nothing to go by; that is an outcome and no error.
    said = taught.run("practice", "sums", "--verifier", "sums", "--rounds", "2")
    assert said.exit_code == 0
    assert "skill.sums" in said.stdout
    report = json.loads(
        taught.run("practice", "sums", "--verifier", "sums", "--rounds", "2", "--json").stdout
    )
    assert report["scores"]["practice"]["rounds"] == 2
    assert [each["code"] for each in report["reasons"]] == ["no_reply_passed"]
    assert report["reasons"][0]["data"]["replies"] == 80
    assert report["layer"] == "skill.sums"


def test_what_a_practice_may_take_and_that_its_result_is_accepted_are_said_to_the_library(
    taught: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = taught.run("practice", "sums", "--verifier", "sums", "--memory", "0.001")
    assert little.exit_code == 0
    assert "0.001" in little.stdout
    heard: list[dict[str, object]] = []
    practice = User.practice

    def noted(user: User, skill: str, **asked: Any) -> LearnReport:
        heard.append(asked)
        return practice(user, skill, **asked)

    monkeypatch.setattr(User, "practice", noted)
    limits = ("--seconds", "60", "--rounds", "1", "--steps", "3", "--memory", "100", "--accept")
    assert taught.run("practice", "sums", "--verifier", "sums", *limits).exit_code == 0
    wanted = {"seconds": 60.0, "rounds": 1, "steps": 3, "memory": 100.0, "accept": True}
    assert {name: heard[0][name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("practice", "sums", "--verifier", "sms"), 3, ("'sms'", "'sums'")),
        (("practice", "sums", "--verifier", "sums", "--shaping", "t3t"), 3, ("'t3t'",)),
        (("practice", "sums", "--verifier", "sums", "--family", "nine"), 2, ("'nine'", "1 to 3")),
        (("practice", "Sums", "--verifier", "sums"), 2, ("'Sums'", "a-z")),
        (("practice", "sums", "--verifier", "sums", "--rounds", "0"), 2, ("rounds",)),
        (("practice", "sums", "--verifier", "sums", "--steps", "0"), 2, ("steps",)),
        (("practice", "sums", "--verifier", "sums", "--memory", "0"), 2, ("MB",)),
        (("practice", "sums"), 2, ("--verifier",)),
    ],
)
def test_a_mistake_is_told_in_plain_words(
    taught: Place, args: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    result = taught.run(*args)
    assert result.exit_code == code
    assert result.stdout == ""
    assert all(word in result.stderr for word in words)
    assert "Traceback" not in result.stderr


def test_the_variable_keeps_plugins_out(taught: Place) -> None:
    result = taught.run("practice", "sums", "--verifier", "sums", PERSONALPEFT_PLUGINS="t2t")
    assert result.exit_code == 3
    assert "PERSONALPEFT_PLUGINS" in result.stderr
