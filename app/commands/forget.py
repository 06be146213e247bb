"""Taking something back for good."""

from __future__ import annotations

import sys

import click

from personalpeft_app import session
from personalpeft_app.options import GlobalOptions, command
from personalpeft_app.output import emit
from personalpeft_app.progress import Display
from personalpeft_app.signals import interruptible


@command(
    "forget",
    examples=(
        "personalpeft forget s_01k2 --dry-run",
        "personalpeft forget last",
        "personalpeft forget s_01k2 --yes --json",
    ),
)
@click.argument("item")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--later", is_flag=True, help="Destroy now; the next learn builds what is missing.")
@click.option("--yes", is_flag=True, help="Do not ask first.")
def forget(common: GlobalOptions, item: str, dry_run: bool, later: bool, yes: bool) -> None:
    """Destroy a turn, a fact, a rule or other feedback, for good.

    ITEM is its id, as turns, lessons and memory list it, the beginning of one, or "last" for the newest turn. Its words go from
    every file of the home, with each revision that was built from them; what was live is built again without it. Nothing
    brings it back. Backups and exported files are not reached.

    On a terminal it shows what would go and asks. Ctrl-C while it builds stops the building alone.
    """
    display = Display(common)
    with session.open_user(common, "read" if dry_run else "change", display) as user:
        if not (dry_run or yes):
            if common.json or not sys.stdin.isatty():
                raise click.UsageError(
                    "Nothing brings back what is forgotten: say --yes, or --dry-run to look first."
                )
            click.echo(str(user.forget(item, dry_run=True)), err=True)
            click.confirm("Forget this for good?", abort=True, err=True)

        def stopping() -> None:
            display.say("It is destroyed already; the building stops after this step.")

        with interruptible(stopping) as cancelled, display:
            report = user.forget(
                item, rebuild=not later, dry_run=dry_run, progress=display, cancelled=cancelled
            )
    emit(common, report, str(report))
