"""``bench prompts``: the time to read a prompt, alone and where its beginning is cached.

A user's first chat reads its whole prompt; the next ones share the system prompt with it. Sixteen
replies to one long prompt read it once; of sixteen users each reads it. The torch backend, no layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.figures import alternate, medians, ranges, ratio, spread
from benchmarks.homes import temporary_home

TOGETHER = 16
_CHATS = 6
_QUESTIONS = (
    "How can I sleep better?",
    "What should I cook tonight?",
    "Explain what a volcano is.",
    "How do I fix a flat tyre?",
    "Why is the sky blue?",
    "How do I clean a window?",
)
_LONG = " ".join(_QUESTIONS * 8)


def bench_prompts(
    base_name: str, *, repetitions: int, echo: Callable[[str], None]
) -> dict[str, Any]:
    """Measure first tokens of new and known users, and batches of one user and of sixteen.

    ``spread`` has the least and the most of the repetitions.
    """
    with temporary_home(base_name, "torch") as runtime:

        def first_tokens(repetition: int, *, known: bool) -> float:
            """Return the milliseconds of a first token, the mean of some chats."""
            total = 0.0
            for number, question in enumerate(_QUESTIONS[:_CHATS]):
                user = runtime.user("known" if known else f"new-{repetition}-{number}")
                began = time.perf_counter()
                user.chat(f"{question} ({repetition})", max_tokens=1)
                total += time.perf_counter() - began
            return 1000 * total / _CHATS

        def together(repetition: int, *, users: int) -> float:
            """Return the milliseconds until sixteen prompts are read."""

            def ask(number: int) -> None:
                user = runtime.user(f"of-{users}-{repetition}-{number % users}")
                user.chat(_LONG, max_tokens=1, temperature=1.0, seed=number)

            with ThreadPoolExecutor(TOGETHER) as pool:
                began = time.perf_counter()
                list(pool.map(ask, range(TOGETHER)))
                return 1000 * (time.perf_counter() - began)

        contestants = {
            "first token of a new user": lambda n: first_tokens(n, known=False),
            "first token of a known user": lambda n: first_tokens(n, known=True),
            "sixteen users": lambda n: together(n, users=TOGETHER),
            "one user": lambda n: together(n, users=1),
        }
        for run in contestants.values():
            run(0)
        found = alternate(contestants, repetitions, echo)
    new, known, sixteen, one = found.values()
    ratios = {
        "known user over new user": ratio(known, new),
        "one user over sixteen": ratio(one, sixteen),
    }
    times = {name: spread(values) for name, values in found.items()}
    return {
        "bench": "prompts",
        "base": base_name,
        "repetitions": repetitions,
        "milliseconds": medians(times),
        "ratios": medians(ratios),
        "spread": ranges({**times, **ratios}),
    }
