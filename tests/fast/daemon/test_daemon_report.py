"""The morning report has all that came since the last one, of everybody, and nothing that was forgotten."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner
from daemon_makers import World
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.learning import pipeline
from personalpeft.learning.gate.gate import Judgement
from personalpeft.learning.outcomes import text_reason
from personalpeft.types import Verdict
from personalpeft_app.cli import cli
from personalpeft_app.daemon.daily_report import ReportWindow, next_window


def command(world: World, *words: str) -> str:
    told = CliRunner().invoke(
        cli, ["--home", str(world.home), "--backend", "fake", *words], catch_exceptions=False
    )
    assert told.exit_code == 0, told.output
    return told.stdout


def test_the_morning_has_everybody_since_the_last_one_with_reasons_and_the_way_back(
    world: World,
) -> None:
    world.set(morning="07:00")
    world.say(9, "ada")
    world.goes_on(hours=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pipeline,
            "judge",
            lambda evidence, margins, **more: Judgement(
                Verdict.REFUSED, (text_reason("it is worse"),)
            ),
        )
        world.say(9, "bo")
        # Two mornings on which the machine was off are in the report of the third.
        world.jump(days=2)
        world.goes_on(hours=26)
    (bo,) = world.morning()
    assert (bo.user, [str(report.verdict) for report in bo.reports]) == ("bo", ["refused"])
    text = command(world, "daemon", "report")
    (report,) = bo.reports
    assert "it is worse" in text
    for source in report.sources:
        assert source.signal[-6:] in text
    assert report.examples
    assert f"> {report.examples[0].prompt}" in text
    assert f"personalpeft rollback style --to {report.revision} --user bo" in text
    data = json.loads(command(world, "daemon", "report", "--json"))
    assert [each["user"] for each in data["users"]] == ["bo"]
    assert data["users"][0]["reports"][0]["sources"]
    line = next(line for line in reversed(world.told) if line.kind == "report")
    assert "Ahoy" not in line.message
    # ada's was in the report before that one.
    assert any("ada: " in line.message for line in world.told if line.kind == "report")


def test_the_way_back_in_an_old_report_is_the_one_that_leads_back_now(world: World) -> None:
    world.set(morning="07:00")
    world.say(9)
    world.goes_on(hours=20)
    assert "personalpeft rollback style --to base --user ada" in command(world, "daemon", "report")
    with world.opened() as runtime:
        runtime.user("ada").rollback("style")
    assert "personalpeft rollback" not in command(world, "daemon", "report")


def test_what_was_forgotten_is_in_no_old_report(world: World) -> None:
    world.set(morning="07:00")
    world.say(9)
    world.goes_on(hours=20)
    ((first, *_),) = ([report.sources for report in digest.reports] for digest in world.morning())
    assert first[0].text in command(world, "daemon", "report")
    with world.opened() as runtime:
        runtime.user("ada").forget(first[0].signal)
    assert first[0].text not in command(world, "daemon", "report", "--json")


def test_a_quiet_day_leaves_the_last_report_to_be_read(world: World) -> None:
    world.set(morning="07:00")
    world.say(9)
    world.goes_on(hours=20)
    before = command(world, "daemon", "report")
    world.goes_on(hours=72, every=120)
    assert command(world, "daemon", "report") == before


def test_before_the_first_morning_there_is_nothing_and_it_says_so(world: World) -> None:
    world.say(1)
    world.round()
    told = CliRunner().invoke(
        cli, ["--home", str(world.home), "--backend", "fake", "daemon", "report"]
    )
    assert (told.exit_code, told.stdout) == (0, "")
    assert told.stderr


def test_status_says_what_it_did_what_comes_next_and_why(world: World) -> None:
    world.say(9)
    world.goes_on(hours=1)
    world.say(3)
    assert "ada" in command(world, "daemon", "status")
    data = json.loads(command(world, "daemon", "status", "--json"))
    (learn,) = [entry for entry in data["did"] if entry["kind"] == "learn"]
    assert (learn["user"], learn["outcome"], learn["resumed"]) == ("ada", "done", False)
    # By the clock and the load of this machine, it is due now or comes later.
    actions = {each["action"] for each in data["next"]}
    assert "collect" in actions
    assert data["due"].get("user") == "ada" or "ada learns" in actions
    assert data["running"] is None


MOMENTS = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


@given(st.lists(MOMENTS, min_size=1))
def test_reports_follow_each_other_without_a_gap_whatever_the_clock_says(
    moments: list[datetime],
) -> None:
    last: ReportWindow | None = None
    for now in moments:
        period = next_window(last, now)
        assert period.until == now
        assert period.since < now or (last is not None and period.since == now == last.until)
        if last is not None and last.until <= now:
            assert period.since == last.until
        else:
            assert period.since == now - timedelta(days=1)
        last = period
