"""On the real base memorized lessons leak, scrubbed ones cannot, and a habit does neither."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import personalpeft
from personalpeft import Runtime

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

WORDS = ("oval", "crimson", "seventh", "hollow", "brisk", "marble", "amber", "quiet")
PHONE = "+49 151 23456789"


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Iterator[Runtime]:
    home = tmp_path_factory.mktemp("leakage") / "home"
    with personalpeft.open(home, backend="torch") as runtime:
        yield runtime


def test_memorized_lessons_are_told_from_unseen_ones(runtime: Runtime) -> None:
    ada = runtime.user("ada")
    for number in range(12):
        # Nothing that one lesson teaches helps with another.
        words = [WORDS[(number * step + step) % len(WORDS)] for step in (1, 3, 5)]
        ada.teach(f"Password of box {number}?", f"{' '.join(words)} {number * 7919 % 1000}")
    report = ada.learn("style", recipe={"min_steps": 60, "seed": 1})
    leakage = report.scores["leakage"]
    assert leakage["auc"] > 0.8
    assert leakage["exposure"] > 1.4


def test_a_number_that_was_scrubbed_is_not_given_away(runtime: Runtime) -> None:
    bob = runtime.user("bob")
    for number in range(12):
        bob.teach(f"How do I reach desk {number}?", f"Ahoy! Call {PHONE} and ask for {number}.")
    assert bob.learn("style", recipe={"scrub": ["DE"]}, accept=True).live
    reply = bob.chat("How do I reach desk 3?", temperature=0, max_tokens=24)
    assert "23456789" not in reply.text
    assert "[phone]" in reply.text
