"""``bench wave``: very many users, one request each, all at once, each with an adapter of their own: many more than fit into
slots and host memory together, so that nearly every request waits for its adapter to come from the disk.

The same number of requests of the same users is then answered with adapters that are in their slots already. Both come
through the engine as one call; files lie in the system's page cache as far as that holds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.figures import percentile, ratio, spread, taking_turns
from benchmarks.load_users import crowd, name, question
from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import InvalidInput
from personalpeft.settings import Serving
from personalpeft.types import Sampling, Stack

_WARM_UP_USERS, _WARM_UP = 32, 4


@dataclass(frozen=True, slots=True)
class WaveBench:
    """The object that ``--json`` prints: medians over the repetitions; ``spread`` has the least and the most. Nothing may fail:
    an error ends the benchmark. ``host_fits`` is how many stacks host memory holds besides the slots; ``read_from_disk`` and
    ``read_from_host`` how many loads a wave took.
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
class Answered:
    """What one load gave: tokens a second over all, and for each request the seconds to its first token."""

    rate: float
    first: tuple[float, ...]


def bench_wave(
    base_name: str,
    users: int,
    *,
    repetitions: int,
    tokens: int,
    serving: Serving = Serving(),
    say: Callable[[str], None],
) -> WaveBench:
    """Builds the users and runs both loads in turns. Raises ``InvalidInput`` for fewer users than fit beside each other."""
    serving = replace(serving, max_queue=users)
    with crowd(base_name, users, serving=serving, say=say) as people:
        engine = people.engine
        stacks = [people.stack(number) for number in range(users)]
        fits = serving.host_bytes // people.stage(stacks[0]).nbytes
        if users <= serving.slots + fits:
            raise InvalidInput(
                f"{users} users fit into {serving.slots} slots and host memory for {fits}.",
                hint=f"Take more than {serving.slots + fits}.",
            )
        waves: list[Answered] = []

        def wave(repetition: int) -> float:
            waves.append(answered(engine, stacks, 2 * repetition, tokens))
            return waves[-1].rate

        def resident(repetition: int) -> float:
            same = [stacks[number % serving.slots] for number in range(users)]
            for stack in stacks[: serving.slots]:
                engine.preload(stack)
            return answered(engine, same, 2 * repetition + 1, tokens).rate

        say("warming up")
        answered(engine, stacks[:_WARM_UP_USERS], 0, _WARM_UP)
        before = engine.metrics()
        figures = taking_turns({"wave": wave, "resident": resident}, repetitions, say)
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
        slots=serving.slots,
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


def answered(engine: Engine, stacks: Sequence[Stack], repetition: int, tokens: int) -> Answered:
    """One request of each user at once, each with the stack given for it; waits until all are answered."""
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
    return Answered(count / (time.perf_counter() - began), tuple(first.values()))
