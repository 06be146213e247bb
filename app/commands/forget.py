"""The command that erases for good."""

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
@click.option("--dry-run", is_flag=True, help="Only list what would be destroyed.")
@click.option("--later", is_flag=True, help="Destroy now, and rebuild with the next learn.")
@click.option("--yes", is_flag=True, help="Do not ask first.")
def forget(common: GlobalOptions, item: str, dry_run: bool, later: bool, yes: bool) -> None:
    """Destroy a turn, a fact, a rule or other feedback, for good.

    ITEM is an id that turns, lessons or memory lists, its beginning, or "last" for the newest turn.
    Its text is deleted from every file of the home, with each revision trained on it. Live layers
    are rebuilt without it. This cannot be undone. Backups and exported files are not changed.

    On a terminal it lists what would be destroyed and asks. Ctrl-C stops only the rebuilding.
    """
    display = Display(common)
    with session.open_user(common, "read" if dry_run else "change", display) as user:
        if not (dry_run or yes):
            if common.json or not sys.stdin.isatty():
                raise click.UsageError("This cannot be undone. Give --yes, or --dry-run to look.")
            click.echo(str(user.forget(item, dry_run=True)), err=True)
            click.confirm("Forget this for good?", abort=True, err=True)

        def notify() -> None:
            display.print("It is destroyed; rebuilding stops after this step.")

        with interruptible(notify) as cancelled, display:
            report = user.forget(
                item, rebuild=not later, dry_run=dry_run, progress=display, cancelled=cancelled
            )
    emit(common, report, str(report))
