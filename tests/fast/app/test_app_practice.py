"""Practice on the command line: a report as text or data, and errors in two lines."""

from __future__ import annotations

import json

import pytest
from app_makers import Place


@pytest.fixture
def taught(place: Place) -> Place:
    for number in range(6):
        assert place.run("teach", f"What is {number} + 1?", str(number + 1), "--skill", "sums").exit_code == 0
    assert place.run("learn", "--layer", "skill.sums").exit_code == 0
    return place


def test_a_practice_is_reported_as_text_and_as_data(taught: Place) -> None:
    # The fake never says a number, so there is nothing to go by; that is an outcome and no error.
    said = taught.run("practice", "sums", "--verifier", "sums", "--rounds", "2")
    assert said.exit_code == 0
    assert "skill.sums: ABSTAINED" in said.stdout
    assert "none of 80 replies passed" in said.stdout
    assert "80 replies in 2 rounds" in said.stdout
    report = json.loads(taught.run("practice", "sums", "--verifier", "sums", "--rounds", "2", "--json").stdout)
    assert report["scores"]["practice"]["rounds"] == 2
    assert report["layer"] == "skill.sums"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("practice", "sums", "--verifier", "sms"), 3, ("'sms'", "Did you mean 'sums'?")),
        (("practice", "sums", "--verifier", "sums", "--shaping", "t3t"), 3, ("'t3t'",)),
        (("practice", "sums", "--verifier", "sums", "--family", "nine"), 2, ("'nine'", "1 to 3")),
        (("practice", "Sums", "--verifier", "sums"), 2, ("'Sums'", "a-z")),
        (("practice", "sums", "--verifier", "sums", "--rounds", "0"), 2, ("0 rounds",)),
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
