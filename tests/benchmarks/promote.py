"""``bench promote``: the effect of a promotion on other users, and the hand-over time.

Stall: fifteen users are answered while a sixteenth's new revisions are promoted. They are stored
durably, become the head and are loaded into a slot. Gaps between two tokens are compared with an
idle run. Hand-over: our way stores the packed file, makes it live, loads it into a running engine
and generates a token. PEFT's way merges, saves the weights, loads them again in transformers and
generates a token. Both start with the adapter in memory and the base loaded.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks import baselines
from benchmarks.figures import alternate, medians, percentile, ranges, ratio, spread
from benchmarks.homes import temporary_folder
from benchmarks.load_users import (
    LoadedUsers,
    both_samplings,
    build,
    load_users,
    name,
    question,
)
from personalpeft.engine.engine import Request
from personalpeft.types import Sampling

_OTHERS = 15
_PROMOTIONS, PAUSE_SECONDS = 20, 0.25


def bench_promote(
    base_name: str, *, repetitions: int, tokens: int, echo: Callable[[str], None]
) -> dict[str, Any]:
    """Measure idle and promoting runs alternately, then both hand-overs alternately.

    ``milliseconds`` has the gaps between tokens, idle and during promotions, the time of a
    promotion, and both hand-overs. ``promotions`` is the number of them. ``sampled`` is
    with the card's sampling, and the others are greedy. ``spread`` has the least and the most.
    """
    with (
        load_users(base_name, _OTHERS + 1, echo=echo) as loaded,
        temporary_folder() as work,
    ):
        seeds, rounds = count(loaded.users), count()
        middle: dict[str, list[float]] = {}
        taken: list[float] = []

        def quiet(sampling: Sampling, kind: str = "") -> float:
            gaps = [end - begin for begin, end in _gaps(loaded, next(rounds), sampling)]
            middle.setdefault(f"quiet{kind}_p50", []).append(percentile(gaps, 50) * 1000)
            return percentile(gaps, 99) * 1000

        def promoting(sampling: Sampling, kind: str = "") -> float:
            gaps: list[tuple[float, float]] = []
            promoter = _Promoter(loaded, seeds)
            while not promoter.done:
                gaps += _gaps(loaded, next(rounds), sampling)
            taken.extend(end - begin for begin, end in promoter.spans)
            met = [end - begin for begin, end in gaps if promoter.met(begin, end)]
            middle.setdefault(f"promoting{kind}_p50", []).append(percentile(met, 50) * 1000)
            return percentile(met, 99) * 1000

        greedy, sampled = both_samplings(loaded.base.card, tokens).values()
        echo("warming up")
        quiet(greedy)
        middle.clear()
        contestants: dict[str, Callable[[int], float]] = {
            "quiet_p99": lambda repetition: quiet(greedy),
            "promoting_p99": lambda repetition: promoting(greedy),
            "quiet_sampled_p99": lambda repetition: quiet(sampled, "_sampled"),
            "promoting_sampled_p99": lambda repetition: promoting(sampled, "_sampled"),
        }
        figures = alternate(contestants, repetitions, echo)
        figures |= middle

        echo("handing over")
        adapter = loaded.peft_folder(0, work)
        turns: dict[str, Callable[[int], float]] = {
            "adapter_handoff": lambda repetition: _adapter_handoff(loaded, next(seeds), repetition),
            "merged_handoff": lambda repetition: _merged_handoff(loaded, adapter, work, repetition),
        }
        for run in turns.values():
            run(0)
        figures |= alternate(turns, repetitions, echo)
    times = {key: spread(values) for key, values in figures.items()}
    times["promotion"] = spread([each * 1000 for each in taken])
    compared = {
        "stall_p99": ratio(figures["promoting_p99"], figures["quiet_p99"]),
        "stall_sampled_p99": ratio(figures["promoting_sampled_p99"], figures["quiet_sampled_p99"]),
        "sampled_vs_greedy": ratio(figures["quiet_p50"], figures["quiet_sampled_p50"]),
    }
    handoff = ratio(figures["merged_handoff"], figures["adapter_handoff"])
    return {
        "bench": "promote",
        "base": base_name,
        "repetitions": repetitions,
        "ratios": medians(compared),
        "merged_vs_adapter_handoff": handoff.median,
        "milliseconds": medians(times),
        "spread": ranges({**times, **compared, "merged_vs_adapter_handoff": handoff}),
        "promotions": len(taken),
    }


def _gaps(
    loaded: LoadedUsers, repetition: int, sampling: Sampling
) -> Iterator[tuple[float, float]]:
    """Return all gaps between tokens, from when all replies have started."""
    requests = [
        Request(name(number), question(number, repetition), loaded.stack(number), sampling)
        for number in range(_OTHERS)
    ]
    for request in requests:
        with loaded.engine.pin(request.stack):
            pass
    last: dict[int, float] = {}
    for piece in loaded.engine.stream(requests):
        now = time.perf_counter()
        if piece.tokens and len(last) == _OTHERS:
            yield last[piece.index], now
        if piece.tokens:
            last[piece.index] = now


class _Promoter:
    """Promotes and loads revisions of one user in a thread that starts at once."""

    def __init__(self, loaded: LoadedUsers, seeds: Iterator[int]) -> None:
        # Made beforehand, since a learn makes them and not a promotion.
        self._builds = [build(loaded.base, name(_OTHERS), next(seeds)) for _ in range(_PROMOTIONS)]
        self._people = loaded
        self._failure: Exception | None = None
        self.spans: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run, name="promoter", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Return whether the last has been promoted, or raise the thread's error."""
        if self._failure is not None:
            raise self._failure
        return not self._thread.is_alive()

    def met(self, begin: float, end: float) -> bool:
        """Return whether a promotion ran at any moment between the two."""
        return any(b < end and begin < e for b, e in self.spans)

    def _run(self) -> None:
        try:
            for new in self._builds:
                time.sleep(PAUSE_SECONDS)
                began = time.perf_counter()
                self._people.promote(new)
                with self._people.engine.pin(self._people.stack(_OTHERS)):
                    self.spans.append((began, time.perf_counter()))
        except Exception as error:  # noqa: BLE001 - raised again by the thread that asks
            self._failure = error


def _adapter_handoff(loaded: LoadedUsers, seed: int, repetition: int) -> float:
    new = build(loaded.base, name(_OTHERS), seed)
    began = time.perf_counter()
    loaded.promote(new)
    stack = loaded.stack(_OTHERS)
    request = Request(name(_OTHERS), question(_OTHERS, repetition), stack, Sampling(max_tokens=1))
    for _ in loaded.engine.stream([request]):
        pass
    return (time.perf_counter() - began) * 1000


def _merged_handoff(loaded: LoadedUsers, adapter: Path, work: Path, repetition: int) -> float:
    model = baselines.load_with_adapters(loaded.runtime.model_folder(), [adapter])
    prompt = loaded.engine.backend.render(question(_OTHERS, repetition))
    folder = work / "merged"
    began = time.perf_counter()
    model.merge_and_unload().save_pretrained(folder)
    baselines.generate(baselines.load_plain(folder), [prompt], 1)
    taken = (time.perf_counter() - began) * 1000
    shutil.rmtree(folder)
    return taken
