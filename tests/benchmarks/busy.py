"""``bench busy``: a chat and a learn on an idle machine and beside busy programs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from benchmarks.figures import alternate, medians, ranges, ratio, spread
from benchmarks.load_users import RANK, LoadedUsers, both_samplings, load_users
from personalpeft.backends.base import Continuation, SessionSpec
from personalpeft.engine.engine import Request
from personalpeft.learning.train.losses import SFTLoss
from personalpeft.types import Message, Sampling

_STEPS = 4
# Time until the other programs compute and the engine has noticed their start or end.
_SETTLE_SECONDS = 1.0


def bench_busy(
    base_name: str, *, repetitions: int, tokens: int, echo: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the same work beside none, one, and one program for each core, alternately.

    Chats are in tokens a second on torch and on llama.cpp, learns in optimizer steps a second.
    ``sampled`` chats are with the card's sampling, and the others are greedy. A chat's ratio is its
    loaded rate over its idle rate. A learn's ratio is the factor by which it takes longer.
    ``spread`` has the least and the most.
    """
    cores = psutil.cpu_count() or 1
    with (
        load_users(base_name, 1, echo=echo) as loaded,
        load_users(base_name, 1, backend="llamacpp", echo=echo) as on_llamacpp,
    ):
        echo("warming up")
        greedy, sampled = both_samplings(loaded.base.card, tokens).values()
        _chat(loaded, 0, greedy)
        _chat(on_llamacpp, 0, greedy)
        _learn(loaded)
        contestants: dict[str, Callable[[int], float]] = {}
        for neighbours in dict.fromkeys((0, 1, cores)):
            contestants[f"chat_beside_{neighbours}"] = _beside(
                neighbours, lambda turn: _chat(loaded, turn, greedy)
            )
            contestants[f"llamacpp_chat_beside_{neighbours}"] = _beside(
                neighbours, lambda turn: _chat(on_llamacpp, turn, greedy)
            )
            contestants[f"learn_beside_{neighbours}"] = _beside(
                neighbours, lambda turn: _learn(loaded)
            )
        contestants["chat_sampled_beside_0"] = lambda turn: _chat(loaded, turn, sampled)
        contestants["llamacpp_chat_sampled_beside_0"] = lambda turn: _chat(
            on_llamacpp, turn, sampled
        )
        figures = alternate(contestants, repetitions, echo)
    rates = {name: spread(values) for name, values in figures.items()}
    ratios = {}
    for neighbours in filter(None, dict.fromkeys((1, cores))):
        learn = f"learn_beside_{neighbours}"
        for chat in ("chat", "llamacpp_chat"):
            ratios[f"{chat}_beside_{neighbours}_vs_quiet"] = ratio(
                figures[f"{chat}_beside_{neighbours}"], figures[f"{chat}_beside_0"]
            )
        ratios[f"{learn}_times_as_long"] = ratio(figures["learn_beside_0"], figures[learn])
    ratios["llamacpp_chat_vs_chat"] = ratio(
        figures["llamacpp_chat_beside_0"], figures["chat_beside_0"]
    )
    for chat, compared in (("chat", "sampled"), ("llamacpp_chat", "llamacpp_sampled")):
        ratios[f"{compared}_vs_greedy"] = ratio(
            figures[f"{chat}_sampled_beside_0"], figures[f"{chat}_beside_0"]
        )
    return {
        "bench": "busy",
        "base": base_name,
        "cores": cores,
        "repetitions": repetitions,
        "rates": medians(rates),
        "ratios": medians(ratios),
        "spread": ranges({**rates, **ratios}),
    }


def _beside(neighbours: int, work: Callable[[int], float]) -> Callable[[int], float]:
    def measured(turn: int) -> float:
        with _busy(neighbours):
            return work(turn)

    return measured


@contextmanager
def _busy(programs: int) -> Iterator[None]:
    running = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)
    ]
    try:
        time.sleep(_SETTLE_SECONDS)
        yield
    finally:
        for program in running:
            program.kill()
            program.wait()


def _chat(loaded: LoadedUsers, turn: int, sampling: Sampling) -> float:
    """Return the tokens a second of one reply, from its first token on."""
    question = Message("user", f"Tell me a long story about number {turn}.")
    request = Request("bench", (question,), loaded.stack(0), sampling)
    replies = loaded.engine.stream([request])
    next(replies)
    began = time.perf_counter()
    written = sum(len(piece.tokens) for piece in replies)
    return written / (time.perf_counter() - began)


def _learn(loaded: LoadedUsers) -> float:
    """Return the optimizer steps a second on four lessons each."""
    backend = loaded.engine.backend
    spec = SessionSpec(RANK, 4.0, tuple(sorted(backend.base.architecture.projections)), seed=0)
    answer = (
        backend.encode("In short: it rains there, and people carry umbrellas.")
        + backend.end_of_turn
    )
    terms = [
        SFTLoss(
            Continuation(
                backend.render([Message("user", f"How is the weather in city {number}?")]), answer
            )
        )
        for number in range(4)
    ]
    session = backend.session(spec)
    try:
        session.precompute_ref_log_probs(terms)
        session.step(terms, 1e-4)
        began = time.perf_counter()
        for _ in range(_STEPS):
            session.step(terms, 1e-4)
        return _STEPS / (time.perf_counter() - began)
    finally:
        session.close()
