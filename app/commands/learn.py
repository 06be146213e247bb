"""Learning from what was said, and taking it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import click

from personalpeft.errors import ERROR_CODES, Cancelled
from personalpeft.types import Scope
from personalpeft_app import session
from personalpeft_app.options import GlobalOptions, command
from personalpeft_app.output import emit, info
from personalpeft_app.progress import Display
from personalpeft_app.signals import interruptible

if TYPE_CHECKING:
    from personalpeft import LearnReport, Runtime, User

BASE = "base"


def run_learn(
    common: GlobalOptions, user: User, display: Display, layer: str | None = None, **asked: Any
) -> LearnReport:
    """Learns with a bar on stderr. The first Ctrl-C stops after the step that is running and keeps what was done."""
    with report_learn_errors(display) as cancelled:
        return user.learn(layer, progress=display, cancelled=cancelled, **asked)


@contextmanager
def report_learn_errors(display: Display) -> Iterator[Callable[[], bool]]:
    """Shows the bar while it trains, and asks for a stop after the step that is running with the first Ctrl-C."""

    def stopping() -> None:
        display.say("Stopping after this step; Ctrl-C again stops at once.")

    with interruptible(stopping) as cancelled, display:
        yield cancelled


@command(
    "learn",
    examples=(
        "personalpeft learn --dry-run",
        "personalpeft learn",
        "personalpeft learn --layer skill.email --seconds 60",
        "personalpeft learn --from-nothing --accept",
        "personalpeft learn --user ada --users bo --users cy",
        "personalpeft learn --all --json",
    ),
    renamed={"--also": "--users"},
)
@click.option(
    "--layer",
    help="What to learn: style, memory or skill.NAME.  [default: all that has something new]",
)
@click.option(
    "--users",
    "others",
    multiple=True,
    metavar="ID",
    help="Somebody who learns in the same go; can be repeated.",
)
@click.option("--all", "everybody", is_flag=True, help="All users of this home learn in one go.")
@click.option("--dry-run", is_flag=True, help="Only say what would be learned.")
@click.option(
    "--seconds", type=float, help="Stop training after so long; the next learn goes on from there."
)
@click.option(
    "--steps",
    type=int,
    help="Stop training after so many steps; the next learn goes on from there.",
)
@click.option(
    "--memory", type=float, metavar="MB", help="Train in at most so much memory beside the base."
)
@click.option(
    "--from-nothing", is_flag=True, help="Build from all lessons anew, not on what is live."
)
@click.option(
    "--accept",
    is_flag=True,
    help="Make the result live although it may be refused; that is recorded.",
)
def learn(
    common: GlobalOptions,
    layer: str | None,
    others: tuple[str, ...],
    everybody: bool,
    from_nothing: bool,
    **asked: Any,
) -> None:
    """Learn from the feedback that is new.

    Goes through all layers, or the one that is named. The result is judged, and made live if it is better; what was built
    on a layer that has changed is judged again. Prints a report.
    A result that is not better is refused, which is no error: nothing changes then. Ctrl-C stops after the
    running step and keeps what was done for the next learn.
    With --users or --all several users learn in one go, which is quicker than one after another. What one of them cannot
    do is said in their report and fails nobody else; --json then prints a list.
    """
    from personalpeft.ids import check_layer_name

    if layer is not None:
        check_layer_name(layer)
    display = Display(common)
    asked["start"] = "nothing" if from_nothing else "auto"
    if not (others or everybody):
        with session.open_user(common, "change", display) as user:
            report = run_learn(common, user, display, layer, **asked)
        emit(common, report.as_json(), str(report))
        return
    with (
        session.open_runtime(common, "change", display) as runtime,
        report_learn_errors(display) as cancelled,
    ):
        users = (
            _all_users(runtime) if everybody else list(dict.fromkeys((common.user_id(), *others)))
        )
        reports = runtime.learn_many(users, layer, progress=display, cancelled=cancelled, **asked)
        was_stopped = cancelled()
    # Of everybody in a home, those who have nothing new are many and of no interest.
    told = [report for report in reports if not (everybody and report.error == "NothingToLearn")]
    emit(common, [report.as_json() for report in told], "\n\n".join(map(str, told)))
    if everybody and not told:
        info(common, "Nobody has anything new to learn.")
    if was_stopped:
        raise Cancelled(
            "Stopped; what is reported as learned stays.", hint="The next learn goes on from there."
        )
    if told and not everybody and all(report.error for report in told):
        kind = next(kind for kind in ERROR_CODES if kind.__name__ == told[0].error)
        raise kind("Nobody of those who were named has learned.", hint="Each report says why.")


def _all_users(runtime: Runtime) -> list[str]:
    users: list[str] = []
    while page := runtime.users(after=users[-1] if users else None):
        users += [user.id for user in page]
    return users


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
def rollback(common: GlobalOptions, layer: str, to: str | None) -> None:
    """Make an earlier revision of LAYER live.

    By default the one before the last change. Rolling back twice therefore undoes the rollback. Prints what is live now.
    """
    display = Display(common)
    with session.open_user(common, "change", display) as user, display:
        move = user.rollback(layer, "previous" if to is None else None if to == BASE else to)
    emit(common, move, move.after or BASE)
    info(common, f"{layer}: {move.before or 'the bare base'} -> {move.after or 'the bare base'}")


@command(
    "set-weight", examples=("personalpeft set-weight style 0.5", "personalpeft set-weight style 1")
)
@click.argument("layer")
@click.argument("weight", type=float)
def set_weight(common: GlobalOptions, layer: str, weight: float) -> None:
    """Add LAYER more or less strongly from now on.

    WEIGHT goes from -2 to 2: 1 is the layer as it was learned, 0 leaves it out. Write a negative one after '--'.
    """
    with session.open_user(common, "change") as user:
        user.set_weight(layer, weight)
    emit(common, {"user": user.id, "layer": layer, "weight": weight}, f"{layer} {weight:g}")


@command(
    "scope", examples=("personalpeft scope skill.email near", "personalpeft scope style never")
)
@click.argument("layer")
@click.argument("when", type=click.Choice(get_args(Scope)))
def scope(common: GlobalOptions, layer: str, when: Scope) -> None:
    """Say WHEN a layer answers from now on.

    'always': every question. 'near': questions that are near the lessons that it was built from. 'never': none.
    A style always answers before you say so, a skill and the memory where a question is near.
    """
    with session.open_user(common, "change") as user:
        user.scope(layer, when)
    emit(common, {"user": user.id, "layer": layer, "scope": when}, f"{layer} {when}")
