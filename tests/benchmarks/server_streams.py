"""Measure the server alone: 64 streams at once on the fake backend, whose replies cost nothing.

    python -m benchmarks.server_streams      # in tests/

The clients are a process of their own. Printed as JSON: seconds to the first event and to the end
of all streams, the most threads of the server, and its CPU seconds.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import httpx2
import psutil
from flask import Flask

import personalpeft
from personalpeft.settings import Serving
from personalpeft_app.http.api_v1.routes import ApiV1
from personalpeft_app.http.concurrency import ConcurrencyLimiter, limiter_of
from personalpeft_app.http.server import make_app
from personalpeft_app.http.wsgi_server import Server

STREAMS = 64
ROUNDS = 7

Serve = Callable[[Flask, ConcurrencyLimiter], Iterator[int]]


def measure(serve: Serve) -> dict[str, float]:
    """Return the medians of ``ROUNDS`` rounds after one that is not counted."""
    with (
        tempfile.TemporaryDirectory(prefix="personalpeft-bench-") as folder,
        personalpeft.open(
            Path(folder) / "home", backend="fake", serving=Serving(max_batch=STREAMS)
        ) as runtime,
        ProcessPoolExecutor(1, get_context("spawn")) as outside,
    ):
        runtime.api_keys.ensure_admin_key()
        secret = runtime.api_keys.admin_key_file.read_text("utf-8").strip()
        for number in range(STREAMS):
            runtime.user(f"person{number}")
        api, places = ApiV1(runtime), limiter_of(runtime)
        app = make_app(runtime, places=places, more=[api.blueprint])
        process, threads = psutil.Process(), 0
        rounds = []
        with contextmanager(serve)(app, places) as port:
            for turn in range(ROUNDS + 1):
                before = process.cpu_times().user + process.cpu_times().system
                asked = outside.submit(ask_all, port, secret, turn)
                while not asked.done():
                    threads = max(threads, threading.active_count())
                    time.sleep(0.01)
                after = process.cpu_times().user + process.cpu_times().system
                rounds.append((*asked.result(), after - before))
        api.close()
    names = ("first_event_median_s", "first_event_last_s", "total_s", "server_cpu_s")
    medians = [round(statistics.median(each), 3) for each in zip(*rounds[1:], strict=True)]
    return {"streams": STREAMS, **dict(zip(names, medians, strict=True)), "threads": threads}


def ask_all(port: int, secret: str, turn: int) -> tuple[float, float, float]:
    """Read 64 streams at once: the median and the last first event, and the whole time."""
    headers = {"Authorization": f"Bearer {secret}"}
    limits = httpx2.Limits(max_connections=None)
    with (
        httpx2.Client(headers=headers, timeout=120, limits=limits, trust_env=False) as client,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        began = time.perf_counter()

        def ask(number: int) -> float:
            url = f"http://127.0.0.1:{port}/api/v1/users/person{number}/chat/stream"
            body = {"prompt": f"story {turn} of {number}"}
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


def serve(app: Flask, places: ConcurrencyLimiter) -> Iterator[int]:
    """Run our server, and yield its port."""
    server = Server(app, places, host="127.0.0.1", port=0)
    thread = threading.Thread(target=lambda: server.run(grace=1, close=lambda: None))
    thread.start()
    try:
        yield server.port
    finally:
        server.stop()
        thread.join()


if __name__ == "__main__":
    print(json.dumps(measure(serve), indent=2))  # noqa: T201
