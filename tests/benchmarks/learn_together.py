"""Users who learn jointly, compared with the same users one after another.

Each has a dozen demonstrations of a style and learns for the first time. Each variant is a process
(this module, run as a program) with its own home. Time is from the first learn to the last report,
gate included; peak memory is of the whole process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks import child_environment
from benchmarks.homes import temporary_home
from benchmarks.peak import peak_mb
from benchmarks.personas import load_personas, pools
from personalpeft.errors import ServingFailed

_LESSONS = 12
APART, TOGETHER = "apart", "together"


def compare_joint_and_sequential(users: int, base: str, backend: str) -> Mapping[str, Any]:
    """Run both variants, the sequential one first, and return what ``learned`` does of each.

    Raises:
        ServingFailed: A process ended early.
    """
    return {way: _in_a_process(way, users, base, backend) for way in (APART, TOGETHER)}


def learned(way: str, users: int, base: str, backend: str) -> dict[str, Any]:
    """Run one variant in this process, and return its seconds, peak memory and verdicts by user."""
    everyday, known = pools().everyday, list(load_personas().values())
    with temporary_home(base, backend) as runtime:
        names = [f"user-{number}" for number in range(users)]
        for number, name in enumerate(names):
            habit, first = known[number % len(known)].habit, number * 3
            for prompt, answer in everyday[first : first + _LESSONS]:
                runtime.user(name).teach(prompt, habit.apply(prompt, answer))
        # Loading and the preparation of the first pass are not part of a learn.
        runtime.user(names[0]).chat(everyday[0][0], temperature=0, max_tokens=2)
        began = time.perf_counter()
        reports = (
            runtime.learn_many(names, "style")
            if way == TOGETHER
            else tuple(runtime.user(name).learn("style") for name in names)
        )
        seconds = time.perf_counter() - began
    return {
        "seconds": round(seconds, 2),
        "peak_mb": peak_mb(),
        "verdicts": [str(report.verdict) for report in reports],
    }


def _in_a_process(way: str, users: int, base: str, backend: str) -> Mapping[str, Any]:
    program = [sys.executable, "-m", "benchmarks.learn_together"]
    run = subprocess.run(
        [*program, way, str(users), base, backend],
        capture_output=True,
        text=True,
        check=False,
        env=child_environment(),
    )
    if run.returncode:
        last = run.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise ServingFailed(
            f"Learning {way} ended early: {last[0]}", hint="Run it with fewer users."
        )
    found: Mapping[str, Any] = json.loads(run.stdout)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(learned(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])))
