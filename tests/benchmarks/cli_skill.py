"""The command ``bench skill``, which measures a skill after demonstrations and after practice."""

from __future__ import annotations

import click

from benchmarks.cli_options import printer
from benchmarks.result import emit_result
from personalpeft_app.options import GlobalOptions, command, option


@command(
    "skill",
    examples=(
        "personalpeft bench skill",
        "personalpeft bench skill --family chain_sum,max_terms=2,max_digits=2 --json",
    ),
)
@click.option(
    "--family",
    metavar="FAMILY",
    help="Which of reasoning-gym's families, with its settings. By default lists of three or four words, to be reversed.",
)
@option("--unseen", type=click.IntRange(1), default=120, help="How many unseen tasks.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    metavar="N",
    help="Rounds of each half of the practice. By default those of the base's drill.",
)
def bench_skill(common: GlobalOptions, family: str | None, unseen: int, rounds: int | None) -> None:
    """Thirty demonstrations of a skill, then practice.

    Shows the share of unseen tasks with a right answer, always of the same tasks. The stages are
    the base, demonstrations, rejection sampling and policy gradient. Needs the package
    reasoning-gym. Takes some minutes.
    """
    from benchmarks import skill

    found = skill.bench_skill(
        family or skill.FAMILY,
        base=common.base_name(),
        backend=common.backend or "torch",
        unseen=unseen,
        rounds=rounds,
        echo=printer(common),
    )
    gained = f"{found.points_shown:+g} points by demonstrations, {found.points_practised:+g} more by practice"
    emit_result(common, found, gained)
