"""``bench soak``: do memory and open files stay flat while chats, feedback and learns go on?"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from itertools import count
from statistics import median
from typing import Any

import psutil

from benchmarks.homes import temporary_home
from personalpeft import NothingToLearn, Runtime
from personalpeft.types import Progress

_USERS = 8
_EDITS_A_LEARN = 6
# Two of four quarters are compared, and each needs some rounds.
_LEAST_ROUNDS = 8


def bench_soak(base: str, *, backend: str, minutes: float, progress: Progress) -> dict[str, Any]:
    """Use a home for some minutes, and compare memory, open files and threads over time.

    A round is six corrected replies, a streamed reply that is cancelled, a learn and, in turns, a
    rollback or a forgotten turn of one user. Figures compare the medians of the second and the last
    quarter of the rounds. In the first quarter all users are new.
    """
    process, turns, learns = psutil.Process(), 0, 0
    samples: list[tuple[float, int, int]] = []
    with temporary_home(base, backend) as runtime:
        began = time.monotonic()
        rounds = _rounds(runtime)
        while (spent := time.monotonic() - began) < 60 * minutes or len(samples) < _LEAST_ROUNDS:
            progress("Soaking", min(1.0, spent / (60 * minutes)) if minutes else 1.0)
            turns_now, learned = next(rounds)
            turns, learns = turns + turns_now, learns + learned
            gc.collect()
            samples.append(
                (process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())
            )
        spent = time.monotonic() - began
    memory, open_files, threads = map(_compare, zip(*samples, strict=True))
    return {
        "bench": "soak",
        "base": base,
        "minutes": round(spent / 60, 1),
        "rounds": len(samples),
        "turns": turns,
        "learns": learns,
        "memory_mb": memory,
        "open_files": open_files,
        "threads": threads,
    }


def _rounds(runtime: Runtime) -> Iterator[tuple[int, int]]:
    """Do a round at a time, and yield the turns and learns of each."""
    for number in count():
        user = runtime.user(f"user-{number % _USERS}")
        for each in range(_EDITS_A_LEARN):
            reply = user.chat(f"What is {number} and {each}?", temperature=0, max_tokens=8)
            user.feedback(reply, edit=f"Ahoy! It is {number + each}. Arrr!")
        stream = user.stream("Tell me a story.", max_tokens=64)
        next(stream)
        stream.close()
        learned = 1
        try:
            user.learn(steps=4)
        except NothingToLearn:
            learned = 0
        turn, entries = (number // _USERS) % 3, user.stack().entries
        if turn == 1 and entries:
            user.rollback("style")
        elif turn == 2:
            user.forget("last", rebuild=False)
        yield _EDITS_A_LEARN + 1, learned


def _compare(values: Sequence[float]) -> dict[str, float]:
    """Return the medians of the second and the last quarter, and their ratio."""
    quarter = len(values) // 4
    early, late = median(values[quarter : 2 * quarter]), median(values[-quarter:])
    return {"second_quarter": early, "last_quarter": late, "ratio": late / early}
