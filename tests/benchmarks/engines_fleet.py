"""``bench engines`` on fleets: two vLLM replicas behind one address, compared with one.

Replicas find stacks by name, and requests should reach the replica that has their stack.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine_comparison import first_token
from benchmarks.engines_vllm import REQUESTS, STACKS, prepared, rate
from benchmarks.figures import alternate, ratio, spread
from benchmarks.fleet import Fleet, example, fleets
from benchmarks.homes import temporary_folder
from benchmarks.load_users import load_users
from personalpeft.base_models.resolve import unpacked_folder
from personalpeft.settings import VllmServer

_REPLICAS = {"one": 1, "two": 2}
# Replicas report their stacks to the router at intervals.
REPORT_SECONDS = 3


def bench_fleet(
    base_name: str, python: Path, *, repetitions: int, tokens: int, echo: Callable[[str], None]
) -> dict[str, Any] | None:
    """Start both fleets from this Python and measure them alternately.

    ``tokens_per_second`` is that of ``requests`` concurrent requests over ``stacks`` stacks through
    our engine. It is measured on ``one`` replica and on ``two``, each with ``threads`` CPU threads.
    ``two_over_one`` is their ratio. ``at_home`` is the share of requests to the two that reached a
    replica with their stack. It is counted after each stack was requested once.

    Returns:
        None where the Python has no Ray or not our plugin.

    Raises:
        ServingFailed: A fleet does not work.
    """
    found = example(python)
    if found is None:
        echo("no fleet: this Python has no Ray with our plugin")
        return None
    # Each replica gets what it would have on a machine of its own.
    threads = max(1, (os.cpu_count() or 1) // max(_REPLICAS.values()))
    with ExitStack() as stack:
        work = stack.enter_context(temporary_folder())
        base = prepared(base_name, work)
        started = stack.enter_context(
            fleets(
                python,
                found,
                unpacked_folder(base),
                work,
                replicas=list(_REPLICAS.values()),
                threads=threads,
                environment={},
                echo=echo,
            )
        )
        asked: dict[str, Callable[[int], float]] = {}
        for name, fleet in zip(_REPLICAS, started, strict=True):
            server = VllmServer(fleet.url, folder=fleet.stacks, resolves=True)
            loaded = stack.enter_context(
                load_users(base_name, STACKS, backend="vllm", server=server, echo=echo)
            )
            stacks = [loaded.stack(number) for number in range(STACKS)]
            asked[name] = partial(rate, loaded.engine, stacks, tokens=tokens)
            echo(f"warming up {name}")
            # One after another, so that each stack is pulled once, by one replica.
            for number, each in enumerate(stacks):
                first_token(loaded.engine, each, number)
            time.sleep(REPORT_SECONDS)
        two = started[-1]
        before = _pulls(two)
        rates = alternate(asked, repetitions, echo)
        moved = _pulls(two) - before
    return {
        "requests": REQUESTS,
        "stacks": STACKS,
        "threads": threads,
        "tokens_per_second": {key: spread(each) for key, each in rates.items()},
        "two_over_one": ratio(rates["two"], rates["one"]),
        # A request to a replica without its stack makes that replica pull it.
        "at_home": round(1 - moved / (REQUESTS * repetitions), 4),
    }


def _pulls(fleet: Fleet) -> int:
    """Return the number of pulls of all replicas so far."""
    return sum(len(pulled) for pulled in fleet.pulled())
