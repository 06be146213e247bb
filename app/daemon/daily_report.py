"""The daily report: what every user of a home learned since the last report with content.

Invariant: only the window of a report is stored. Each reading makes it from the ledger anew, so an
old report holds no forgotten text, and the undo command that it names works now.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from personalpeft import NotFound, Runtime
from personalpeft.formatting import pluralize
from personalpeft.learning.activity_summary import ActivitySummary
from personalpeft_app.session import iterate_users


@dataclass(frozen=True, slots=True)
class ReportWindow:
    """The time after ``since``, up to ``until``."""

    since: datetime
    until: datetime


def next_window(last: ReportWindow | None, now: datetime) -> ReportWindow:
    """Return the window from the end of the last one until now.

    Without a last window it is the last day; also if a clock was set back to before its end.
    """
    follows = last is not None and last.until <= now
    return ReportWindow(last.until if last and follows else now - timedelta(days=1), now)


def summarize_users(runtime: Runtime, window: ReportWindow) -> list[ActivitySummary]:
    """Return the report: a summary of each user with any activity, by id."""
    summaries = []
    for each in iterate_users(runtime):
        if each.turns or each.signals or each.revisions:
            with suppress(NotFound):  # The user was deleted after the page was read.
                user = runtime.user(each.id, create=False)
                summaries.append(user.activity_summary(window.since, window.until))
    return [summary for summary in summaries if not summary.is_empty]


def format_line(report: Sequence[ActivitySummary]) -> str:
    """Return the report in one line, without any text of a user; empty for an empty report."""
    return "; ".join(map(_format_summary, report))


def _format_summary(summary: ActivitySummary) -> str:
    ends = [
        f"{report.layer} {report.event if report.event != 'learn' else report.verdict}"
        for report in summary.reports
    ]
    turns = pluralize(summary.turns, "turn")
    signals = pluralize(sum(summary.signals.values()), "signal")
    return f"{summary.user}: {', '.join((turns, signals, *ends))}"
