"""Learning by itself, when there is something to learn and the moment is right."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import AbstractContextManager
from signal import SIGTERM
from typing import TYPE_CHECKING

import click

from personalpeft.errors import Busy, PersonalPeftError
from personalpeft_app import session
from personalpeft_app.options import GlobalOptions, Group, command, global_options
from personalpeft_app.output import emit, format_json, format_table, info, printable
from personalpeft_app.signals import interruptible

if TYPE_CHECKING:
    from personalpeft import Runtime
    from personalpeft.learning.training_status import TrainingStatus
    from personalpeft_app.daemon.journal import LogEntry
    from personalpeft_app.daemon.policy import LearnUser, Task, Upcoming

_LOOK = 5.0
_SHOWN = 12


@click.group(
    "daemon",
    cls=Group,
    no_args_is_help=True,
    examples=(
        "personalpeft daemon run",
        "personalpeft daemon status",
        "personalpeft daemon report",
        "personalpeft daemon run-once --json",
        "personalpeft daemon install --print > ~/.config/systemd/user/personalpeft.service",
    ),
    renamed={"once": "run-once"},
)
@global_options
def daemon() -> None:
    """Learn when the moment is right.

    Looks after a home: everybody who has something new learns while nobody needs the machine, one after another, within
    a budget. Makes copies, takes away what nothing needs, sums up the night in the morning. It is set in config.toml in the
    home.
    """


@command(
    "run", examples=("personalpeft daemon run", "personalpeft daemon run --json >> daemon.log")
)
def run(common: GlobalOptions) -> None:
    """Look after the home until stopped.

    Prints a line for each thing that it did. Ctrl-C or SIGTERM ends it between two steps; what was done is kept. Where
    another daemon looks after the same home, it waits until that one has ended.
    """
    from personalpeft_app.daemon.poll_loop import PollLoop
    from personalpeft_app.daemon.probes import lower_priority
    from personalpeft_app.daemon.settings import read_settings
    from personalpeft_app.daemon.worker import Worker

    stopping = threading.Event()
    settings = read_settings(common.paths()[0])
    with (
        interruptible(stopping.set),
        interruptible(stopping.set, SIGTERM),
        session.open_runtime(common, "make") as runtime,
    ):
        lease = _our_turn(common, runtime, stopping)
        if lease is None:
            return
        with lease:
            lower_priority()
            keeper = Worker(
                runtime,
                lambda: _learning(common),
                tell=lambda line: _print_entry(common, line),
                stopping=stopping.is_set,
            )
            said = ""

            def work() -> None:
                nonlocal said
                try:
                    keeper.run_once()
                    said = ""
                except PersonalPeftError as error:
                    # The home itself: a full disk, a folder that went away. It may come back, so it is only said.
                    if error.message != said:
                        said = error.message
                        click.echo(
                            f"error: {printable(error.message)}\nhint: {printable(error.hint)}",
                            err=True,
                        )

            info(common, f"Looking after {runtime.settings.home}; Ctrl-C ends it.")
            PollLoop(work, settings.poll_seconds).run(stopping)
    info(common, "Ended.")


@command(
    "run-once",
    examples=("personalpeft daemon run-once", "personalpeft daemon run-once --json"),
)
def once(common: GlobalOptions) -> None:
    """Do what is due now, and end.

    For a scheduler of your own. What hinders a learn (people who ask, a battery, heat) hinders this one too.
    Ctrl-C or SIGTERM ends it between two steps.
    """
    from personalpeft_app.daemon.journal import TASK
    from personalpeft_app.daemon.settings import read_settings
    from personalpeft_app.daemon.worker import Worker

    done: list[LogEntry] = []
    stopping = threading.Event()
    read_settings(common.paths()[0])  # An invalid setting fails here, before any work.
    with (
        interruptible(stopping.set),
        interruptible(stopping.set, SIGTERM),
        _learning(common) as runtime,
        runtime.maintenance.exclusive(TASK),
    ):
        keeper = Worker(
            runtime, lambda: _learning(common), tell=done.append, stopping=stopping.is_set
        )
        decision = keeper.run_once()
    emit(common, {"did": done, "next": decision.upcoming}, "\n".join(map(_line, done)))
    if not done:
        info(common, "Nothing was due.")
    _note_next(common, decision.upcoming)


@command("status", examples=("personalpeft daemon status", "personalpeft daemon status --json"))
def status(common: GlobalOptions) -> None:
    """Say what was done, and what comes next and why.

    Also from beside a daemon that runs. Changes nothing.
    """
    from personalpeft_app.daemon.journal import TASK
    from personalpeft_app.daemon.settings import read_settings
    from personalpeft_app.daemon.worker import Worker

    read_settings(common.paths()[0])  # An invalid setting fails here, before any work.
    with session.open_runtime(common, "read") as runtime:
        keeper = Worker(runtime, lambda: _learning(common))
        decision, holder = keeper.preview(), runtime.maintenance.holder(TASK)
        begun, spent, lines = keeper.journal.started, keeper.spent, keeper.journal.entries
        # Of who was cut off with the process that did it nothing is under way.
        doing = (
            {user: runtime.user(user, create=False).training_status() for user in begun}
            if holder
            else {}
        )
    now = "; ".join(
        f"{user} learns{_how_far(learning)}" for user, learning in doing.items()
    ) or _act(decision.action)
    data = {
        "running": holder,
        "learning": list(doing),
        "underway": doing,
        "due": decision.action,
        "next": decision.upcoming,
        "spent_today": round(spent, 1),
        "did": lines,
    }
    text = [
        f"daemon   {holder or 'not running'}",
        f"now      {now}",
        f"today    {spent / 60:.1f} minutes of learning",
    ]
    coming = format_table(
        ("NEXT", "WHEN", "WHY"), [_next(each) for each in decision.upcoming], flexible=(2,)
    )
    text += ["", coming] if coming else []
    text += ["", *map(_line, lines[-_SHOWN:])] if lines else []
    emit(common, data, "\n".join(text))


@command("report", examples=("personalpeft daemon report", "personalpeft daemon report --json"))
def report(common: GlobalOptions) -> None:
    """Say what was learned in the night.

    The last morning report, of all users of the home: each learn with all that it was learned from, answers before and
    after, scores and seconds, what was refused and why, and how to undo each. Any other while: personalpeft report --since.
    """
    from personalpeft_app.daemon.daily_report import summarize_users
    from personalpeft_app.daemon.journal import TASK, from_text

    with session.open_runtime(common, "read") as runtime:
        period = from_text(runtime.maintenance.read_note(TASK)).last_report
        found = summarize_users(runtime, period) if period else []
    data = {
        "since": period.since if period else None,
        "until": period.until if period else None,
        "users": [each.as_json() for each in found],
    }
    emit(common, data, "\n\n".join(each.in_full() for each in found))
    if not found:
        info(
            common,
            "There is no morning report yet: it is made daily by a daemon, where there is something to say.",
        )


@command(
    "install",
    examples=(
        "personalpeft daemon install --print > ~/.config/systemd/user/personalpeft.service",
        "personalpeft daemon install --print --as launchd > ~/Library/LaunchAgents/personalpeft.plist",
    ),
)
@click.option("--print", "printed", is_flag=True, help="Print the file; it says where it belongs.")
@click.option(
    "--as",
    "system",
    type=click.Choice(["systemd", "launchd"]),
    help="Whose file.  [default: launchd on macOS, else systemd]",
)
def install(common: GlobalOptions, printed: bool, system: str | None) -> None:
    """Print what starts the daemon with your session.

    A systemd user unit or a launchd agent, with the home and the base as they are now. Changes nothing by itself: save what
    it prints where its first lines say.
    """
    from personalpeft.settings import CACHE
    from personalpeft_app.daemon import units

    if not printed:
        raise click.UsageError(
            "It only prints the file: add --print, and save it where its first lines say."
        )
    home, cache = common.paths()
    words = [
        sys.executable,
        "-m",
        "personalpeft_app",
        "--home",
        str(home),
        "--base",
        common.base_name(),
    ]
    words += ["--backend", common.backend] if common.backend else []
    environment = {CACHE: str(cache)} if os.environ.get(CACHE) else {}
    system = system or ("launchd" if sys.platform == "darwin" else "systemd")
    make = units.launchd if system == "launchd" else units.systemd
    text = make([*words, "daemon", "run"], environment)
    emit(common, {"as": system, "file": text}, text.rstrip("\n"))


daemon.add_section("Run", (run, once))
daemon.add_section("Look", (report, status, install))


def _learning(common: GlobalOptions) -> AbstractContextManager[Runtime]:
    return session.open_runtime(common, "change")


def _our_turn(
    common: GlobalOptions, runtime: Runtime, stopping: threading.Event
) -> AbstractContextManager[None] | None:
    """The lease of the home, held, once whoever had it has let go; None where this process is to end first."""
    from contextlib import ExitStack

    from personalpeft_app.daemon.journal import TASK

    said = False
    while not stopping.is_set():
        held = ExitStack()
        try:
            held.enter_context(runtime.maintenance.exclusive(TASK))
        except Busy as error:
            if not said:
                said = True
                info(
                    common,
                    f"Another daemon looks after this home, so this one waits. {error.message}",
                )
            stopping.wait(_LOOK)
            continue
        return held
    return None


def _print_entry(common: GlobalOptions, line: LogEntry) -> None:
    click.echo(format_json(line, indent=None) if common.json else printable(_line(line)))


def _line(line: LogEntry) -> str:
    whom = f" {line.user}" if line.user else ""
    took = f" ({line.seconds:g} s)" if line.seconds >= 1 else ""
    return f"{line.at}  {line.kind}{whom}: {line.message}{took}"


def _act(act: LearnUser | Task | None) -> str:
    from personalpeft_app.daemon.policy import LearnUser

    if act is None:
        return "nothing is due"
    return (
        f"{act.user} is to learn: {act.reason}"
        if isinstance(act, LearnUser)
        else f"{act.kind} is due: {act.reason}"
    )


def _how_far(learning: TrainingStatus | None) -> str:
    if learning is None or not learning.stage:
        return ""
    steps = f", {learning.step} of {learning.steps}" if learning.steps else ""
    return f" ({learning.layer}: {learning.stage.lower()}{steps})"


def _next(coming: Upcoming) -> tuple[str, str, str]:
    when = coming.at.astimezone().strftime("%Y-%m-%d %H:%M") if coming.at else "when it can"
    return str(coming.action), when, coming.reason


def _note_next(common: GlobalOptions, coming: tuple[Upcoming, ...]) -> None:
    if coming:
        what, when, why = _next(coming[0])
        info(common, f"Next: {what}, {when} ({why}).")
