"""The rows of ``bench engines`` on a fleet: two replicas of vLLM behind one address against one, each of which finds stacks by their
names, and whether requests go where their stack is.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines_asked import first_token
from benchmarks.engines_vllm import REQUESTS, STACKS, prepared, rate
from benchmarks.figures import Spread, ratio, spread, taking_turns
from benchmarks.fleet import Fleet, example, fleets
from benchmarks.load_users import Crowd, crowd
from personalpeft.engine.engine import Engine
from personalpeft.settings import VllmServer
from personalpeft.types import Stack

_REPLICAS = {"one": 1, "two": 2}
# Replicas tell the router now and then what they have.
_TOLD_SECONDS = 3


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """``tokens_per_second`` is that of ``requests`` at once over ``stacks`` stacks through our engine, on ``one`` replica and on
    ``two``, each with ``threads`` of the processors; ``two_over_one`` the one over the other. ``at_home`` is the share of requests to
    the two that went to a replica that had their stack already, after each stack was asked for once.
    """

    requests: int
    stacks: int
    threads: int
    tokens_per_second: dict[str, Spread]
    two_over_one: Spread
    at_home: float


def bench_fleet(
    base_name: str, python: Path, *, repetitions: int, tokens: int, say: Callable[[str], None]
) -> FleetFigures | None:
    """Starts both fleets from this Python and has them take turns. None where it has no Ray, or not our plugin. Raises
    ``ServingFailed``.
    """
    found = example(python)
    if found is None:
        say("no fleet: this Python has no Ray with our plugin")
        return None
    # As much for each as it would have on a machine of its own.
    threads = max(1, (os.cpu_count() or 1) // max(_REPLICAS.values()))
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="personalpeft-bench-")))
        base = prepared(base_name, work)
        started = stack.enter_context(
            fleets(
                python,
                found,
                base.folder,
                work,
                replicas=list(_REPLICAS.values()),
                threads=threads,
                environment={},
                say=say,
            )
        )
        asked: dict[str, Callable[[int], float]] = {}
        for name, fleet in zip(_REPLICAS, started, strict=True):
            people = stack.enter_context(_people(base_name, fleet, say))
            stacks = [people.stack(number) for number in range(STACKS)]
            asked[name] = _asking(people.engine, stacks, tokens)
            say(f"warming up {name}")
            # One after the other, so that each stack is pulled once, by one replica.
            for number, each in enumerate(stacks):
                first_token(people.engine, each, number)
            time.sleep(_TOLD_SECONDS)
        two = started[-1]
        before = _pulls(two)
        rates = taking_turns(asked, repetitions, say)
        moved = _pulls(two) - before
    return FleetFigures(
        requests=REQUESTS,
        stacks=STACKS,
        threads=threads,
        tokens_per_second={key: spread(each) for key, each in rates.items()},
        two_over_one=ratio(rates["two"], rates["one"]),
        # Who comes to a replica that has not their stack has it pulled there.
        at_home=round(1 - moved / (REQUESTS * repetitions), 4),
    )


def _people(
    base_name: str, fleet: Fleet, say: Callable[[str], None]
) -> AbstractContextManager[Crowd]:
    server = VllmServer(fleet.url, folder=fleet.stacks, resolves=True)
    return crowd(base_name, STACKS, backend="vllm", server=server, say=say)


def _asking(engine: Engine, stacks: Sequence[Stack], tokens: int) -> Callable[[int], float]:
    return lambda repetition: rate(engine, stacks, repetition, tokens)


def _pulls(fleet: Fleet) -> int:
    """How often a replica has pulled a stack so far."""
    return sum(len(pulled) for pulled in fleet.pulled())
