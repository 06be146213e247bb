"""``bench wave``: one concurrent request each of very many users, each with an own adapter.

They exceed the slots and host memory, so nearly every request waits for its adapter from disk. The
same number of requests is then answered with adapters that are in their slots. Both are one call of
the engine; files are in the page cache as far as it holds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.figures import alternate, medians, percentile, ranges, ratio, spread
from benchmarks.load_users import both_samplings, load_users, name, question
from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import InvalidInput
from personalpeft.settings import Serving
from personalpeft.types import Sampling, Stack

_WARM_UP_USERS, _WARM_UP = 32, 4


def bench_wave(
    base_name: str,
    users: int,
    *,
    repetitions: int,
    tokens: int,
    serving: Serving = Serving(),
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """Build the users and run both loads alternately. Any error ends the benchmark.

    ``sampled_tokens_per_second`` is a wave with the card's sampling, and the other figures are
    greedy. ``host_fits`` is how many stacks host memory holds besides the slots;
    ``read_from_disk`` and ``read_from_host`` count a wave's loads. ``spread`` has the least and the
    most.

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
        greedy, card_sampling = both_samplings(people.base.card, tokens).values()
        first_tokens: list[list[float]] = []
        loads = dict.fromkeys(("stack_loads_total", "stack_host_hits_total"), 0.0)

        def wave(repetition: int) -> float:
            before = engine.metrics()
            rate, first = run_load(engine, stacks, 3 * repetition, greedy)
            first_tokens.append(first)
            after = engine.metrics()
            for counter in loads:
                loads[counter] += (after[counter] - before[counter]) / repetitions
            return rate

        def sampled(repetition: int) -> float:
            return run_load(engine, stacks, 3 * repetition + 1, card_sampling)[0]

        def resident(repetition: int) -> float:
            same = [stacks[number % slots] for number in range(users)]
            for stack in stacks[:slots]:
                with engine.pin(stack):
                    pass
            return run_load(engine, same, 3 * repetition + 2, greedy)[0]

        echo("warming up")
        run_load(engine, stacks[:_WARM_UP_USERS], 0, replace(greedy, max_tokens=_WARM_UP))
        turns = {"wave": wave, "wave_sampled": sampled, "resident": resident}
        figures = alternate(turns, repetitions, echo)
    rates = spread(figures["wave"])
    early, late = (
        spread([percentile(each, percent) for each in first_tokens]) for percent in (50, 95)
    )
    ratios = {
        "wave_vs_resident": ratio(figures["wave"], figures["resident"]),
        "sampled_vs_greedy": ratio(figures["wave_sampled"], figures["wave"]),
    }
    spreads = {"tokens_per_second": rates, "p95_first_token_seconds": late, **ratios}
    return {
        "bench": "wave",
        "base": base_name,
        "repetitions": repetitions,
        "users": users,
        "slots": slots,
        "rows": serving.max_batch,
        "host_fits": fits,
        "p50_first_token_seconds": early.median,
        "p95_first_token_seconds": late.median,
        "tokens_per_second": rates.median,
        "sampled_tokens_per_second": spread(figures["wave_sampled"]).median,
        "resident_tokens_per_second": spread(figures["resident"]).median,
        "read_from_disk": round(loads["stack_loads_total"]),
        "read_from_host": round(loads["stack_host_hits_total"]),
        "ratios": medians(ratios),
        "spread": ranges(spreads),
    }


def run_load(
    engine: Engine, stacks: Sequence[Stack], repetition: int, sampling: Sampling
) -> tuple[float, list[float]]:
    """Answer one concurrent request of each user, each with its stack.

    Returns:
        The tokens a second over all, and each request's seconds to its first token.
    """
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
    return count / (time.perf_counter() - began), list(first.values())
