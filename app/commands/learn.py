"""Commands that learn and change the live layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import click

import personalpeft
from personalpeft.errors import ERROR_CODES, Cancelled
from personalpeft.learning.outcomes import MoveCause
from personalpeft.types import Scope
from personalpeft_app import session
from personalpeft_app.interrupts import long_call
from personalpeft_app.options import GlobalOptions, command, flag
from personalpeft_app.output import emit, info

BASE = "base"


def run_learn(
    common: GlobalOptions, user: personalpeft.User, layer: str | None = None, **options: Any
) -> personalpeft.LearnReport:
    """Learn with a progress bar. The first Ctrl-C stops after the running step."""
    with long_call(common) as watched:
        return user.learn(layer, **watched, **options)


def _training_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the limits of a training, and whether its result is accepted."""
    limit = "Train for at most this {}."
    memory = "The most memory that training may take beside the base."
    accept = "Make the result live even if the gate refuses it; that is recorded."
    for option in (
        flag("--accept", help=accept),
        click.option("--max-memory-mb", type=float, metavar="MB", help=memory),
        click.option("--steps", type=int, help=limit.format("number of steps")),
        click.option("--seconds", type=float, help=limit.format("time")),
    ):
        function = option(function)
    return function


@command(
    "learn",
    examples=(
        "learn --dry-run",
        "learn",
        "learn --layer skill.email --seconds 60",
        "learn --from-scratch --accept",
        "learn --user ada --users bo --users cy",
        "learn --all --json",
    ),
    renamed={
        "--also": "--users",
        "--from-nothing": "--from-scratch",
        "--memory": "--max-memory-mb",
    },
    surplus="Did you mean --layer {}?",
)
@click.option(
    "--layer",
    help="The layer: style, memory or skill.NAME.  [default: all with new feedback]",
)
@click.option(
    "--users",
    "others",
    multiple=True,
    metavar="ID",
    help="Another user who learns too; can be repeated.",
)
@flag("--all", "all_users", help="All users of this home learn together.")
@flag("--dry-run", help="Only report what would be learned.")
@flag("--from-scratch", help="Build from all lessons anew, not on the live revision.")
@_training_options
def learn(
    common: GlobalOptions,
    layer: str | None,
    others: tuple[str, ...],
    all_users: bool,
    from_scratch: bool,
    **options: Any,
) -> None:
    """Learn from new feedback, and print a report.

    It builds each layer, or the one that --layer names. A gate judges the result and makes it live
    if it is better. A refusal is no error and changes nothing. Layers above a changed one are
    judged again.

    Ctrl-C, --seconds and --steps stop after the running step. The next learn continues from there.

    With --users or --all several users learn together, which is faster than one after another. An
    error of one user is in that user's report and stops no other; --json then prints a list.
    """
    from personalpeft.ids import check_layer_name

    if layer is not None:
        check_layer_name(layer)
    options["start"] = "scratch" if from_scratch else "auto"
    if not (others or all_users):
        with session.open_user(common, "change") as user:
            report = run_learn(common, user, layer, **options)
        emit(common, report, str(report))
        return
    with session.open_runtime(common, "change") as runtime, long_call(common) as watched:
        users = list(dict.fromkeys((common.user_id(), *others)))
        if all_users:
            users = [each.id for each in runtime.iter_users()]
        reports = runtime.learn_many(users, layer, **watched, **options)
        was_stopped = watched["cancelled"]()
    if all_users:
        reports = tuple(report for report in reports if report.error != "NothingToLearn")
    text, empty = "\n\n".join(map(str, reports)), "No user has anything new to learn."
    emit(common, reports, text, empty=empty)
    if was_stopped:
        raise Cancelled("Stopped; reported results stay.", hint="The next learn continues.")
    if reports and not all_users and all(report.error for report in reports):
        kind = next(kind for kind in ERROR_CODES if kind.__name__ == reports[0].error)
        raise kind("None of these users has learned.", hint="Each report says why.")


@command(
    "practice",
    examples=(
        "practice sums --verifier sums --seconds 600",
        "practice sums --verifier reasoning-gym --family chain_sum,max_terms=2",
        "practice sums --verifier sums --shaping t2t",
    ),
    renamed={"--memory": "--max-memory-mb"},
)
@click.argument("skill")
@click.option(
    "--verifier",
    required=True,
    help="The plugin that sets the tasks and judges, such as sums.",
)
@click.option("--family", default="", help="The kind of tasks, if the verifier has several.")
@click.option("--shaping", help="The plugin that turns judgements into rewards, such as t2t.")
@click.option("--rounds", type=int, help="Stop after this number of rounds.")
@_training_options
def practice(common: GlobalOptions, skill: str, **options: Any) -> None:
    """Train SKILL on tasks that a verifier judges.

    Prints a report. Teach it some answers and learn them first, so that it solves some tasks
    already. A gate judges the result on tasks that it never practices, and makes it live if it is
    better. A refusal is no error and changes nothing. Ctrl-C stops after the running step and keeps
    the work for the same practice.
    """
    with session.open_user(common, "change") as user, long_call(common) as watched:
        report = user.practice(skill, **watched, **options)
    emit(common, report, str(report))


@command(
    "rollback",
    examples=("rollback style", "rollback style --to style@69c31c", "rollback style --to base"),
    surplus="Did you mean --to {}?",
)
@click.argument("layer")
@click.option(
    "--to",
    metavar="REVISION|base",
    help="A revision, the beginning of its id, or 'base' for none.  [default: the previous]",
)
def rollback(common: GlobalOptions, layer: str, to: str | None) -> None:
    """Make an earlier revision of LAYER live.

    By default the one before the last change, so a second rollback undoes the first. Prints the
    live revision.
    """
    if to is None and "@" in layer:
        name = layer.partition("@")[0]
        raise click.UsageError(
            f"{layer!a} is a revision and no layer. Did you mean: rollback {name} --to {layer}"
        )
    with session.open_user(common, "change") as user, common.display:
        move = user.rollback(layer, "previous" if to is None else None if to == BASE else to)
    emit(common, move, move.after or BASE)
    before, after = (each or "the bare base" for each in (move.before, move.after))
    if before == after:
        info(common, f"{layer}: {after} was live already.")
        return
    info(common, f"{layer}: {before} -> {after}")
    if move.cause == MoveCause.ROLLBACK_UNDONE:
        without = f"personalpeft rollback {layer} --to {BASE} --user {user.id}"
        info(common, f"This undid the last rollback. Without any: {without}")


@command(
    "rebase",
    examples=(
        "rebase --to gemma3-270m-it",
        "rebase --to gemma3-270m-it --accept",
        "rebase --to smollm2-135m-instruct --base gemma3-270m-it",
    ),
)
@click.option(
    "--to", "other", required=True, metavar="NAME|PATH", help="The other base, as for --base."
)
@flag("--accept", help="Switch whatever the gate says; that is recorded.")
@flag("--compare-only", help="Build and compare, and switch nothing.")
def rebase(common: GlobalOptions, other: str, accept: bool, compare_only: bool) -> None:
    """Build all layers anew on another base, and switch if they answer as well there.

    Both bases are asked the same held-out questions, and the report shows the answers side by side.
    A gate switches if no more of the wanted answers got less likely than it allows. The former
    revisions stay: rebase to the former base goes back, and trains only what is new since.

    --base names the present base. After the switch name the other one with --base or
    PERSONALPEFT_BASE. With --to the present base, after a change of its recipe, the layers are
    built from scratch. After an update of its weights the former ones cannot be asked: the report
    compares with the bare base, and --accept switches.
    """
    with session.open_runtime(common, "change") as runtime, long_call(common) as watched:
        report = runtime.rebase(
            common.user_id(), other, accept=accept, compare_only=compare_only, **watched
        )
    emit(common, report, str(report))
    if report.switched:
        info(common, f"From now on: --base {other}, or set PERSONALPEFT_BASE.")
    elif any(layer.before != layer.after for layer in report.layers):
        info(common, "To switch: --accept")


@command("set-weight", examples=("set-weight style 0.5", "set-weight style -1"))
@click.argument("layer")
@click.argument("weight", type=float)
def set_weight(common: GlobalOptions, layer: str, weight: float) -> None:
    """Set how strongly LAYER is added.

    WEIGHT is from -2 to 2: 1 is the layer as trained, 0 leaves it out.
    """
    with session.open_user(common, "change") as user:
        user.set_weight(layer, weight)
    emit(common, {"user": user.id, "layer": layer, "weight": weight}, f"{layer} {weight:g}")


@command("scope", examples=("scope skill.email near", "scope style never"))
@click.argument("layer")
@click.argument("when", type=click.Choice(get_args(Scope)))
def scope(common: GlobalOptions, layer: str, when: Scope) -> None:
    """Set when LAYER is active: always, near or never.

    'near' compares a prompt with those that the layer was trained on. By default a style is always
    active, a skill and the memory near.
    """
    with session.open_user(common, "change") as user:
        user.scope(layer, when)
    emit(common, {"user": user.id, "layer": layer, "scope": when}, f"{layer} {when}")
