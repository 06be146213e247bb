"""Choose the number of threads by the cores that other programs leave free.

A pass has hundreds of short parallel loops, each as slow as its slowest thread. Beside one busy
program on two cores, a pass with two threads takes ten times as long. With one thread it takes 1.5
times as long (docs/explanation/serving.md). So there are never more threads than free cores.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from personalpeft import host

# Seconds between two readings. The counters advance in steps of 10 ms.
_WINDOW = 0.2
# Shares of a core that others use when a thread gives way, and when it comes back. Two programs
# on one core get half of it each, three on two cores two thirds.
_GIVE_WAY, _COME_BACK = 0.4, 0.75


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """CPU seconds up to a time: of all programs on this process's cores, and of this process."""

    at: float
    busy_seconds: float
    process_seconds: float


def read_cpu_usage() -> CpuUsage:
    """Read the counters of the operating system.

    Programs of low priority count as busy, unless the system has them yield to this process.
    """
    affinity = host.cpu_affinity()
    ignores_low = host.low_priority_yields() and not host.has_low_priority()
    busy = 0.0
    for core, times in enumerate(psutil.cpu_times(percpu=True)):
        if affinity and core not in affinity:
            continue
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Linux includes guest time in user time.
        twice = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        yielding = getattr(times, "nice", 0.0) if ignores_low else 0.0
        busy += sum(times) - idle - twice - yielding
    return CpuUsage(time.monotonic(), busy, time.process_time())


class ThreadGovernor:
    """Follow the load of the machine. Not thread-safe: the model's lock guards it.

    Args:
        counts: The numbers of threads to choose from, ascending.
        cores: How many cores this process may use.
        read: Reads the processor's counters.
        clock: Seconds, to know when to look again.
    """

    def __init__(
        self,
        counts: Sequence[int],
        cores: int,
        *,
        read: Callable[[], CpuUsage] = read_cpu_usage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts, self._cores = tuple(counts), cores
        self._read, self._clock = read, clock
        self._threads = self._counts[-1]
        self._last = read() if len(self._counts) > 1 else None
        self._crowded = False

    def threads(self) -> int:
        """Return how many threads the next pass should use."""
        if self._last is not None and self._clock() - self._last.at >= _WINDOW:
            now = self._read()
            self._follow(self._last, now)
            self._last = now
        return self._threads

    def is_crowded(self) -> bool:
        """Return whether the threads share cores while others are idle, once per observation.

        Spinning threads never sleep, so some schedulers never move them. A new team gets new cores.
        """
        crowded, self._crowded = self._crowded, False
        return crowded

    def _follow(self, before: CpuUsage, now: CpuUsage) -> None:
        elapsed = now.at - before.at
        if elapsed <= 0:
            return
        spent = now.process_seconds - before.process_seconds
        others = max(0.0, now.busy_seconds - before.busy_seconds - spent) / elapsed
        free, own = self._cores - others, spent / elapsed
        # An idle process uses little too; a new team costs it under a millisecond.
        self._crowded = own < self._threads - 0.5 and free - own > 0.5
        fewer, more = math.floor(free + 1 - _GIVE_WAY), math.floor(free + 1 - _COME_BACK)
        if fewer < self._threads:
            self._threads = self._allowed(fewer)
        elif more > self._threads:
            self._threads = self._allowed(more)

    def _allowed(self, threads: int) -> int:
        return max((count for count in self._counts if count <= threads), default=self._counts[0])


def thread_counts(most: int) -> tuple[int, ...]:
    """Return the thread counts to choose from: powers of two, 1.5 times these, and ``most``."""
    powers = [1 << n for n in range(most.bit_length())]
    steps = {*powers, *(power + power // 2 for power in powers)}
    return tuple(sorted({1, most} | {count for count in steps if count <= most}))
