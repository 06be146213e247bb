"""What serving counts and measures, behind one small interface: write with ``count`` and ``observe``, read a frozen
``Snapshot``. Names are vLLM's where they mean the same. Nothing here names a user, a prompt or a reply.

Safe to use from any thread.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Mapping
from dataclasses import dataclass

COUNTERS: Mapping[str, str] = {
    "request_success_total": "replies that came to their own end",
    "prompt_tokens_total": "tokens of the prompts that were admitted",
    "prefix_cache_hits_total": "prompt tokens that were found from an earlier prompt of the same user and stack",
    "generation_tokens_total": "tokens that were written",
    "refusals_total": "calls that were refused because the queue or the user's share of it was full",
    "cancellations_total": "requests that ended early because the caller went away, asked to stop, or the engine closed",
    "deadline_errors_total": "requests that were not complete in time",
    "failures_total": "requests that ended with any other error",
    "stack_hits_total": "requests whose stack was in a slot when they came",
    "stack_misses_total": "requests whose stack was not",
    "stack_loads_total": "stacks that were read from disk",
    "stack_host_hits_total": "stacks that were attached from host memory, without reading",
    "stack_load_failures_total": "loads that came to nothing",
    "stack_evictions_total": "stacks that gave up their slot for another",
    "host_evictions_total": "stacks that gave up their place in host memory",
    "self_checks_total": "replies that were compared with a cold run",
    "self_checks_skipped_total": "sampled replies that were not compared: too many waited, the stack had gone, or the run failed",
    "self_check_mismatches_total": "comparisons in which the two did not agree; every one is a fault",
}
GAUGES: Mapping[str, str] = {
    "num_requests_running": "rows in the batch",
    "num_requests_waiting": "requests that wait for a row",
    "rows": "rows that the batch can hold",
    "slots_used": "slots that hold a stack, or are about to",
    "slots": "slots that there are",
    "host_bytes": "bytes of stacks in host memory",
    "kv_cache_usage_perc": "share of the places for keys and values that rows use (0 to 1)",
}
_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
HISTOGRAMS: Mapping[str, str] = {
    "time_to_first_token_seconds": "from the request to the first token of its reply",
    "time_per_output_token_seconds": "between two tokens of one reply",
    "e2e_request_latency_seconds": "from the request to the end of its reply",
    "request_queue_time_seconds": "from the request to its row",
    "stack_load_seconds": "from disk or host memory into a slot",
}


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often a value was at most each of ``bounds``; the last of ``counts`` is beyond them all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """0 where nothing was measured."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All numbers at one moment, by name."""

    counters: Mapping[str, int]
    gauges: Mapping[str, float]
    histograms: Mapping[str, Histogram]

    def __getitem__(self, name: str) -> float:
        """A counter or a gauge."""
        return self.counters[name] if name in self.counters else self.gauges[name]


class Metrics:
    """Where the loop, the loader and the self-check write. A name that is not in the tables above is a ``KeyError``."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._counts = {name: [0] * (len(_SECONDS) + 1) for name in HISTOGRAMS}
        self._totals = dict.fromkeys(HISTOGRAMS, 0.0)

    def count(self, name: str, more: int = 1) -> None:
        """Adds to a counter."""
        with self._turn:
            self._counters[name] += more

    def observe(self, name: str, seconds: float, times: int = 1) -> None:
        """Notes that something took so long, so many times."""
        with self._turn:
            self._counts[name][bisect.bisect_left(_SECONDS, seconds)] += times
            self._totals[name] += seconds * times

    def snapshot(self, now: Mapping[str, float], counted: Mapping[str, int]) -> Snapshot:
        """Everything as it is now: with the gauges that the caller read, and counters that others keep."""
        with self._turn:
            histograms = {
                name: Histogram(_SECONDS, tuple(counts), self._totals[name])
                for name, counts in self._counts.items()
            }
            return Snapshot(
                {**self._counters, **counted}, {name: now[name] for name in GAUGES}, histograms
            )
