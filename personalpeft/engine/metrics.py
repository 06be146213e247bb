"""What serving counts and measures. The names are vLLM's where the meaning is the same.

No metric contains a user's name, a prompt or a reply. Safe to use from any thread.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from personalpeft.backends.sequence import OutputChunk
from personalpeft.engine.request import RequestState

COUNTERS: Mapping[str, str] = {
    "request_success_total": "replies that ended by themselves",
    "prompt_tokens_total": "tokens of the prompts that were started",
    "prefix_cache_hits_total": "prompt tokens found in the prompt cache of the same user and stack",
    "generation_tokens_total": "tokens that were generated",
    "num_preemptions_total": "times a running request gave up its memory and was resumed later",
    "refusals_total": "calls refused because the queue or the user's share of it was full",
    "cancellations_total": "requests that the caller cancelled or that closing ended",
    "deadline_errors_total": "requests that were not complete in time",
    "failures_total": "requests that ended with any other error",
    "stack_hits_total": "requests whose stack had a slot on arrival",
    "stack_misses_total": "requests whose stack had none",
    "stack_loads_total": "stacks read from disk",
    "stack_host_hits_total": "stacks attached from host memory, without reading",
    "stack_load_failures_total": "loads that failed",
    "stack_evictions_total": "stacks that lost their slot to another",
    "host_evictions_total": "stacks that lost their place in host memory",
    "self_checks_total": "replies compared with a cold run",
    "self_checks_skipped_total": "sampled replies not compared: too many, or no stack, or an error",
    "self_check_mismatches_total": "comparisons that did not agree; each one is a fault",
}
GAUGES: Mapping[str, str] = {
    "num_requests_running": "requests in the batch",
    "num_requests_waiting": "requests that wait to start or resume",
    "rows": "requests that the batch can hold",
    "slots_used": "slots with a stack, attached or loading",
    "slots": "slots in all",
    "host_bytes": "bytes of stacks in host memory",
    "kv_cache_usage_perc": "share of the key-value cache that running requests use (0 to 1)",
}
HISTOGRAMS: Mapping[str, str] = {
    "time_to_first_token_seconds": "from the request to the first token of its reply",
    "time_per_output_token_seconds": "between two tokens of one reply",
    "e2e_request_latency_seconds": "from the request to the end of its reply",
    "request_queue_time_seconds": "from the request to its start",
    "stack_load_seconds": "from disk or host memory into a slot",
}
_MILLISECONDS = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1e3, 2.5e3, 5e3, 1e4, 3e4, 6e4)
_BUCKETS = tuple(ms / 1e3 for ms in _MILLISECONDS)
# Weight of the newest reply in the average duration.
_NEWEST_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values were at most each of ``bounds``, and last how many were larger."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All metrics at one moment, by name."""

    counters: Mapping[str, int]
    gauges: Mapping[str, float]
    histograms: Mapping[str, Histogram]

    def __getitem__(self, name: str) -> float:
        """Return a counter or a gauge."""
        return self.counters[name] if name in self.counters else self.gauges[name]


class Metrics:
    """Collects counts and measurements, and estimates how long a full queue takes.

    A name outside of the tables above raises ``KeyError``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._buckets = {name: [0] * (len(_BUCKETS) + 1) for name in HISTOGRAMS}
        self._totals = dict.fromkeys(HISTOGRAMS, 0.0)
        # Average seconds from the start of a reply to its end. The engine's thread alone writes it.
        self._reply_seconds = 0.0

    def count(self, name: str, more: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counters[name] += more

    def observe(self, name: str, seconds: float) -> None:
        """Record a duration."""
        with self._lock:
            self._buckets[name][bisect.bisect_left(_BUCKETS, seconds)] += 1
            self._totals[name] += seconds

    def snapshot(self, gauges: Mapping[str, float], counters: Mapping[str, int]) -> Snapshot:
        """Return all metrics, with the gauges and the counters that the caller keeps."""
        with self._lock:
            histograms = {
                name: Histogram(_BUCKETS, tuple(counts), self._totals[name])
                for name, counts in self._buckets.items()
            }
            ordered = {name: gauges[name] for name in GAUGES}
            return Snapshot({**self._counters, **counters}, ordered, histograms)

    def estimate_wait(self, num_requests: int, rows: int) -> int:
        """Return the estimated seconds until ``num_requests`` have left a batch of ``rows``."""
        return max(1, math.ceil(num_requests * self._reply_seconds / rows))

    def record_start(self, request: RequestState) -> None:
        """Record that a request started for the first time."""
        self.count("prompt_tokens_total", len(request.prompt_tokens))
        self.observe("request_queue_time_seconds", request.started - request.arrived)

    def record_chunk(self, request: RequestState, chunk: OutputChunk, now: float) -> None:
        """Record a chunk of a request at a time in seconds, and its end if it is the last one."""
        if count := len(chunk.tokens):
            self.count("generation_tokens_total", count)
            if request.last_token is None:
                self.observe("time_to_first_token_seconds", now - request.arrived)
            else:
                for _ in range(count):
                    seconds = (now - request.last_token) / count
                    self.observe("time_per_output_token_seconds", seconds)
            request.last_token = now
        if chunk.finish is not None:
            self.count("request_success_total")
            self.observe("e2e_request_latency_seconds", now - request.arrived)
            weight = _NEWEST_WEIGHT if self._reply_seconds else 1.0
            self._reply_seconds += (now - request.started - self._reply_seconds) * weight
