"""A skill that tries tasks and is judged by a verifier."""

from __future__ import annotations

from typing import Any

import click

from personalpeft_app import session
from personalpeft_app.commands.learn import report_learn_errors
from personalpeft_app.options import GlobalOptions, command
from personalpeft_app.output import emit
from personalpeft_app.progress import Display


@command(
    "practice",
    examples=(
        "personalpeft practice sums --verifier sums --seconds 600",
        "personalpeft practice sums --verifier reasoning-gym --family chain_sum,max_terms=2",
        "personalpeft practice sums --verifier sums --shaping t2t",
    ),
)
@click.argument("skill")
@click.option(
    "--verifier",
    required=True,
    help="Who sets the tasks and judges: the name of a plugin, such as sums.",
)
@click.option(
    "--family", default="", help="Which of the verifier's tasks, where it has several kinds."
)
@click.option(
    "--shaping", help="What makes rewards of the judgements: the name of a plugin, such as t2t."
)
@click.option("--seconds", type=float, help="Judge what was practised until then, after so long.")
@click.option(
    "--rounds", type=int, help="Judge what was practised until then, after so many rounds."
)
@click.option("--steps", type=int, help="Judge what was practised until then, after so many steps.")
@click.option(
    "--memory", type=float, metavar="MB", help="Train in at most so much memory beside the base."
)
@click.option(
    "--accept",
    is_flag=True,
    help="Make the result live although it may be refused; that is recorded.",
)
def practice(common: GlobalOptions, skill: str, **asked: Any) -> None:
    """Have SKILL try tasks, and make what is right likelier.

    Teach it some answers and learn them first, so that it gets some right by itself. The result is judged on tasks that
    it never tries, and made live if it is better. Prints a report.
    A result that is not better is refused, which is no error: nothing changes then. Ctrl-C stops after the
    running step and keeps what was done for the same practice.
    """
    display = Display(common)
    with (
        session.open_user(common, "change", display) as user,
        report_learn_errors(display) as cancelled,
    ):
        report = user.practice(skill, progress=display, cancelled=cancelled, **asked)
    emit(common, report.as_json(), str(report))
