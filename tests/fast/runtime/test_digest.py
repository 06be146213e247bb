"""The summary of a while has each learn of it, each refusal with its reason, and how to undo what is live."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from runtime_makers import Time, correct, opened

from personalpeft import InvalidInput, LearnReport, User


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def ada(home: Path, time: Time) -> Iterator[User]:
    with opened(home, clock=time.clock()) as runtime:
        yield runtime.user("ada")


def two_days_apart(ada: User, time: Time) -> tuple[LearnReport, LearnReport]:
    """Two learns of a style."""
    correct(ada, 5)
    first = ada.learn()
    time.at += timedelta(days=2)
    correct(ada, 3, first=10)
    return first, ada.learn()


def test_a_summary_has_what_happened_in_its_while_and_nothing_else(ada: User, time: Time) -> None:
    first, second = two_days_apart(ada, time)
    ada.rollback("style")
    digest = ada.activity_summary()
    assert [report.revision for report in digest.reports] == [second.revision]
    assert (digest.turns, dict(digest.signals)) == (3, {"edit": 3})
    assert [move.cause for move in digest.moves] == ["learn", "rollback"]
    assert digest.live == {"style": first.revision}
    assert len(ada.activity_summary(timedelta(days=3)).reports) == 2
    assert ada.activity_summary(time.at).is_empty


def test_it_reads_well_and_its_json_has_all_of_it(ada: User) -> None:
    correct(ada, 5)
    report = ada.learn()
    digest = ada.activity_summary()
    text, data = str(digest), json.loads(json.dumps(digest.as_json()))
    assert text.splitlines()[1:4] == ["  turns: 5, signals: 5 (5 edit)", "", text.splitlines()[3]]
    assert str(report.revision) in text
    assert report.reason in text
    undo = "personalpeft rollback style --to base --user ada"
    assert undo in text
    (told,) = data["reports"]
    assert undo in told["undo"]
    assert (told["revision"], told["reason"]) == (report.revision, report.reason)
    assert told["examples"]
    assert told["sources"]


def test_each_learn_of_a_while_says_how_to_undo_it(ada: User, time: Time) -> None:
    first, second = two_days_apart(ada, time)
    both = [
        report["undo"] for report in ada.activity_summary(timedelta(days=3)).as_json()["reports"]
    ]
    assert both == [
        "undo, with all that came after it: personalpeft rollback style --to base --user ada",
        f"undo: personalpeft rollback style --to {first.revision} --user ada",
    ]
    ada.rollback("style", None)
    ada.rollback("style", second.revision)
    ada.rollback("style", first.revision)
    assert [
        bool(report["undo"])
        for report in ada.activity_summary(timedelta(days=3)).as_json()["reports"]
    ] == [True, False]


def test_what_is_not_live_any_more_has_nothing_to_undo(ada: User) -> None:
    correct(ada, 5)
    ada.learn()
    ada.rollback("style")
    assert "personalpeft rollback" not in str(ada.activity_summary())


@pytest.mark.parametrize(
    "since",
    [datetime(2026, 1, 1), timedelta(days=-1), timedelta(days=999_999_999)],  # noqa: DTZ001
)
def test_a_while_that_makes_no_sense_is_refused(ada: User, since: datetime | timedelta) -> None:
    with pytest.raises(InvalidInput) as wrong:
        ada.activity_summary(since)
    assert wrong.value.hint
