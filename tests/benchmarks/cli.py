"""The commands of ``bench``, which measure the documented figures on this machine.

Each command has its options, a call of the measuring code and its tables as text. ``--json`` prints
the result: its first key ``bench`` is the command, its last key ``measured`` when and where.
"""

from __future__ import annotations

import click

from benchmarks.cli_learning import (
    bench_edits,
    bench_gate,
    bench_learn,
    bench_nulls,
    bench_prefeval,
    bench_rebase,
    bench_skill,
    bench_style,
    bench_thumbs,
    bench_world,
)
from benchmarks.cli_serving import (
    bench_attach,
    bench_busy,
    bench_catalog,
    bench_encryption,
    bench_engines,
    bench_fleet_cost,
    bench_page,
    bench_promote,
    bench_prompts,
    bench_serve,
    bench_server,
    bench_soak,
    bench_start,
    bench_streams,
    bench_wave,
    bench_weights,
)
from benchmarks.cli_sweeps import bench_capacity, bench_sweep
from personalpeft_app.options import Group


@click.group(
    "bench",
    cls=Group,
    examples=("personalpeft bench style", "personalpeft bench catalog --users 10000 --json"),
    renamed={"publish": "promote"},
)
def bench() -> None:
    """Measure on this machine what the documentation promises.

    Benchmarks create homes in temporary folders, ignore --home, and delete them at the end.
    """


bench.add_section(
    "Benchmarks",
    (
        bench_style,
        bench_learn,
        bench_edits,
        bench_rebase,
        bench_gate,
        bench_nulls,
        bench_prefeval,
        bench_thumbs,
        bench_skill,
        bench_world,
        bench_sweep,
        bench_capacity,
        bench_catalog,
        bench_serve,
        bench_attach,
        bench_start,
        bench_prompts,
        bench_encryption,
        bench_busy,
        bench_soak,
        bench_promote,
        bench_weights,
        bench_wave,
        bench_engines,
        bench_fleet_cost,
        bench_server,
        bench_streams,
        bench_page,
    ),
)
