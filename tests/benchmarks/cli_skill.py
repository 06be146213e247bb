"""Measuring what a skill becomes by being shown and by trying: the benchmark of the command ``bench skill``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from personalpeft_app.options import GlobalOptions, command
from personalpeft_app.output import emit, format_table, info

if TYPE_CHECKING:
    from benchmarks.skill import Rate


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
@click.option(
    "--unseen",
    type=click.IntRange(1),
    default=120,
    show_default=True,
    help="How many unseen tasks.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    metavar="N",
    help="Rounds of each half of the practice. By default those of the base's drill.",
)
def bench_skill(common: GlobalOptions, family: str | None, unseen: int, rounds: int | None) -> None:
    """Thirty demonstrations of a skill, then practice.

    The share of unseen tasks that is answered right by the base, after the demonstrations, after rejection sampling and
    after the policy gradient, each time the same tasks. Needs the package reasoning-gym. Takes some minutes.
    """
    from benchmarks import skill

    found = skill.bench_skill(
        family or skill.FAMILY,
        base=common.base_name(),
        backend=common.backend or "torch",
        unseen=unseen,
        rounds=rounds,
        say=lambda text: info(common, text),
    )
    rows = [("base", *_shown(found.before), "", "", "")]
    rows += [
        (s.name, *_shown(s.unseen), s.verdict, str(s.steps), f"{s.seconds:.0f}")
        for s in found.stages
    ]
    heads = ("AFTER", "PASSED", "95 %", "ATTACHED", "VERDICT", "STEPS", "SECONDS")
    gained = f"{found.points_shown:+g} points by demonstrations, {found.points_practised:+g} more by practice"
    emit(common, found, f"{format_table(heads, rows)}\n\n{gained}")


def _shown(rate: Rate) -> tuple[str, str, str]:
    return f"{rate.passed}/{rate.asked}", f"{rate.least:.0%} to {rate.most:.0%}", f"{rate.attached}"
