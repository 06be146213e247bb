"""Tokens a second and memory of training runs of Tinker clients at once, over one run.

``PYTHONPATH=tests python -m benchmarks.tinker_runs``. A server of its own is asked over its socket,
by one client and by all of them in turns. So other programs slow both down alike. Each client waits
for its step before it posts the next. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.homes import temporary_folder
from benchmarks.tinker_server import API, Client, datum, serving


def measure(base: str, runs: int, tokens: int, rank: int, rounds: int, seconds: float) -> Any:
    """Return the tokens a second and the peak MB of one run and of all, and their ratios."""
    with temporary_folder() as home, serving(base, home) as (port, secret, server):
        client, rng = Client(port, secret), random.Random(1)
        session, name = client.open_session()
        steps = []
        for number in range(runs):
            data = [datum([rng.randrange(10, 250) for _ in range(tokens + 1)])]
            run = Client(port, secret).train(session, number, name, rank, data)
            steps.append(partial(next, run))
        rates: dict[str, list[float]] = {"one": [], "all": []}
        peaks: dict[str, int] = {}
        # The first run alone, before the others exist, for its memory.
        for way, chosen in [("one", steps[:1]), ("all", steps)] * rounds:
            for step in chosen:
                step()
            with _peak_mb(server) as peak:
                rates[way].append(tokens * _steps_a_second(chosen, seconds))
            client.post(API + "session_heartbeat", {"session_id": session})
            peaks.setdefault(way, peak[0])
    one, together = (sum(each) / rounds for each in rates.values())
    return {
        "base": base,
        "runs": runs,
        "tokens_a_run": tokens,
        "rank": rank,
        "tokens_a_second": {"one": round(one, 1), "all": round(together, 1)},
        "by_round": {way: [round(each, 1) for each in own] for way, own in rates.items()},
        "speed_ratio": round(together / one, 2),
        "peak_mb": peaks,
        "memory_ratio": round(peaks["all"] / peaks["one"], 2),
    }


def _steps_a_second(chosen: list[Callable[[], None]], seconds: float) -> float:
    """Return how many steps the runs make together a second, until each step ended."""
    began = time.perf_counter()
    counts = [0] * len(chosen)

    def work(number: int) -> None:
        while time.perf_counter() < began + seconds:
            chosen[number]()
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(len(chosen))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


@contextmanager
def _peak_mb(process: int) -> Iterator[list[int]]:
    """Measure the most resident MB of a process in the block, every 50 ms."""
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            status = Path(f"/proc/{process}/status").read_text("ascii", "replace")
            found = re.search(r"VmRSS:\s+(\d+) kB", status)
            peak[0] = max(peak[0], int(found[1]) // 1024 if found else 0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def main() -> None:
    """Measure with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="smollm2-135m-instruct")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="Tokens of each pass.")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="Of each turn.")
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(json.dumps(measure(**vars(given))))  # noqa: T201


if __name__ == "__main__":
    main()
