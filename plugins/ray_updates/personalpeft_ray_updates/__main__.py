"""The command ``personalpeft-ray-updates``: data goes to stdout, progress and errors to stderr.

Invariant: the first Ctrl-C asks the workers to stop after their step, the second ends them at once.
What was recorded stays.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

import personalpeft
from personalpeft import DEFAULT_BASE, Cancelled, LearnReport, PersonalPeftError
from personalpeft_app.error_output import report_error
from personalpeft_app.interrupts import interruptible
from personalpeft_app.output import format_json, printable

if TYPE_CHECKING:
    from personalpeft_ray_updates import RunStatus, WorkerStatus

_option = partial(click.option, show_default=True)


@click.command("personalpeft-ray-updates", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("users", nargs=-1, metavar="[USER]...")
@click.option(
    "--all",
    "all_users",
    is_flag=True,
    help="Learn for all users of the home who have something to learn.",
)
@click.option("--home", metavar="FOLDER", help="The home folder.  [default: as for personalpeft]")
@_option("--base", metavar="NAME|PATH", envvar="PERSONALPEFT_BASE", default=DEFAULT_BASE)
@_option("--backend", metavar="NAME", default="torch", help="The backend that runs the base.")
@_option(
    "--workers",
    metavar="N",
    default=2,
    help="The most learns at once. Each has a process that loads the base.",
)
@_option(
    "--at-once",
    metavar="N",
    default=1,
    help="The most users that learn in one pass. 1 gives the bytes of learning alone.",
)
@_option("--cpus", metavar="N", default=1, help="CPUs of a node for each worker.")
@click.option(
    "--gpus",
    metavar="N",
    default=0.0,
    help="GPUs of a node for each worker, such as 0.5.  [default: 0]",
)
@_option(
    "--retries",
    metavar="N",
    default=3,
    help="How often a learn starts again after its process or node died.",
)
@_option(
    "--max-bundle-mb",
    metavar="MB",
    default=1024.0,
    help="The most MB of a user's ledger and adapters.",
)
@click.option("--seconds", type=float, help="Stop after this many seconds.")
@click.option(
    "--address",
    envvar="RAY_ADDRESS",
    help="The Ray cluster that this machine is part of, or 'auto'.  "
    "[default: RAY_ADDRESS, else a Ray of its own]",
)
@click.option("--json", "as_data", is_flag=True, help="Print reports and errors as JSON.")
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
def command(users: tuple[str, ...], all_users: bool, as_data: bool, **options: Any) -> None:
    """Learn for users of a home on the nodes of a Ray cluster.

    As `personalpeft learn` for each of them, on many machines. The nodes share no disk with the
    home. Each needs the same base. A node that dies costs the learns that ran on it, and they start
    again elsewhere. Prints a report for each user, in this order. Ctrl-C stops after the running
    step; what is recorded stays.
    """
    if all_users == bool(users):
        raise click.UsageError("Name users, or give --all.")
    code = 0
    try:
        reports = _learn(
            users, hidden=options.pop("quiet") or (as_data and not sys.stderr.isatty()), **options
        )
        if as_data:
            click.echo(format_json(reports))
        elif reports:
            click.echo(printable("\n\n".join(map(str, reports))))
        else:
            click.echo("No user has anything new to learn.", err=True)
        if any(report.error == "Cancelled" for report in reports):
            raise Cancelled(
                "Stopped; the reported revisions stay.",
                hint="The next run learns for the others.",
            )
    except PersonalPeftError as error:
        code = report_error(error, as_data=as_data)
    except KeyboardInterrupt:
        stopped = Cancelled("Stopped.", hint="What is recorded stays; run it again.")
        code = report_error(stopped, as_data=as_data)
    sys.exit(code)


def main() -> None:
    """Run the command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    command(prog_name="personalpeft-ray-updates")


def _learn(
    users: Sequence[str],
    *,
    hidden: bool,
    seconds: float | None,
    address: str | None,
    **options: Any,
) -> Sequence[LearnReport]:
    """Learn for users, or for all with something to learn, with progress on stderr."""
    with ExitStack() as within:
        display = within.enter_context(_Display(hidden=hidden))
        interrupted = within.enter_context(interruptible(display.show_stopping))
        users = users or _find_due_users(options["home"], options["base"], options["backend"])
        end = inf if seconds is None else time.monotonic() + seconds
        # Imported late, since Ray takes a second and a usage error above needs none.
        from personalpeft_ray_updates import learn_on_cluster
        from personalpeft_ray_updates.cluster import connect_ray

        if address is not None:
            within.enter_context(connect_ray(address=address))
        return learn_on_cluster(
            users,
            progress=display,
            cancelled=lambda: interrupted() or time.monotonic() > end,
            **options,
        )


def _find_due_users(home: str | None, base: str, backend: str) -> list[str]:
    """Return the users who have something to learn."""
    with personalpeft.open(home, base, backend, read_only=True) as runtime:
        users = [each.id for each in runtime.iter_users()]
        return [each for each in users if runtime.user(each, create=False).pending().triggers]


class _Display:
    """Print a line per finished user, and on a terminal a status line below them."""

    def __init__(self, *, hidden: bool) -> None:
        self._console = Console(stderr=True, quiet=hidden)
        self._status = self._console.status("Starting")
        self._num_shown = self._num_refusals = 0

    def __enter__(self) -> _Display:
        self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()

    def __call__(self, status: RunStatus) -> None:
        for report in status.reports[self._num_shown :]:
            self._num_shown += 1
            self._print(
                f"{self._num_shown} of {status.users}  {report.user}: {_format_report(report)}"
            )
        active = "; ".join(map(_format_worker, status.workers))
        lost = f"  ({status.lost} lost)" if status.lost else ""
        for node, why in list(status.refusals.items())[self._num_refusals :]:
            self._num_refusals += 1
            self._print(f"Node {node[:8]} is left out: {why}")
        # A Text, so that brackets in it are no markup.
        self._status.update(Text(f"{active or 'Waiting for workers'}{lost}"))

    def show_stopping(self) -> None:
        """Print what the first Ctrl-C does."""
        self._print("Stopping after this step; Ctrl-C again stops at once.")

    def _print(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def _format_report(report: LearnReport) -> str:
    parts = (report, *report.above)
    return "; ".join(
        f"{each.error}, {each.reason}"
        if each.error
        else f"{each.layer} {each.outcome.text}{f' ({each.revision})' if each.revision else ''}"
        for each in parts
    )


def _format_worker(worker: WorkerStatus) -> str:
    done = f" {worker.done:.0%}" if worker.done else ""
    return f"{worker.node[:8]}: {', '.join(worker.users)} {worker.stage.lower()}{done}"


if __name__ == "__main__":
    main()
