"""``bench busy``: a chat and a learn on a quiet machine, beside one program that computes without end, and beside one on every core."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from benchmarks.figures import ratio, spread, taking_turns
from benchmarks.load_users import RANK, Crowd, crowd
from personalpeft.backends.base import Continuation, SessionSpec
from personalpeft.engine.engine import Request
from personalpeft.learning.train.losses import SFTLoss
from personalpeft.types import Message, Sampling

_STEPS = 4
# Until the neighbours compute, and the engine has noticed that they do, or that they are gone.
_SETTLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class BusyBench:
    """The object that ``--json`` prints: medians over the repetitions; ``spread`` has the least and the most.

    Chats are in tokens a second, learns in optimizer steps a second. Ratios are those beside neighbours over quiet ones.
    """

    bench: str
    base: str
    cores: int
    repetitions: int
    rates: dict[str, float]
    ratios: dict[str, float]
    spread: dict[str, tuple[float, float]]


def bench_busy(
    base_name: str, *, repetitions: int, tokens: int, say: Callable[[str], None]
) -> BusyBench:
    """Measure the same work beside none, one and as many neighbours as there are cores, in turns."""
    cores = psutil.cpu_count() or 1
    with crowd(base_name, 1, say=say) as people:
        say("warming up")
        _chat(people, 0, tokens)
        _learn(people)
        contestants: dict[str, Callable[[int], float]] = {}
        for neighbours in dict.fromkeys((0, 1, cores)):
            contestants[f"chat_beside_{neighbours}"] = _beside(
                neighbours, lambda turn: _chat(people, turn, tokens)
            )
            contestants[f"learn_beside_{neighbours}"] = _beside(
                neighbours, lambda turn: _learn(people)
            )
        figures = taking_turns(contestants, repetitions, say)
    rates = {name: spread(values) for name, values in figures.items()}
    ratios = {
        f"{name}_vs_quiet": ratio(values, figures[f"{name.partition('_')[0]}_beside_0"])
        for name, values in figures.items()
        if not name.endswith("_0")
    }
    return BusyBench(
        bench="busy",
        base=base_name,
        cores=cores,
        repetitions=repetitions,
        rates={name: each.median for name, each in rates.items()},
        ratios={name: each.median for name, each in ratios.items()},
        spread={name: (each.least, each.most) for name, each in {**rates, **ratios}.items()},
    )


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


def _chat(people: Crowd, turn: int, tokens: int) -> float:
    """Return the tokens a second of one greedy reply, from its first token on."""
    question = Message("user", f"Tell me a long story about number {turn}.")
    request = Request("bench", (question,), people.stack(0), Sampling(max_tokens=tokens))
    replies = people.engine.stream([request])
    next(replies)
    began = time.perf_counter()
    written = sum(len(piece.tokens) for piece in replies)
    return written / (time.perf_counter() - began)


def _learn(people: Crowd) -> float:
    """Return the optimizer steps a second on four lessons each."""
    backend = people.engine.backend
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
