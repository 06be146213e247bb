"""``bench streams``: 64 users stream one reply each at once from the HTTP server.

Replies of the fake backend cost nothing, so it measures the server alone. The clients are a
process of their own.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from typing import Any

import httpx2
import psutil

from benchmarks.figures import medians, ranges, ratio, spread
from benchmarks.homes import temporary_home
from benchmarks.server import GREEDY, serving
from personalpeft.settings import Serving
from personalpeft_app.http.api_v1.blueprint import ApiV1

STREAMS = 64
_ENDED = "all streams ended"
_FIGURES = ("first event, median", "first event, last", _ENDED, "CPU of the server")


def bench_streams(
    base_name: str, backend: str, *, repetitions: int, tokens: int, echo: Callable[[str], None]
) -> dict[str, Any]:
    """Stream all replies at once, repeatedly; a first time does not count.

    ``greedy`` is without the card's sampling. ``sampled_vs_greedy`` compares the time to the end.
    ``threads`` is the peak of the server's process, and ``spread`` has the least and the most.
    """
    limits = Serving(max_batch=STREAMS) if backend == "fake" else Serving()
    with (
        temporary_home(base_name, backend, serving=limits) as runtime,
        closing(ApiV1(runtime)) as api,
        serving(runtime, api.blueprint) as (_, port, secret),
        ProcessPoolExecutor(1, get_context("spawn")) as outside,
    ):
        for number in range(STREAMS):
            runtime.user(f"person{number}")
        process, threads = psutil.Process(), 0

        # Other prompts each time, since prompts are cached.
        numbers = itertools.count()

        def stream_all(settings: Mapping[str, float]) -> tuple[float, ...]:
            nonlocal threads
            before = process.cpu_times().user + process.cpu_times().system
            asked = outside.submit(_ask_all, port, secret, next(numbers), tokens, settings)
            while not asked.done():
                threads = max(threads, threading.active_count())
                time.sleep(0.01)
            after = process.cpu_times().user + process.cpu_times().system
            return (*asked.result(), after - before)

        stream_all({})
        rounds: dict[str, list[tuple[float, ...]]] = {"": [], ", greedy": []}
        for turn in range(1, repetitions + 1):
            for (kind, figures), settings in zip(rounds.items(), ({}, GREEDY), strict=True):
                figures.append(stream_all(settings))
                echo(f"{turn} of {repetitions}{kind}: all ended after {figures[-1][2]:.2f} s")
        base = runtime.base().card.name
    seconds = {
        f"{name}{kind}": each
        for kind, figures in rounds.items()
        for name, each in zip(_FIGURES, zip(*figures, strict=True), strict=True)
    }
    found = {name: spread(each) for name, each in seconds.items()}
    ratios = {"sampled_vs_greedy": ratio(seconds[f"{_ENDED}, greedy"], seconds[_ENDED])}
    return {
        "bench": "streams",
        "base": base,
        "streams": STREAMS,
        "tokens": tokens,
        "repetitions": repetitions,
        "seconds": medians(found),
        "ratios": medians(ratios),
        "spread": ranges({**found, **ratios}),
        "threads": threads,
    }


def _ask_all(
    port: int, secret: str, turn: int, tokens: int, settings: Mapping[str, float]
) -> tuple[float, float, float]:
    """Read all streams at once; return the median and last first event, and the total time."""
    headers = {"Authorization": f"Bearer {secret}"}
    limits = httpx2.Limits(max_connections=None)
    with (
        httpx2.Client(headers=headers, timeout=600, limits=limits, trust_env=False) as client,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        began = time.perf_counter()

        def ask(number: int) -> float:
            url = f"http://127.0.0.1:{port}/api/v1/users/person{number}/chat/stream"
            body = {"prompt": f"Tell story {turn} of {number}.", "max_tokens": tokens, **settings}
            with client.stream("POST", url, json=body) as response:
                response.raise_for_status()
                lines = response.iter_lines()
                next(lines)
                first = time.perf_counter() - began
                if "event: ended" not in lines:
                    raise RuntimeError("a stream broke off")
            return first

        firsts = list(pool.map(ask, range(STREAMS)))
        return statistics.median(firsts), max(firsts), time.perf_counter() - began
