"""The command ``bench world``, which measures a world model of TextWorld."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.cli_options import keep_option, printer
from benchmarks.result import emit_result
from personalpeft_app.options import GlobalOptions, command, option

_PARTS = ("fidelity", "consistency", "verification", "warm-start", "synthetic")


@command(
    "world",
    examples=(
        "personalpeft bench world --keep worlds",
        "personalpeft bench world --keep worlds --game cooking --only fidelity --only verification",
        "personalpeft bench world --keep worlds --only synthetic --trajectories 1000",
    ),
)
@option("--game", type=click.Choice(["coin", "cooking"]), default="coin", help="The kind of games.")
@option("--games", type=click.IntRange(4), default=300, help="Games that the model learns from.")
@option("--unseen", type=click.IntRange(1), default=30, help="Other games, to measure on.")
@option("--epochs", type=click.FloatRange(0.1), default=3.0, help="Passes over the transitions.")
@option("--seeds", type=click.IntRange(1), default=3, help="Seeds of the warm start.")
@click.option(
    "--trajectories",
    type=click.IntRange(4, 100_000),
    help="Real and imagined trajectories that skills learn from. Default: as many as --games.",
)
@click.option(
    "--verified-games",
    type=click.IntRange(1, 100_000),
    help="Unseen games of the part verification. Default: as many as --unseen.",
)
@click.option(
    "--warm-start-steps",
    type=click.IntRange(1, 100_000),
    help="Steps that the skills of the part warm-start train.  [default: 60]",
)
@click.option(
    "--only",
    "parts",
    multiple=True,
    type=click.Choice(_PARTS),
    help="One part; may be given more than once.",
)
@keep_option(required=True)
def bench_world(
    common: GlobalOptions,
    game: str,
    games: int,
    unseen: int,
    epochs: float,
    seeds: int,
    trajectories: int | None,
    verified_games: int | None,
    warm_start_steps: int | None,
    parts: tuple[str, ...],
    keep: Path,
) -> None:
    """A world model of TextWorld, and its uses.

    The share of steps of unseen games whose next state is predicted word for word, beside two
    baselines; the consistency of two agents; games lost with and without checks; and skills that
    start from the model or learn from what it imagined. Needs the plugin world_model with
    textworld. Games and the model are kept, too. Takes hours.
    """
    from benchmarks import world_model

    found = world_model.bench_world(
        common.base_name(),
        common.backend or "torch",
        game=game,
        games=games,
        unseen=unseen,
        epochs=epochs,
        seeds=seeds,
        trajectories=trajectories,
        verified_games=verified_games,
        warm_start_steps=warm_start_steps,
        parts=parts or _PARTS,
        keep=keep,
        echo=printer(common),
    )
    emit_result(common, found)
