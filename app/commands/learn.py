"""Learning from what was said, and taking it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import click

from personalpeft.types import Scope
from personalpeft_app import opening
from personalpeft_app.interrupt import interruptible
from personalpeft_app.options import Common, command
from personalpeft_app.output import note, show
from personalpeft_app.progress import Display

if TYPE_CHECKING:
    from personalpeft import LearnReport, User

BASE = "base"


def study(common: Common, user: User, display: Display, layer: str = "style", **asked: Any) -> LearnReport:
    """Learns with a bar on stderr. The first Ctrl-C stops after the step that is running and keeps what was done."""

    def stopping() -> None:
        display.say("Stopping after this step; Ctrl-C again stops at once.")

    with interruptible(stopping) as cancelled, display:
        return user.learn(layer, progress=display, cancelled=cancelled, **asked)


@command(
    "learn",
    examples=(
        "personalpeft learn --dry-run",
        "personalpeft learn",
        "personalpeft learn --layer skill.email --seconds 60",
        "personalpeft learn --from-nothing --accept",
    ),
)
@click.option("--layer", default="style", show_default=True, help="What to learn: style or skill.NAME.")
@click.option("--dry-run", is_flag=True, help="Only say what would be learned.")
@click.option("--seconds", type=float, help="Stop training after so long; the next learn goes on from there.")
@click.option("--from-nothing", is_flag=True, help="Build from all lessons anew, not on what is live.")
@click.option("--accept", is_flag=True, help="Make the result live although it may be refused; that is recorded.")
def learn(common: Common, layer: str, dry_run: bool, seconds: float | None, from_nothing: bool, accept: bool) -> None:
    """Learn from the feedback that is new.

    The result is judged, and made live if it is better. Prints a report.
    A result that is not better is refused, which is no error: nothing changes then. Ctrl-C stops after the
    running step and keeps what was done for the next learn.
    """
    from personalpeft.ids import check_layer_name

    check_layer_name(layer)
    display = Display(common)
    with opening.user(common, "change", display) as user:
        start = "nothing" if from_nothing else "auto"
        report = study(common, user, display, layer, start=start, seconds=seconds, dry_run=dry_run, accept=accept)
    show(common, report.as_json(), str(report))


@command(
    "rollback",
    examples=(
        "personalpeft rollback style",
        "personalpeft rollback style --to style@69c31c",
        "personalpeft rollback style --to base",
    ),
)
@click.argument("layer")
@click.option(
    "--to",
    metavar="REVISION|base",
    help="A revision, the beginning of its id, or 'base' for none.  [default: the one before]",
)
def rollback(common: Common, layer: str, to: str | None) -> None:
    """Make an earlier revision of LAYER live.

    By default the one before the last change. Rolling back twice therefore undoes the rollback. Prints what is live now.
    """
    display = Display(common)
    with opening.user(common, "change", display) as user, display:
        move = user.rollback(layer, "previous" if to is None else None if to == BASE else to)
    show(common, move, move.after or BASE)
    note(common, f"{layer}: {move.before or 'the bare base'} -> {move.after or 'the bare base'}")


@command("weigh", examples=("personalpeft weigh style 0.5", "personalpeft weigh style 1"))
@click.argument("layer")
@click.argument("weight", type=float)
def weigh(common: Common, layer: str, weight: float) -> None:
    """Add LAYER more or less strongly from now on.

    WEIGHT goes from -2 to 2: 1 is the layer as it was learned, 0 leaves it out. Write a negative one after '--'.
    """
    with opening.user(common, "change") as user:
        user.weigh(layer, weight)
    show(common, {"user": user.id, "layer": layer, "weight": weight}, f"{layer} {weight:g}")


@command("scope", examples=("personalpeft scope skill.email near", "personalpeft scope style never"))
@click.argument("layer")
@click.argument("when", type=click.Choice(get_args(Scope)))
def scope(common: Common, layer: str, when: Scope) -> None:
    """Say WHEN a layer answers from now on.

    'always': every question. 'near': questions that are near the lessons that it was built from. 'never': none.
    A style always answers before you say so, a skill and the memory where a question is near.
    """
    with opening.user(common, "change") as user:
        user.scope(layer, when)
    show(common, {"user": user.id, "layer": layer, "scope": when}, f"{layer} {when}")
