"""``bench wave``: one concurrent request each of very many users, each with an own adapter.

They exceed the slots and host memory, so nearly every request waits for its adapter from disk. The
same number of requests is then answered with adapters that are in their slots. Both are one call of
the engine; files are in the page cache as far as it holds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.figures import alternate, percentile, ratio, spread
from benchmarks.load_users import load_users, name, question
from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import InvalidInput
from personalpeft.settings import Serving
from personalpeft.types import Sampling, Stack

_WARM_UP_USERS, _WARM_UP = 32, 4


@dataclass(frozen=True, slots=True)
class WaveBench:
    """The object that ``--json`` prints: medians, with their least and most in ``spread``.

    Any error ends the benchmark. ``host_fits`` is how many stacks host memory holds besides the
    slots; ``read_from_disk`` and ``read_from_host`` count a wave's loads.
    """

    bench: str
    base: str
    repetitions: int
    users: int
    slots: int
    rows: int
    host_fits: int
    p50_first_token_seconds: float
    p95_first_token_seconds: float
    tokens_per_second: float
    resident_tokens_per_second: float
    read_from_disk: int
    read_from_host: int
    ratios: dict[str, float]
    spread: dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One load: tokens a second over all, and each request's seconds to its first token."""

    rate: float
    first: tuple[float, ...]


def bench_wave(
    base_name: str,
    users: int,
    *,
    repetitions: int,
    tokens: int,
    serving: Serving = Serving(),
    echo: Callable[[str], None],
) -> WaveBench:
    """Build the users and run both loads alternately.

    Raises:
        InvalidInput: The users fit into memory.
    """
    serving = replace(serving, max_queue=users)
    with load_users(base_name, users, serving=serving, echo=echo) as people:
        engine = people.engine
        stacks = [people.stack(number) for number in range(users)]
        fits = serving.host_bytes // people.stage(stacks[0]).nbytes
        slots = engine.backend.slots
        if users <= slots + fits:
            raise InvalidInput(
                f"{users} users fit into {slots} slots and host memory for {fits}.",
                hint=f"Take more than {slots + fits}.",
            )
        waves: list[LoadResult] = []

        def wave(repetition: int) -> float:
            waves.append(run_load(engine, stacks, 2 * repetition, tokens))
            return waves[-1].rate

        def resident(repetition: int) -> float:
            same = [stacks[number % slots] for number in range(users)]
            for stack in stacks[:slots]:
                engine.preload(stack)
            return run_load(engine, same, 2 * repetition + 1, tokens).rate

        echo("warming up")
        run_load(engine, stacks[:_WARM_UP_USERS], 0, _WARM_UP)
        before = engine.metrics()
        figures = alternate({"wave": wave, "resident": resident}, repetitions, echo)
        after = engine.metrics()
    rates, slower = spread(figures["wave"]), ratio(figures["wave"], figures["resident"])
    late = spread([percentile(each.first, 95) for each in waves])
    loads = {
        key: round((after[counter] - before[counter]) / repetitions)
        for key, counter in (("disk", "stack_loads_total"), ("host", "stack_host_hits_total"))
    }
    spreads = {
        "tokens_per_second": rates,
        "p95_first_token_seconds": late,
        "wave_vs_resident": slower,
    }
    return WaveBench(
        bench="wave",
        base=base_name,
        repetitions=repetitions,
        users=users,
        slots=slots,
        rows=serving.max_batch,
        host_fits=fits,
        p50_first_token_seconds=spread([percentile(each.first, 50) for each in waves]).median,
        p95_first_token_seconds=late.median,
        tokens_per_second=rates.median,
        resident_tokens_per_second=spread(figures["resident"]).median,
        read_from_disk=loads["disk"],
        read_from_host=loads["host"],
        ratios={"wave_vs_resident": slower.median},
        spread={key: (each.least, each.most) for key, each in spreads.items()},
    )


def run_load(engine: Engine, stacks: Sequence[Stack], repetition: int, tokens: int) -> LoadResult:
    """Answer one concurrent request of each user, each with its stack."""
    sampling = Sampling(max_tokens=tokens)
    requests = [
        Request(name(number), question(number, repetition), stack, sampling)
        for number, stack in enumerate(stacks)
    ]
    first: dict[int, float] = {}
    count = 0
    began = time.perf_counter()
    for piece in engine.stream(requests):
        first.setdefault(piece.index, time.perf_counter() - began)
        count += len(piece.tokens)
    return LoadResult(count / (time.perf_counter() - began), tuple(first.values()))
