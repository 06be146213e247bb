"""The morning report: what learning did for everybody in a home since the last one that had something to say.

Invariant: what is kept of a report is its period alone. It is made of the ledger each time that it is read, so words that
somebody has had forgotten are in no old report either, and the way back that it names is the one that leads back now.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from personalpeft import NotFound, Runtime
from personalpeft.formatting import pluralize
from personalpeft.learning.activity_summary import ActivitySummary
from personalpeft_app.daemon.backlog import list_users

_FIRST = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class ReportWindow:
    """What came after ``since``, up to ``until``."""

    since: datetime
    until: datetime


def next_window(last: ReportWindow | None, now: datetime) -> ReportWindow:
    """The period that follows another, until now; the last day where there was none, or where a clock that was set back says
    that it is still to come.
    """
    follows = last is not None and last.until <= now
    return ReportWindow(last.until if last is not None and follows else now - _FIRST, now)


def summarize_users(runtime: Runtime, period: ReportWindow) -> list[ActivitySummary]:
    """The report: one summary for each user of whom there is something to say, by id."""
    found: list[ActivitySummary] = []
    for each in list_users(runtime):
        if each.turns or each.signals or each.revisions:
            with suppress(NotFound):  # Gone since the page was read.
                found.append(
                    runtime.user(each.id, create=False).activity_summary(period.since, period.until)
                )
    return [digest for digest in found if not digest.is_empty]


def format_line(report: Sequence[ActivitySummary]) -> str:
    """What it comes to, without a word of anybody's; empty where there is nothing to say."""
    return "; ".join(map(_format_summary, report))


def _format_summary(digest: ActivitySummary) -> str:
    ends = ", ".join(
        f"{report.layer} {report.event if report.event != 'learn' else report.verdict}"
        for report in digest.reports
    )
    turns = pluralize(digest.turns, "turn")
    signals = pluralize(sum(digest.signals.values()), "signal")
    return f"{digest.user}: {turns}, {signals}{f', {ends}' if ends else ''}"
