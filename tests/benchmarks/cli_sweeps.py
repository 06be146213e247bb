"""The commands ``bench sweep`` and ``bench capacity``, whose results are plotted."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path

import click

from benchmarks.cli_options import keep_option, need_torch, printer
from benchmarks.facts import MOST
from benchmarks.result import emit_result
from benchmarks.result_cache import Figures
from personalpeft_app.options import GlobalOptions, command, option
from personalpeft_app.output import format_table


@command(
    "sweep",
    examples=(
        "personalpeft bench sweep --keep sweeps",
        "personalpeft bench sweep --keep sweeps --only learning_rate --style pirate --seeds 1",
    ),
)
@click.option(
    "--only",
    multiple=True,
    metavar="NUMBER",
    help="One number of the recipe; may be given more than once.",
)
@option(
    "--style",
    "styles",
    multiple=True,
    metavar="STYLE",
    default=("pirate", "bullets"),
    help="What is learned; may be given more than once.",
)
@option("--seeds", type=click.IntRange(1), default=3, help="How many of each.")
@keep_option(required=True)
def bench_sweep(
    common: GlobalOptions, only: tuple[str, ...], styles: tuple[str, ...], seeds: int, keep: Path
) -> None:
    """The effect of each number of the learning recipe.

    A run changes one number of the default and learns a style from twelve edits. Replay takes a
    second learn. Shows medians over styles and seeds; * marks the default. A run takes about a
    minute; all of them, hours.
    """
    need_torch(common)
    from benchmarks import sweep

    found = sweep.bench_sweep(
        base=common.base_name(),
        only=only,
        styles=styles,
        seeds=seeds,
        keep=keep,
        echo=printer(common),
    )
    rows = [
        {
            "NUMBER": number,
            "VALUE": f"{value}{'*' if value == found['defaults'][number] else ''}",
            "RUNS": f"{len(points)}",
            "IN STYLE": f"{_median(points, 'in_style')}/10",
            "DRAFTS": f"{_median(points, 'drafts')}/5" if points[0]["drafts"] is not None else "",
            "GENERAL KEPT": f"{_median(points, 'kept')}/{points[0]['known']}",
            "KL": _median(points, "kl"),
            "HELD BACK": _median(points, "held_back"),
            "LEARN S": _median(points, "seconds"),
        }
        for number, values in sweep.by_value(found).items()
        for value, points in values.items()
        if points
    ]
    emit_result(common, found, _format(rows))


@command(
    "capacity",
    examples=(
        "personalpeft bench capacity --keep sweeps",
        "personalpeft bench capacity --keep sweeps --facts 20 --facts 160 --rank 1 --rank 16 --seeds 1",
    ),
)
@option(
    "--facts",
    "counts",
    multiple=True,
    metavar="COUNT",
    type=click.IntRange(4, MOST),
    default=(5, 10, 20, 40, 80, 160),
    help="How many facts one learn gets; may be given more than once.",
)
@click.option(
    "--rank",
    "ranks",
    multiple=True,
    metavar="RANK",
    type=click.IntRange(1),
    help="The layer's rank; may be given more than once.  [default: the recipe's]",
)
@option("--seeds", type=click.IntRange(1), default=3, help="How many of each.")
@keep_option(required=True)
def bench_capacity(
    common: GlobalOptions, counts: tuple[int, ...], ranks: tuple[int, ...], seeds: int, keep: Path
) -> None:
    """How many facts a memory layer holds.

    Made-up facts are given with three questions each and learned at once. Then the layer alone is
    asked a fourth phrasing, without retrieval. A run takes minutes.
    """
    need_torch(common)
    from benchmarks import capacity

    found = capacity.bench_capacity(
        base=common.base_name(),
        counts=counts,
        ranks=ranks,
        seeds=seeds,
        keep=keep,
        echo=printer(common),
    )
    rows = [
        {
            "FACTS": f"{load['facts']}",
            "RANK": f"{load['rank']}",
            "SEED": f"{load['seed']}",
            "TOKENS/PARAMETER": f"{load['tokens'] / load['parameters']:.2g}",
            "RECALL": f"{load['recalled'] / load['facts']:.0%}",
            "AS TOLD": f"{load['recalled_as_told'] / load['facts']:.0%}",
            "GENERAL KEPT": f"{load['kept']}/{load['known']}",
            "KL": "none" if load["kl"] is None else f"{load['kl']:.2f}",
            "LEARN S": f"{load['seconds']:.0f}",
        }
        for load in sorted(found["loads"], key=itemgetter("rank", "facts", "seed"))
    ]
    emit_result(common, found, _format(rows))


def _format(rows: Sequence[Mapping[str, str]]) -> str:
    """Format rows that have their cells by the headings."""
    return format_table(list(rows[0]), [list(row.values()) for row in rows]) if rows else ""


def _median(points: Sequence[Figures], name: str) -> str:
    known = [point[name] for point in points if point[name] is not None]
    return f"{statistics.median(known):.3g}" if known else "none"
