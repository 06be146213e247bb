"""The command ``bench fleet-cost``."""

from __future__ import annotations

from dataclasses import replace

import click

from benchmarks.result import emit_result
from personalpeft_app.options import GlobalOptions, command, option


@command(
    "fleet-cost",
    examples=(
        "personalpeft bench fleet-cost",
        "personalpeft bench fleet-cost --active 23000 --learn-seconds 90 --json",
    ),
)
@option("--users", type=click.IntRange(1), default=1_000_000)
@option(
    "--active", type=click.IntRange(1), default=2300, help="Users who are in a session at any time."
)
@option("--session-minutes", type=click.FloatRange(1), default=20.0, help="Its length.")
@option(
    "--think-seconds",
    type=click.FloatRange(0.1),
    default=60.0,
    help="From a reply to the next request, on average.",
)
@option("--reply-tokens", type=click.IntRange(1), default=128, help="Its length.")
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(0.1),
    help="Of a machine's full batch.  [default: as measured]",
)
@click.option(
    "--one-row", type=click.FloatRange(0.1), help="Tokens a second of one row.  [default: measured]"
)
@click.option(
    "--learn-seconds",
    type=click.FloatRange(0.1),
    multiple=True,
    help="Of one learn; give it more than once for several.  [default: as measured]",
)
@option("--adapter-mb", type=click.FloatRange(0), default=4.9)
@option("--bundle-mb", type=click.FloatRange(0), default=5.0)
@option(
    "--hours-between-failures",
    type=click.FloatRange(0.1),
    default=24.0,
    help="Mean life of a machine that learns.",
)
def bench_fleet_cost(
    common: GlobalOptions,
    *,
    tokens_per_second: float | None,
    one_row: float | None,
    learn_seconds: tuple[float, ...],
    adapter_mb: float,
    bundle_mb: float,
    **load: float,
) -> None:
    """The machines that a million users need, by simulation.

    The speed of a machine is that of the results kept with the documentation: two cores, the
    default base. Give figures of your own for others. Machines that serve and machines that learn
    are counted apart, and printed beside the GPUs of MinT, whose bases are larger. Takes seconds.
    """
    from benchmarks.fleet_cost import Load, bench_fleet_cost, measured_machine

    machine = measured_machine(adapter_mb, bundle_mb)
    machine = replace(
        machine,
        one_row=one_row or machine.one_row,
        all_rows=tokens_per_second or machine.all_rows,
        learn_seconds=learn_seconds or machine.learn_seconds,
    )
    emit_result(common, bench_fleet_cost(machine, Load(**load)))  # type: ignore[arg-type]
