"""The time to a sample's first token beside training runs of Tinker clients, over alone.

``PYTHONPATH=tests python -m benchmarks.tinker_first_token``. A server of its own is asked over its
socket, alone and beside the runs in turns. So other programs slow both down alike. The last line is
the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.figures import percentile
from benchmarks.homes import temporary_folder
from benchmarks.tinker_server import API, Client, datum, serving

_PROMPT = 16
# Seconds between two samples, so that training goes on.
_BETWEEN = 0.05


def measure(base: str, runs: int, tokens: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Return percentiles of both kinds of first token, and their ratios."""
    with temporary_folder() as home, serving(base, home) as (port, secret, _):
        client, rng = Client(port, secret), random.Random(1)
        client.post("/api/v1/users/ada", {}, "PUT")
        session, name = client.open_session()
        sampler = client.post(
            API + "create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 0, "base_model": name},
        )["sampling_session_id"]

        def text(count: int) -> list[int]:
            return [rng.randrange(10, 250) for _ in range(count)]

        def sample() -> float:
            began = time.perf_counter()
            client.call(
                "asample",
                sampling_session_id=sampler,
                prompt={"chunks": [{"tokens": text(_PROMPT)}]},
                sampling_params={"max_tokens": 1},
            )
            return time.perf_counter() - began

        asked: dict[str, Callable[[], float]] = {
            "sample": sample,
            "chat": lambda: client.first_token_of_chat(f"Say hello to {rng.random()}."),
        }
        going, steps = threading.Event(), [0] * (runs + 1)
        training: set[int] = set()

        def train(number: int) -> None:
            data = [datum(text(tokens + 1)) for _ in range(2)]
            run = Client(port, secret).train(session, number, name, 16, data)
            while True:
                training.discard(number)
                going.wait()
                training.add(number)
                next(run)
                steps[number] += 1

        def heartbeats() -> None:
            own = Client(port, secret)
            while True:
                own.post(API + "session_heartbeat", {"session_id": session})
                time.sleep(5)

        failed: list[BaseException] = []
        threading.excepthook = lambda event: failed.append(event.exc_value or KeyboardInterrupt())

        def wait_until(condition: Callable[[], bool]) -> None:
            while not condition():
                if failed:
                    raise failed[0]
                time.sleep(0.1)

        threading.Thread(target=heartbeats, daemon=True).start()
        for number in range(1, runs + 1):
            threading.Thread(target=train, args=(number,), daemon=True).start()
        # Once before anything is measured: what follows finds all memory and kernels there.
        going.set()
        wait_until(lambda: all(steps[1:]))
        going.clear()
        for each in asked.values():
            each()
        wait_until(lambda: not training)
        steps[:] = [0] * len(steps)
        times: dict[str, dict[str, list[float]]] = {
            kind: {"alone": [], "beside": []} for kind in asked
        }
        trained = 0.0
        for number in range(rounds * 2):
            way = ("alone", "beside")[number % 2]
            if way == "beside":
                going.set()
                time.sleep(3)
            began = time.perf_counter()
            for kind, ask in asked.items():
                end = time.perf_counter() + seconds / len(asked)
                while time.perf_counter() < end:
                    times[kind][way].append(ask())
                    time.sleep(_BETWEEN)
            if way == "beside":
                going.clear()
                trained += time.perf_counter() - began
                wait_until(lambda: not training)
    result: dict[str, Any] = {"base": base, "runs": runs, "tokens": tokens, "steps": sum(steps)}
    result["training_seconds"] = round(trained)
    for kind, own in times.items():
        figures = {way: _percentiles(values) for way, values in own.items()}
        result[kind] = figures | {
            f"{point}_ratio": round(figures["beside"][point] / figures["alone"][point], 2)
            for point in ("p50_ms", "p95_ms", "p99_ms")
        }
    return result


def _percentiles(seconds: list[float]) -> dict[str, float]:
    points = {f"p{point}_ms": round(percentile(seconds, point) * 1000) for point in (50, 95, 99)}
    return {"n": len(seconds), **points}


def main() -> None:
    """Measure with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="smollm2-135m-instruct")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="Tokens of each datum.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0)
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(json.dumps(measure(**vars(given))))  # noqa: T201


if __name__ == "__main__":
    main()
