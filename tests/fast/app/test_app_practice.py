"""Reinforcement learning on the command line: reports as text or JSON, and errors in two lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from app_makers import Shell

from personalpeft import LearnReport, User


@pytest.fixture(scope="module")
def learned_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sums")
    shell = Shell(folder / "home", folder / "cache")
    for number in range(6):
        assert (
            shell.run(
                "teach", f"What is {number} + 1?", str(number + 1), "--skill", "sums"
            ).exit_code
            == 0
        )
    assert shell.run("learn", "--layer", "skill.sums").exit_code == 0
    return shell.home


@pytest.fixture
def corrected(learned_home: Path, shell: Shell) -> Shell:
    """A home in which ada taught six sums and learned them."""
    return shell


def test_a_run_is_reported_as_text_and_as_json(corrected: Shell) -> None:
    # The fake model never writes a number, so no reply earns a reward; that is an outcome, not an
    # error.
    said = corrected.run("practice", "sums", "--verifier", "sums", "--rounds", "2")
    assert said.exit_code == 0
    assert "skill.sums" in said.stdout
    report = json.loads(
        corrected.run("practice", "sums", "--verifier", "sums", "--rounds", "2", "--json").stdout
    )
    assert report["scores"]["practice"]["rounds"] == 2
    assert [each["code"] for each in report["reasons"]] == ["no_reply_passed"]
    assert report["reasons"][0]["data"]["replies"] == 80
    assert report["layer"] == "skill.sums"


def test_limits_and_acceptance_reach_the_library(
    corrected: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = corrected.run("practice", "sums", "--verifier", "sums", "--max-memory-mb", "0.001")
    assert little.exit_code == 0
    assert "0.001" in little.stdout
    options: list[dict[str, object]] = []
    practice = User.practice

    def noted(user: User, skill: str, **asked: Any) -> LearnReport:
        options.append(asked)
        return practice(user, skill, **asked)

    monkeypatch.setattr(User, "practice", noted)
    limits = (
        "--seconds",
        "60",
        "--rounds",
        "1",
        "--steps",
        "3",
        "--max-memory-mb",
        "100",
        "--accept",
    )
    assert corrected.run("practice", "sums", "--verifier", "sums", *limits).exit_code == 0
    wanted = {"seconds": 60.0, "rounds": 1, "steps": 3, "max_memory_mb": 100.0, "accept": True}
    assert {name: options[0][name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("practice", "sums", "--verifier", "sms"), 3, ("'sms'", "'sums'")),
        (("practice", "sums", "--verifier", "sums", "--shaping", "t3t"), 3, ("'t3t'",)),
        (("practice", "sums", "--verifier", "sums", "--family", "nine"), 2, ("'nine'", "1 to 3")),
        (("practice", "Sums", "--verifier", "sums"), 2, ("'Sums'", "a-z")),
        (("practice", "sums", "--verifier", "sums", "--rounds", "0"), 2, ("rounds",)),
        (("practice", "sums", "--verifier", "sums", "--steps", "0"), 2, ("steps",)),
        (("practice", "sums", "--verifier", "sums", "--max-memory-mb", "0"), 2, ("memory",)),
        (("practice", "sums"), 2, ("--verifier",)),
    ],
)
def test_an_invalid_argument_is_reported(
    corrected: Shell, args: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    result = corrected.run(*args)
    assert result.exit_code == code
    assert result.stdout == ""
    assert all(word in result.stderr for word in words)
    assert "Traceback" not in result.stderr


def test_the_variable_disables_plugins(corrected: Shell) -> None:
    result = corrected.run("practice", "sums", "--verifier", "sums", PERSONALPEFT_PLUGINS="t2t")
    assert result.exit_code == 3
    assert "PERSONALPEFT_PLUGINS" in result.stderr
