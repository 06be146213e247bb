"""The command ``bench weights``, which measures training steps on weights in the base's file."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.cli_options import printer
from benchmarks.result import emit_result
from personalpeft_app.options import GlobalOptions, command, option


@command(
    "weights",
    examples=(
        "personalpeft bench weights --shape qwen3-1.7b",
        "personalpeft bench weights --shape qwen3-4b --without-loaded --json",
    ),
)
@click.option(
    "--shape", "shapes", multiple=True, metavar="NAME", help="One shape; repeat for more."
)
@option("--steps", type=click.IntRange(1), default=5, help="Steps of each variant.")
@click.option("--blocks", type=click.IntRange(1), metavar="N", help="Only the first N blocks.")
@click.option(
    "--without-loaded", is_flag=True, help="Leave loaded weights out; they take much memory."
)
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="FOLDER",
    help="Where models are written and removed again: a shape of 4B takes 11 GB.",
)
def bench_weights(
    common: GlobalOptions,
    shapes: tuple[str, ...],
    steps: int,
    blocks: int | None,
    without_loaded: bool,
    work: Path | None,
) -> None:
    """Training on the base's own file, compared with loaded weights.

    Models of real shapes with random weights in Q4_0. Shows tokens a second of training steps and
    the peak memory, with weights in the file and with weights in memory. Takes some minutes a
    shape.
    """
    from random_models import SHAPES

    from benchmarks import weights

    for name in shapes:
        if name not in SHAPES:
            raise click.BadParameter(
                f"there is no shape {name!r}; there are {', '.join(SHAPES)}.", param_hint="--shape"
            )
    found = weights.bench_weights(
        shapes or tuple(SHAPES),
        steps=steps,
        blocks=blocks,
        compared=not without_loaded,
        work=work,
        echo=printer(common),
    )
    emit_result(common, found)
