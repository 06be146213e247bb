"""What is done beside learning: each chore does its work and says in a line what came of it; empty where that is nothing."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from personalpeft import Busy, Runtime
from personalpeft_app.daemon.backlog import list_users
from personalpeft_app.daemon.daily_report import ReportWindow, format_line, summarize_users
from personalpeft_app.daemon.policy import TaskKind
from personalpeft_app.daemon.settings import Settings

_LOGS = timedelta(days=30)


def run_task(
    kind: TaskKind, runtime: Runtime, settings: Settings, now: datetime, reported: ReportWindow
) -> str:
    """Does a chore; ``reported`` is what a report is to be about. Raises what the runtime raises."""
    match kind:
        case TaskKind.PROBATION:
            return _probation(runtime)
        case TaskKind.BACKUP:
            return _backup(runtime, settings)
        case TaskKind.COLLECT:
            found = runtime.collect_garbage()
            taken = found.blobs + found.parts + found.sessions
            return f"{taken} files that nothing needs, {found.bytes:,} bytes" if taken else ""
        case TaskKind.CLEAN:
            return _clean(runtime.settings.cache, now)
        case TaskKind.REPORT:
            return _report(runtime, reported)


def _probation(runtime: Runtime) -> str:
    ended = []
    for summary in list_users(runtime):
        if summary.revisions:
            with suppress(Busy):  # Whoever learns looks too.
                ended += runtime.user(summary.id, create=False).review()
    return "; ".join(f"{each.user} · {each.layer}: {each.reason}" for each in ended)


def _backup(runtime: Runtime, settings: Settings) -> str:
    made = runtime.maintenance.back_up(
        runtime.settings.home / Path(settings.backup).expanduser(), keep=settings.backup_keep
    )
    missing = (
        f"; {len(made.missing)} files are missing or damaged: run verify" if made.missing else ""
    )
    return f"{made.path.name} with {made.files} adapters{missing}"


def _clean(cache: Path, now: datetime) -> str:
    """What bugs left behind, and nobody sent in."""
    taken = 0
    with suppress(OSError):
        for path in (cache / "logs").glob("bug-*.log"):
            with suppress(OSError):
                if path.stat().st_mtime < (now - _LOGS).timestamp():
                    path.unlink()
                    taken += 1
    return f"{taken} old logs" if taken else ""


def _report(runtime: Runtime, period: ReportWindow) -> str:
    told = format_line(summarize_users(runtime, period))
    return f"{told}. Read it: personalpeft daemon report" if told else ""
