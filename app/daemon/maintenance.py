"""Run the daemon's tasks beside learning."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from personalpeft import Busy, Runtime
from personalpeft_app.daemon.daily_report import ReportWindow, format_line, summarize_users
from personalpeft_app.daemon.policy import TaskKind
from personalpeft_app.daemon.settings import Settings
from personalpeft_app.session import iterate_users

_MAX_LOG_AGE = timedelta(days=30)


def run_task(
    kind: TaskKind, runtime: Runtime, settings: Settings, now: datetime, window: ReportWindow
) -> str:
    """Run a task and return its result in a line, empty if it changed nothing.

    Raises what the runtime raises.

    Args:
        window: What a report is about.
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
        case TaskKind.CLEAN:
            return _delete_old_logs(runtime.settings.cache, now)
        case TaskKind.REPORT:
            line = format_line(summarize_users(runtime, window))
            return f"{line}. Read it: personalpeft daemon report" if line else ""


def _review_probation(runtime: Runtime) -> str:
    ended = []
    for summary in iterate_users(runtime):
        if summary.revisions:
            with suppress(Busy):  # A learn reviews it too.
                ended += runtime.user(summary.id, create=False).review()
    return "; ".join(f"{each.user} · {each.layer}: {each.reason}" for each in ended)


def _back_up(runtime: Runtime, settings: Settings) -> str:
    folder = runtime.settings.home / Path(settings.backup).expanduser()
    backup = runtime.maintenance.back_up(folder, keep=settings.backup_keep)
    missing = len(backup.missing)
    warning = f"; {missing} files are missing or damaged: run verify" if missing else ""
    return f"{backup.path.name} with {backup.files} adapters{warning}"


def _delete_old_logs(cache: Path, now: datetime) -> str:
    """Delete logs of bugs that were not reported."""
    count = 0
    with suppress(OSError):
        for path in (cache / "logs").glob("bug-*.log"):
            with suppress(OSError):
                if path.stat().st_mtime < (now - _MAX_LOG_AGE).timestamp():
                    path.unlink()
                    count += 1
    return f"{count} old logs deleted" if count else ""
