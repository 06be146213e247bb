"""The activity summary has each learn of its window, each refusal with its reason, and undo
commands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from runtime_makers import FakeTime, correct, open_runtime

from personalpeft import InvalidInput, LearnReport, User


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def ada(home: Path, time: FakeTime) -> Iterator[User]:
    with open_runtime(home, clock=time.clock()) as runtime:
        yield runtime.user("ada")


def two_days_apart(ada: User, time: FakeTime) -> tuple[LearnReport, LearnReport]:
    """Learn a style twice, two days apart."""
    correct(ada, 5)
    first = ada.learn()
    time.at += timedelta(days=2)
    correct(ada, 3, first=10)
    return first, ada.learn()


def test_summary_covers_its_window_alone(ada: User, time: FakeTime) -> None:
    first, second = two_days_apart(ada, time)
    ada.rollback("style")
    digest = ada.activity_summary()
    assert [report.revision for report in digest.reports] == [second.revision]
    assert (digest.turns, dict(digest.signals)) == (3, {"edit": 3})
    assert [move.cause for move in digest.moves] == ["learn", "rollback"]
    assert digest.live == {"style": first.revision}
    assert len(ada.activity_summary(timedelta(days=3)).reports) == 2
    assert ada.activity_summary(time.at).is_empty


def test_summary_text_and_json_have_the_same_content(ada: User) -> None:
    correct(ada, 5)
    report = ada.learn()
    digest = ada.activity_summary()
    text, data = str(digest), json.loads(json.dumps(digest.as_json()))
    assert text.splitlines()[1:4] == ["  turns: 5, signals: 5 (5 edits)", "", text.splitlines()[3]]
    assert str(report.revision) in text
    assert report.reason in text
    undo = "personalpeft rollback style --to base --user ada"
    assert undo in text
    (listed,) = data["reports"]
    assert undo in data["undo"][0]
    assert (listed["revision"], listed["reason"]) == (report.revision, report.reason)
    assert listed["examples"]
    assert listed["sources"]


def test_each_learn_in_the_window_has_an_undo_command(ada: User, time: FakeTime) -> None:
    first, second = two_days_apart(ada, time)
    both = ada.activity_summary(timedelta(days=3)).undo
    assert list(both) == [
        "undo, with all that came after it: personalpeft rollback style --to base --user ada",
        f"undo: personalpeft rollback style --to {first.revision} --user ada",
    ]
    ada.rollback("style", None)
    ada.rollback("style", second.revision)
    ada.rollback("style", first.revision)
    assert [bool(each) for each in ada.activity_summary(timedelta(days=3)).undo] == [True, False]


def test_revision_that_is_no_longer_live_has_no_undo_command(ada: User) -> None:
    correct(ada, 5)
    ada.learn()
    ada.rollback("style")
    assert "personalpeft rollback" not in str(ada.activity_summary())


@pytest.mark.parametrize(
    "since",
    [datetime(2026, 1, 1), timedelta(days=-1), timedelta(days=999_999_999)],  # noqa: DTZ001
)
def test_invalid_window_is_refused(ada: User, since: datetime | timedelta) -> None:
    with pytest.raises(InvalidInput) as wrong:
        ada.activity_summary(since)
    assert wrong.value.hint
