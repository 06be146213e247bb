"""``bench soak``: do memory and open files stay flat while chats, feedback and learns go on?"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import psutil

import personalpeft
from personalpeft import NothingToLearn, Runtime
from personalpeft.types import Progress

_USERS = 8
_EDITS_A_LEARN = 6
# Two of four quarters are compared, and each needs some rounds.
_LEAST_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class SoakBench:
    """The object that ``--json`` prints.

    A round is six corrected replies, a streamed reply that is cancelled, a learn and, in turns, a
    rollback or a forgotten turn of one user. Figures compare the medians of the second and the last
    quarter of the rounds. In the first quarter all users are new.
    """

    bench: str
    base: str
    minutes: float
    rounds: int
    turns: int
    learns: int
    memory_mb: dict[str, float]
    open_files: dict[str, float]
    threads: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Sample:
    memory_mb: float
    open_files: int
    threads: int


def bench_soak(base: str, *, backend: str, minutes: float, progress: Progress) -> SoakBench:
    """Use a home for some minutes, and compare memory, open files and threads over time."""
    process, samples, turns, learns = psutil.Process(), [], 0, 0
    with (
        tempfile.TemporaryDirectory(prefix="personalpeft-bench-") as folder,
        personalpeft.open(Path(folder, "home"), base=base, backend=backend) as runtime,
    ):
        began = time.monotonic()
        rounds = _rounds(runtime)
        while (spent := time.monotonic() - began) < 60 * minutes or len(samples) < _LEAST_ROUNDS:
            progress("Soaking", min(1.0, spent / (60 * minutes)))
            turns_now, learned = next(rounds)
            turns, learns = turns + turns_now, learns + learned
            gc.collect()
            samples.append(
                _Sample(process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())
            )
        spent = time.monotonic() - began
    return SoakBench(
        bench="soak",
        base=base,
        minutes=round(spent / 60, 1),
        rounds=len(samples),
        turns=turns,
        learns=learns,
        memory_mb=_compare([each.memory_mb for each in samples]),
        open_files=_compare([each.open_files for each in samples]),
        threads=_compare([each.threads for each in samples]),
    )


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


def _compare(values: list[float] | list[int]) -> dict[str, float]:
    """Return the medians of the second and the last quarter, and their ratio."""
    quarter = len(values) // 4
    early, late = median(values[quarter : 2 * quarter]), median(values[-quarter:])
    return {"second_quarter": early, "last_quarter": late, "ratio": late / early}
