"""``bench start``: time of ``personalpeft ask`` in a new process to the first byte of its reply.

Once without facts, and once with one that the question retrieves. CPU seconds are of the whole
process, which stops after one token. A first run prepares the base and does not count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.figures import medians, ranges, spread
from benchmarks.homes import temporary_folder

_COMMAND = (sys.executable, "-m", "personalpeft_app")
_FACTS = {"plain": (), "with a fact": ("I have two cats and live in Lisbon.",)}
_QUESTION = "How many cats do I have?"


def bench_start(base_name: str, *, repetitions: int, echo: Callable[[str], None]) -> dict[str, Any]:
    """Run the command with and without a fact, alternately; ``spread`` has the least and most."""
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in _FACTS}
    with temporary_folder() as work:
        for name, facts in _FACTS.items():
            for fact in facts:
                subprocess.run(
                    [*_COMMAND, "remember", fact],
                    env=_environment(base_name, work / name),
                    check=True,
                    capture_output=True,
                )
            _ask(base_name, work / name)
        for repetition in range(1, repetitions + 1):
            for name, found in runs.items():
                found.append(_ask(base_name, work / name))
                echo(f"{repetition}: {name}, {found[-1][0]:.2f} s")
    first = {name: spread([seconds for seconds, _ in found]) for name, found in runs.items()}
    cpu = {name: spread([seconds for _, seconds in found]) for name, found in runs.items()}
    return {
        "bench": "start",
        "base": base_name,
        "repetitions": repetitions,
        "seconds": medians(first),
        "cpu_seconds": medians(cpu),
        "spread": ranges(first),
    }


def _environment(base_name: str, home: Path) -> dict[str, str]:
    return {**os.environ, "PERSONALPEFT_BASE": base_name, "PERSONALPEFT_HOME": str(home)}


def _ask(base_name: str, home: Path) -> tuple[float, float]:
    """Return the seconds to the first byte, and the CPU seconds of the process."""
    before, started = _cpu_seconds(), time.perf_counter()
    with subprocess.Popen(
        [*_COMMAND, "ask", "--quiet", "--max-tokens", "1", _QUESTION],
        env=_environment(base_name, home),
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, _COMMAND)
    return seconds, _cpu_seconds() - before


def _cpu_seconds() -> float:
    import resource  # Windows has none.

    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
