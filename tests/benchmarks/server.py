"""``bench server``: the overhead of a reply over HTTP, compared with the library in one run.

Both get new questions with replies of equal length on the same runtime, alternately. A client reads
every event as it arrives; the sixteen streams are read in a process of their own. ``/healthz`` is
polled while the streams run.
"""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from flask import Blueprint

from benchmarks.figures import alternate, ratio, spread
from benchmarks.homes import temporary_home
from personalpeft import Runtime
from personalpeft_app.http.concurrency import limiter_of
from personalpeft_app.http.server import make_app
from personalpeft_app.http.wsgi_server import Server

STREAMS = 16
GREEDY: Mapping[str, float] = {"temperature": 0}
"""In a request. Without it the card's sampling counts."""
# First tokens that one figure is the median of.
_ASKED = 9
# Seconds between two health checks.
_BETWEEN = 0.02
_PATIENCE = 600


def bench_server(
    base: str, backend: str, *, repetitions: int, tokens: int, echo: Callable[[str], None]
) -> dict[str, Any]:
    """Serve a temporary home on a free local port and measure it.

    ``first_token_overhead_ms`` is the server's extra time to the first token of one stream.
    ``rate_ratio`` compares tokens a second of sixteen streams, server over library. ``sampled`` is
    the server with the card's sampling, and the others are greedy. ``healthz_ms`` are response
    times while these run.
    """
    with (
        temporary_home(base, backend) as runtime,
        serving(runtime) as address,
        ProcessPoolExecutor(1, get_context("spawn")) as outside,
    ):
        line = _HttpClient(*address)
        for number in range(STREAMS):
            runtime.user(_name(number))
        echo("warming up")
        health: list[float] = []
        ways: dict[str, Callable[[int, str, int], tuple[float, int]]] = {
            "library": lambda user, prompt, count: _in_library(runtime, user, prompt, count),
            "server": line.ask,
        }

        def from_outside(turn: int, settings: Mapping[str, float] = GREEDY) -> float:
            return outside.submit(_rate_outside, address, turn, tokens, settings).result()

        _rate(ways["library"], 0, tokens)
        from_outside(0)
        # The numbers of their prompts differ, so that none finds another's prompts in a cache.
        contestants: dict[str, Callable[[int], float]] = {
            "library first": lambda repetition: _first(ways["library"], 2 * repetition),
            "server first": lambda repetition: _first(ways["server"], 2 * repetition + 1),
            "library rate": lambda repetition: _rate(ways["library"], 3 * repetition, tokens),
            "server rate": lambda repetition: _under_watch(
                line, health, lambda: from_outside(3 * repetition + 1)
            ),
            "server, sampled rate": lambda repetition: from_outside(3 * repetition + 2, {}),
        }
        figures = alternate(contestants, repetitions, echo)
        first = {way: [1000 * each for each in figures[f"{way} first"]] for way in ways}
        rate = {way: figures[f"{way} rate"] for way in (*ways, "server, sampled")}
        both = zip(first["server"], first["library"], strict=True)
        return {
            "bench": "server",
            "base": runtime.base().card.name,
            "repetitions": repetitions,
            "first_token_ms": {way: spread(each) for way, each in first.items()},
            "first_token_overhead_ms": spread([over - under for over, under in both]),
            "tokens_per_second": {way: spread(each) for way, each in rate.items()},
            "rate_ratio": ratio(rate["server"], rate["library"]),
            "sampled_vs_greedy": ratio(rate["server, sampled"], rate["server"]),
            "healthz_ms": spread([1000 * each for each in health]),
        }


class _HttpClient:
    """A client of the server with one connection for each thread.

    Without ``settings`` of sampling the card's count.
    """

    def __init__(
        self, host: str, port: int, secret: str, settings: Mapping[str, float] = GREEDY
    ) -> None:
        self._where, self._settings = (host, port), settings
        self._headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        self._own = threading.local()

    def ask(self, user: int, prompt: str, tokens: int) -> tuple[float, int]:
        """Stream one reply and return the seconds to its first text, and its tokens."""
        asked = {
            "model": _name(user),
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
        }
        how = {**self._settings, "stream": True, "stream_options": {"include_usage": True}}
        began, first, written = time.perf_counter(), 0.0, 0
        connection = self._connection()
        connection.request(
            "POST", "/v1/chat/completions", json.dumps({**asked, **how}), self._headers
        )
        for row in connection.getresponse():
            if not row.startswith(b"data: {"):
                continue
            event = json.loads(row[len(b"data: ") :])
            if not first and any(choice["delta"].get("content") for choice in event["choices"]):
                first = time.perf_counter() - began
            written = (event.get("usage") or {}).get("completion_tokens", written)
        return first, written

    def healthz(self) -> float:
        """Return the response time of a health check."""
        began = time.perf_counter()
        connection = self._connection()
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        return time.perf_counter() - began

    def _connection(self) -> http.client.HTTPConnection:
        if not hasattr(self._own, "connection"):
            self._own.connection = http.client.HTTPConnection(*self._where, timeout=_PATIENCE)
        connection: http.client.HTTPConnection = self._own.connection
        return connection


def _in_library(runtime: Runtime, user: int, prompt: str, tokens: int) -> tuple[float, int]:
    began = time.perf_counter()
    # As the server finds its user.
    stream = runtime.user(_name(user), create=False).stream(
        prompt, temperature=0, max_tokens=tokens
    )
    next(stream, None)
    first = time.perf_counter() - began
    for _ in stream:
        pass
    return first, stream.reply.usage.completion_tokens


def _first(way: Callable[[int, str, int], tuple[float, int]], turn: int) -> float:
    """Return the median seconds to the first token, one stream after another."""
    return statistics.median(
        way(0, f"What is question {number} of round {turn}?", 2)[0] for number in range(_ASKED)
    )


def _rate(way: Callable[[int, str, int], tuple[float, int]], turn: int, tokens: int) -> float:
    """Return the tokens a second of sixteen concurrent users."""
    with ThreadPoolExecutor(STREAMS) as pool:
        began = time.perf_counter()
        prompts = [f"Tell {_name(user)} story {turn}." for user in range(STREAMS)]
        replies = pool.map(way, range(STREAMS), prompts, [tokens] * STREAMS)
        return sum(written for _, written in replies) / (time.perf_counter() - began)


def _rate_outside(
    address: tuple[str, int, str], turn: int, tokens: int, settings: Mapping[str, float]
) -> float:
    """Run ``_rate`` over HTTP in a client process."""
    return _rate(_HttpClient(*address, settings).ask, turn, tokens)


def _under_watch(line: _HttpClient, health: list[float], work: Callable[[], float]) -> float:
    """Poll the health check while the work runs, at least once."""
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            health.append(line.healthz())
            over.wait(_BETWEEN)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return work()
    finally:
        over.set()
        watcher.join()


def _name(number: int) -> str:
    return f"person{number}"


@contextmanager
def serving(
    runtime: Runtime, *more: Blueprint, owner: str | None = None
) -> Iterator[tuple[str, int, str]]:
    """Serve a runtime; yield the host, the port and an administrator's API key."""
    runtime.api_keys.ensure_admin_key()
    limiter = limiter_of(runtime)
    server = Server(
        make_app(runtime, owner=owner, limiter=limiter, more=more),
        limiter,
        host="127.0.0.1",
        port=0,
    )
    thread = threading.Thread(target=lambda: server.run(grace=1, close=lambda: None))
    thread.start()
    try:
        yield "127.0.0.1", server.port, runtime.api_keys.admin_key_file.read_text("utf-8").strip()
    finally:
        server.stop()
        thread.join()
