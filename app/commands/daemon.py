"""Commands of the daemon. It learns while the machine is idle."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING

import click

import personalpeft
from personalpeft import host
from personalpeft.errors import Busy, InvalidInput, PersonalPeftError
from personalpeft_app import session
from personalpeft_app.daemon import TASK
from personalpeft_app.error_output import report_error
from personalpeft_app.interrupts import interruptible
from personalpeft_app.options import GlobalOptions, Group, command
from personalpeft_app.output import emit, format_json, format_table, format_time, info, printable

if TYPE_CHECKING:
    from personalpeft_app.daemon.journal import LogEntry
    from personalpeft_app.daemon.policy import Upcoming

_LEASE_SECONDS = 5.0
_MAX_ENTRIES = 12


@click.group(
    "daemon",
    cls=Group,
    examples=(
        "daemon run",
        "daemon status",
        "daemon report",
        "daemon run-once --json",
        "daemon install > ~/.config/systemd/user/personalpeft.service",
    ),
    renamed={"once": "run-once"},
)
def daemon() -> None:
    """Learn on a schedule, while the machine is idle.

    Looks after a home. Users with new feedback learn one after another while the machine is idle,
    within a budget. It also makes backups, deletes unused files and writes a daily report. Set it
    up in config.toml in the home.
    """


@command("run", examples=("daemon run", "daemon run --json >> daemon.log"))
def run(common: GlobalOptions) -> None:
    """Learn, back up and clean up on schedule until stopped.

    Prints a line for each action. Ctrl-C or SIGTERM ends it between two steps and keeps the work
    done. It waits while another daemon runs on the same home.
    """
    from personalpeft_app.daemon.machine import lower_priority
    from personalpeft_app.daemon.poll_loop import run_every
    from personalpeft_app.daemon.settings import read_settings
    from personalpeft_app.daemon.worker import Worker

    stopping = threading.Event()
    settings = read_settings(common.paths()[0])
    with (
        interruptible(stopping.set),
        interruptible(stopping.set, SIGTERM),
        session.open_runtime(common, "make") as runtime,
    ):
        lease = _acquire_lease(common, runtime, stopping)
        if lease is None:
            return
        with lease:
            lower_priority()
            worker = Worker(
                runtime,
                partial(session.open_runtime, common, "change"),
                tell=lambda entry: _print_entry(common, entry),
                stopping=stopping.is_set,
            )
            reported = ""

            def work() -> None:
                nonlocal reported
                before, reported = reported, ""
                try:
                    worker.run_once()
                except PersonalPeftError as error:
                    # The home itself fails: a full disk, a missing folder. It may recover.
                    reported = error.message
                    if reported != before:
                        report_error(error, as_data=False)

            info(common, f"Running on {runtime.settings.home}; Ctrl-C ends it.")
            run_every(settings.poll_seconds, work, stopping)
    info(common, "Stopped.")


@command("run-once", examples=("daemon run-once", "daemon run-once --json"))
def once(common: GlobalOptions) -> None:
    """Run the actions that are due now, and end.

    For a scheduler of your own. Requests, a battery or heat delay a learn here too.
    Ctrl-C or SIGTERM ends it between two steps.
    """
    from personalpeft_app.daemon.settings import read_settings
    from personalpeft_app.daemon.worker import Worker

    done: list[LogEntry] = []
    stopping = threading.Event()
    read_settings(common.paths()[0])  # An invalid setting fails here, before any work.
    open_learning = partial(session.open_runtime, common, "change")
    with (
        interruptible(stopping.set),
        interruptible(stopping.set, SIGTERM),
        open_learning() as runtime,
        runtime.maintenance.exclusive(TASK),
    ):
        worker = Worker(runtime, open_learning, tell=done.append, stopping=stopping.is_set)
        decision = worker.run_once()
    text = "\n".join(map(_format_entry, done))
    emit(common, {"did": done, "next": decision.upcoming}, text)
    if not done:
        waits = any(each.blocked_by for each in decision.upcoming)
        info(common, "What is due cannot start yet." if waits else "Nothing was due.")
    if decision.upcoming:
        action, when, reason = _format_upcoming(decision.upcoming[0])
        info(common, f"Next: {action}, {when} ({reason}).")


@command("status", examples=("daemon status", "daemon status --json"))
def status(common: GlobalOptions) -> None:
    """Show what the daemon did, and what comes next and why.

    Works beside a running daemon. Changes nothing.
    """
    from personalpeft_app.daemon.worker import Worker

    with session.open_runtime(common, "read") as runtime:
        worker = Worker(runtime, partial(session.open_runtime, common, "change"))
        decision, holder = worker.preview(), runtime.maintenance.holder(TASK)
        spent, entries = worker.spent, worker.journal.entries
        # Without a daemon, what the journal calls started was cut off.
        started = worker.journal.started if holder else {}
        running = {user: runtime.user(user, create=False).training_status() for user in started}
    learns = [f"{user} learns{_format_progress(each)}" for user, each in running.items()]
    due = decision.action
    now = "; ".join(learns) or (f"{due.name} is due: {due.reason}" if due else "nothing is due")
    data = {
        "running": holder,
        "learning": list(running),
        "underway": running,
        "due": due,
        "next": decision.upcoming,
        "spent_today": round(spent, 1),
        "did": entries,
    }
    text = [
        f"daemon   {holder or 'not running'}",
        f"now      {now}",
        f"today    {spent / 60:.1f} minutes of learning",
    ]
    coming = format_table(
        ("NEXT", "WHEN", "WHY"),
        [_format_upcoming(each) for each in decision.upcoming],
        flexible=(2,),
    )
    text += ["", coming] if coming else []
    text += ["", *map(_format_entry, entries[-_MAX_ENTRIES:])] if entries else []
    emit(common, data, "\n".join(text))


@command("report", examples=("daemon report", "daemon report --json"))
def report(common: GlobalOptions) -> None:
    """Print the last daily report.

    It lists each learn of each user: sources, answers before and after, scores, seconds, and how to
    undo it. Refusals have their reasons. For any other time: personalpeft activity --since.
    """
    from personalpeft_app.daemon.journal import from_text

    with session.open_runtime(common, "read") as runtime:
        window = from_text(runtime.maintenance.read_note(TASK)).last_report
        summaries = runtime.activity_summaries(window.since, window.until) if window else ()
    data = {
        "since": window.since if window else None,
        "until": window.until if window else None,
        "users": summaries,
    }
    empty = "There is no daily report yet: a daemon writes one after a day with activity."
    emit(common, data, "\n\n".join(each.in_full() for each in summaries), empty=empty)


@command(
    "install",
    examples=(
        "daemon install > ~/.config/systemd/user/personalpeft.service",
        "daemon install --as launchd > ~/Library/LaunchAgents/personalpeft.plist",
    ),
)
@click.option("--print", is_flag=True, hidden=True, expose_value=False)  # For old scripts.
@click.option(
    "--as",
    "system",
    type=click.Choice(["systemd", "launchd"]),
    help="The system to write for.  [default: launchd on macOS, systemd on Linux]",
)
def install(common: GlobalOptions, system: str | None) -> None:
    """Print the file that starts the daemon with your session.

    It is a systemd user unit or a launchd agent, with the current home and base. Save it where its
    first lines say.
    """
    from personalpeft.settings import CACHE, KEYS, LEARNING_DEVICE, PASSPHRASE, PLUGINS, WEIGHTS
    from personalpeft_app.daemon import units

    home, cache = common.paths()
    words = [sys.executable, "-m", "personalpeft_app"]
    words += ["--home", str(home), "--base", common.base_name()]
    words += ["--backend", common.backend] if common.backend else []
    environment = {CACHE: str(cache)} if os.environ.get(CACHE) else {}
    for name in (KEYS, PLUGINS, WEIGHTS, LEARNING_DEVICE):
        if os.environ.get(name):
            environment[name] = os.environ[name]
    if KEYS in environment:
        environment[KEYS] = str(Path(environment[KEYS]).expanduser().resolve())
    if os.environ.get(PASSPHRASE):
        info(common, f"Add {PASSPHRASE} by hand: the file here is printed for all to read.")
    system = system or host.service_manager()
    if not system:
        raise InvalidInput(
            "There is no such file for this system.",
            hint="Let its scheduler run: personalpeft daemon run-once. Or name a system with --as.",
        )
    make = units.launchd if system == "launchd" else units.systemd
    text = make([*words, "daemon", "run"], environment)
    emit(common, {"as": system, "file": text}, text.rstrip("\n"))


daemon.add_section("Run", (run, once))
daemon.add_section("Inspect", (report, status, install))


def _acquire_lease(
    common: GlobalOptions, runtime: personalpeft.Runtime, stopping: threading.Event
) -> ExitStack | None:
    """Wait for the lease of the home. Return None if the process is to end first."""
    lease, told = ExitStack(), False
    while not stopping.is_set():
        try:
            lease.enter_context(runtime.maintenance.exclusive(TASK))
            return lease
        except Busy as error:
            if not told:
                info(common, f"Waiting for the other daemon of this home. {error.message}")
            told = True
            stopping.wait(_LEASE_SECONDS)
    return None


def _print_entry(common: GlobalOptions, entry: LogEntry) -> None:
    click.echo(format_json(entry, indent=None) if common.json else printable(_format_entry(entry)))


def _format_entry(entry: LogEntry) -> str:
    user = f" {entry.user}" if entry.user else ""
    seconds = f" ({entry.seconds:g} s)" if entry.seconds >= 1 else ""
    at = format_time(datetime.fromisoformat(entry.at))
    return f"{at}  {entry.kind}{user}: {entry.message}{seconds}"


def _format_progress(status: personalpeft.TrainingStatus | None) -> str:
    if status is None or not status.stage:
        return ""
    steps = f", {status.step} of {status.steps}" if status.steps else ""
    return f" ({status.layer}: {status.stage.lower()}{steps})"


def _format_upcoming(upcoming: Upcoming) -> tuple[str, str, str]:
    when = format_time(upcoming.at) if upcoming.at else "when it can"
    return upcoming.action, when, upcoming.reason
