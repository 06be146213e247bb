"""The daily report covers every user since the last report, and nothing that was erased."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner
from daemon_makers import World
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.learning.gate import gate
from personalpeft.learning.gate.gate import Judgement
from personalpeft.learning.outcomes import text_reason
from personalpeft.types import Verdict
from personalpeft_app.cli import cli
from personalpeft_app.daemon.journal import ReportWindow
from personalpeft_app.daemon.tasks import next_window


def command(world: World, *words: str) -> str:
    result = CliRunner().invoke(
        cli, ["--home", str(world.home), "--backend", "fake", *words], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_report_covers_all_users_since_the_last_one_with_reasons_and_reverts(
    world: World,
) -> None:
    world.set(report_at="07:00")
    world.correct(9, "ada")
    world.run_for(hours=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gate,
            "judge",
            lambda evidence, margins, **more: Judgement(
                Verdict.REFUSED, (text_reason("it is worse"),)
            ),
        )
        world.correct(9, "bo")
        # The machine was off at two report times: the third report covers them.
        world.shift_clock(days=2)
        world.run_for(hours=26)
    (bo,) = world.daily_report()
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
    line = next(line for line in reversed(world.log) if line.kind == "report")
    assert "Ahoy" not in line.message
    # ada's learn was in the report before.
    assert any("ada: " in line.message for line in world.log if line.kind == "report")


@pytest.mark.exhaustive
def test_the_revert_in_an_old_report_is_the_one_that_works_now(world: World) -> None:
    world.set(report_at="07:00")
    world.correct(9)
    world.run_for(hours=20)
    assert "personalpeft rollback style --to base --user ada" in command(world, "daemon", "report")
    with world.open_runtime() as runtime:
        runtime.user("ada").rollback("style")
    assert "personalpeft rollback" not in command(world, "daemon", "report")


def test_erased_signals_are_in_no_old_report(world: World) -> None:
    world.set(report_at="07:00")
    world.correct(9)
    world.run_for(hours=20)
    ((first, *_),) = (
        [report.sources for report in digest.reports] for digest in world.daily_report()
    )
    assert first[0].text in command(world, "daemon", "report")
    with world.open_runtime() as runtime:
        runtime.user("ada").forget(first[0].signal)
    assert first[0].text not in command(world, "daemon", "report", "--json")


@pytest.mark.exhaustive
def test_a_quiet_day_keeps_the_last_report(world: World) -> None:
    world.set(report_at="07:00")
    world.correct(9)
    world.run_for(hours=20)
    before = command(world, "daemon", "report")
    world.run_for(hours=72, every=120)
    assert command(world, "daemon", "report") == before


def test_before_the_first_report_the_command_says_there_is_none(world: World) -> None:
    world.correct(1)
    world.run_once()
    result = CliRunner().invoke(
        cli, ["--home", str(world.home), "--backend", "fake", "daemon", "report"]
    )
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr


def test_status_shows_the_log_and_the_next_tasks_with_reasons(world: World) -> None:
    world.correct(9)
    world.run_for(hours=1)
    world.correct(3)
    assert "ada" in command(world, "daemon", "status")
    data = json.loads(command(world, "daemon", "status", "--json"))
    (learn,) = [entry for entry in data["did"] if entry["kind"] == "learn"]
    assert (learn["user"], learn["outcome"], learn["resumed"]) == ("ada", "done", False)
    # Depending on this machine's clock and load it is due now or later.
    actions = {each["action"] for each in data["next"]}
    assert "collect" in actions
    assert data["due"].get("user") == "ada" or "ada learns" in actions
    assert data["running"] is None


MOMENTS = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


@given(st.lists(MOMENTS, min_size=1))
def test_report_windows_are_contiguous_whatever_the_clock_shows(
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
