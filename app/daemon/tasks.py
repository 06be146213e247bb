"""Run the daemon's tasks beside learning, such as the daily report.

Invariant: only the window of a report is stored. Each reading makes the report from the ledger
anew. So an old report holds no forgotten text, and its undo command works now.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from personalpeft import Busy, LearnReport, NotFound, PersonalPeftError, Runtime
from personalpeft.formatting import pluralize
from personalpeft.learning.activity_summary import ActivitySummary
from personalpeft_app.daemon.journal import ReportWindow, TaskKind
from personalpeft_app.daemon.settings import Settings


def run_task(kind: TaskKind, runtime: Runtime, settings: Settings, window: ReportWindow) -> str:
    """Run a task and return its result in a line, empty if it changed nothing.

    ``window`` is what a report is about. Raises what the runtime raises.
    """
    match kind:
        case TaskKind.PROBATION:
            return _review_probation(runtime)
        case TaskKind.BACKUP:
            return _back_up(runtime, settings)
        case TaskKind.COLLECT:
            garbage = runtime.collect_garbage()
            count = garbage.blobs + garbage.parts + garbage.sessions
            return f"{count} unused files deleted, {garbage.bytes:,} bytes" if count else ""
        case TaskKind.REPORT:
            summaries = runtime.activity_summaries(window.since, window.until)
            line = "; ".join(map(_format_summary, summaries))
            return f"{line}. Read it: personalpeft daemon report" if line else ""


def _review_probation(runtime: Runtime) -> str:
    ended: list[LearnReport] = []
    faults: list[PersonalPeftError] = []
    for summary in runtime.iter_users():
        if summary.revisions:
            # A learn reviews it too. A user may be forgotten after the page was read.
            try:
                ended += runtime.user(summary.id, create=False).review_probation()
            except (Busy, NotFound):
                continue
            except PersonalPeftError as error:
                # A damaged home of one user does not end the probations of the others.
                faults.append(error)
    if faults:
        raise faults[0]
    return "; ".join(f"{each.user} · {each.layer}: {each.reason}" for each in ended)


def _back_up(runtime: Runtime, settings: Settings) -> str:
    folder = runtime.settings.home / Path(settings.backup).expanduser()
    backup = runtime.maintenance.back_up(folder, keep=settings.backup_keep)
    missing = len(backup.missing)
    warning = f"; {missing} files are missing or damaged: run verify" if missing else ""
    return f"{backup.path.name} with {pluralize(backup.files, 'adapter')}{warning}"


def next_window(last: ReportWindow | None, now: datetime) -> ReportWindow:
    """Return the window from the end of the last one until now.

    Without a last window it is the last day; also if a clock was set back to before its end.
    """
    follows = last is not None and last.until <= now
    return ReportWindow(last.until if last and follows else now - timedelta(days=1), now)


def _format_summary(summary: ActivitySummary) -> str:
    """Return a user's part of the report, without any text of the user."""
    ends = [f"{report.layer} {report.outcome.text}" for report in summary.reports]
    turns = pluralize(summary.turns, "turn")
    signals = pluralize(sum(summary.signals.values()), "signal")
    return f"{summary.user}: {', '.join((turns, signals, *ends))}"
