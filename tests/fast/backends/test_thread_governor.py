"""The thread governor uses as many threads as cores are free, and more once they become free."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import namedtuple

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from personalpeft import host
from personalpeft.backends.thread_governor import (
    CpuUsage,
    ThreadGovernor,
    read_cpu_usage,
    thread_counts,
)


class SimulatedMachine:
    """Cores that are shared fairly between our threads and always-running programs."""

    def __init__(self, cores: int, neighbours: int = 0) -> None:
        self.cores, self.neighbours = cores, neighbours
        self.now = self.busy = self.own = 0.0
        self.governor = ThreadGovernor(
            thread_counts(cores),
            cores,
            read=lambda: CpuUsage(self.now, self.busy, self.own),
            clock=lambda: self.now,
        )

    def run(self, seconds: float) -> int:
        """Compute for ``seconds`` and return the final number of threads."""
        threads = self.governor.threads()
        for _ in range(round(seconds / 0.05)):
            share = min(1.0, self.cores / (threads + self.neighbours))
            self.now += 0.05
            self.own += 0.05 * threads * share
            self.busy += 0.05 * (threads + self.neighbours) * share
            threads = self.governor.threads()
        return threads


@pytest.mark.parametrize(
    ("cores", "neighbours", "threads"),
    [(2, 1, 1), (2, 2, 1), (4, 1, 3), (8, 2, 6), (16, 8, 8), (16, 40, 3), (1, 3, 1)],
)
def test_threads_yield_to_other_programs_and_return(
    cores: int, neighbours: int, threads: int
) -> None:
    machine = SimulatedMachine(cores)
    assert machine.run(1) == cores
    machine.neighbours = neighbours
    assert machine.run(2) <= max(threads, 1)
    assert machine.run(2) >= 1
    machine.neighbours = 0
    assert machine.run(1) == cores


def test_two_runtimes_share_the_cores_without_oscillating() -> None:
    usage = {"now": 0.0, "a": 0.0, "b": 0.0}
    governors = {
        name: ThreadGovernor(
            (1, 2),
            2,
            read=lambda name=name: CpuUsage(usage["now"], usage["a"] + usage["b"], usage[name]),
            clock=lambda: usage["now"],
        )
        for name in "ab"
    }
    history = []
    for _ in range(100):
        threads = {name: governor.threads() for name, governor in governors.items()}
        history.append(tuple(threads.values()))
        usage["now"] += 0.05
        for name, count in threads.items():
            usage[name] += 0.05 * count * min(1.0, 2 / sum(threads.values()))
    assert set(history[10:]) == {(1, 1)}


def test_threads_sharing_a_core_beside_an_idle_one_are_noticed_once() -> None:
    machine = SimulatedMachine(2)
    machine.run(1)
    assert not machine.governor.is_crowded()
    for _ in range(10):
        machine.now += 0.05
        machine.own += 0.05
        machine.busy += 0.05
        machine.governor.threads()
    assert machine.governor.is_crowded()
    assert not machine.governor.is_crowded()


@given(st.integers(1, 256))
def test_a_core_count_has_few_thread_counts_from_one_to_all(cores: int) -> None:
    counts = thread_counts(cores)
    assert counts[0] == 1
    assert counts[-1] == cores
    assert len(counts) <= 2 * cores.bit_length() + 1
    assert list(counts) == sorted(set(counts))


def test_the_counters_separate_other_programs_from_this_process() -> None:
    before = read_cpu_usage()
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        if hasattr(os, "nice") and os.nice(0) > 0:
            pytest.skip("a program that is started here yields to all others")
        time.sleep(1.0)
        now = read_cpu_usage()
    finally:
        other.kill()
        other.wait()
    assert (
        now.busy_seconds - before.busy_seconds > now.process_seconds - before.process_seconds + 0.2
    )


@pytest.mark.parametrize(
    ("yields", "low", "busy"), [(True, False, 3), (False, False, 8), (True, True, 8)]
)
def test_programs_of_low_priority_count_where_they_do_not_yield(
    yields: bool, low: bool, busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = namedtuple("times", "user nice idle")(3.0, 5.0, 7.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [times])
    monkeypatch.setattr(host, "cpu_affinity", frozenset)
    monkeypatch.setattr(host, "low_priority_yields", lambda: yields)
    monkeypatch.setattr(host, "has_low_priority", lambda: low)
    assert read_cpu_usage().busy_seconds == busy
