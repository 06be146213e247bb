"""``bench serve``: tokens a second of one row and sixteen, with and without adapters.

Every contestant answers the same new prompts greedily with the same adapters, alternately. Ours
also samples as the base's card says. Time runs from submitting the prompts to the last token. Our
replies may end early, and then count fewer tokens; the others are told to go on, to their
advantage.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import baselines, vllm
from benchmarks.figures import alternate, medians, ranges, ratio, spread
from benchmarks.homes import temporary_folder
from benchmarks.load_users import (
    RANK,
    LoadedUsers,
    both_samplings,
    load_users,
    name,
    question,
)
from personalpeft.backends.base import Backend
from personalpeft.backends.sequence import Request, SequenceState, Tokens
from personalpeft.types import Stack

ROWS = 16
_VLLM_ADAPTERS = 4
_WARM_UP = 4
# The sequential rate is measured with four users. With sixteen it would be the same.
_ONE_BY_ONE = 4
_RATIOS = {
    "mixed_vs_peft": ("own_mixed_16", "peft_mixed_16"),
    "mixed_vs_peft_set_adapter": ("own_mixed_16", "peft_set_adapter_16"),
    "mixed_vs_vllm": ("own_mixed_16", "vllm_mixed_16"),
    "mixed_vs_own_base": ("own_mixed_16", "own_base_16"),
    "base_vs_generate": ("own_base_16", "generate_16"),
    "one_vs_peft": ("own_mixed_1", "peft_1"),
}


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One batch of ours.

    It has tokens a second and the median seconds of full decoding steps (or of all). It says
    whether all rows ran to the requested length.
    """

    rate: float
    step: float
    complete: bool


def bench_serve(
    base_name: str, *, repetitions: int, tokens: int, with_vllm: bool, echo: Callable[[str], None]
) -> dict[str, Any]:
    """Measure all contestants.

    vLLM takes part with ``with_vllm`` where its Python is named.

    A figure's name has the contestant, the adapters (``base``: none, ``mixed``: another for each
    row) and the rows. ``sampled`` is with the card's sampling. ``sampled_vs_greedy`` compares
    decoding steps, since sampled replies end at other lengths. ``step_vs_floor`` divides our median
    decoding step by the time to read memory once for the base and all adapters. ``own_complete``
    says that all our greedy replies were as long as the others'. None: not run. ``spread`` has the
    least and the most of all repetitions.

    Raises:
        ServingFailed: A server does not work.
    """
    python = vllm.python_with_vllm() if with_vllm else None
    with ExitStack() as ends:
        loaded = ends.enter_context(load_users(base_name, ROWS, echo=echo))
        work = ends.enter_context(temporary_folder())
        folders = [loaded.peft_folder(number, work) for number in range(ROWS)]
        own = _BackendDriver(loaded)
        server = None
        if python is not None:
            longest = min(2048, loaded.base.card.context)
            log, few = work / "vllm.log", folders[:_VLLM_ADAPTERS]
            server = ends.enter_context(
                vllm.run_server(
                    python,
                    loaded.runtime.model_folder(),
                    log,
                    adapters=few,
                    slots=len(few),
                    rank=RANK,
                    longest=longest,
                    echo=echo,
                )
            )
        echo("loading the peers")
        plain = baselines.load_plain(loaded.runtime.model_folder())
        mixed = baselines.load_with_adapters(loaded.runtime.model_folder(), folders)
        names = [folder.name for folder in folders]
        bandwidth: list[float] = []

        def rate(
            write: Callable[[list[Tokens], int], int], rows: int
        ) -> Callable[[int, int], float]:
            def run(repetition: int, count: int) -> float:
                prompts = own.prompts(rows, repetition)
                began = time.perf_counter()
                return write(prompts, count) / (time.perf_counter() - began)

            return run

        def one_after_another(prompts: list[Tokens], count: int) -> int:
            written = 0
            for adapter, prompt in zip(names, prompts[:_ONE_BY_ONE], strict=False):
                mixed.set_adapter(adapter)
                written += baselines.generate(mixed, [prompt], count)
            return written

        def first_alone(prompts: list[Tokens], count: int) -> int:
            mixed.set_adapter(names[0])
            return baselines.generate(mixed, prompts, count)

        contestants: dict[str, Callable[[int, int], float]] = {
            "own_mixed_16": partial(own.write, ROWS, True),
            "peft_mixed_16": rate(
                lambda p, count: baselines.generate(mixed, p, count, adapter_names=names), ROWS
            ),
            "own_base_16": partial(own.write, ROWS, False),
            "own_mixed_16_sampled": partial(own.write, ROWS, True, sampled=True),
            "own_base_16_sampled": partial(own.write, ROWS, False, sampled=True),
            "generate_16": rate(lambda p, count: baselines.generate(plain, p, count), ROWS),
            "own_mixed_1": partial(own.write, 1, True),
            "peft_1": rate(first_alone, 1),
            "own_base_1": partial(own.write, 1, False),
            "peft_set_adapter_16": rate(one_after_another, ROWS),
        }
        if server is not None:
            few_names = [names[number % _VLLM_ADAPTERS] for number in range(ROWS)]
            contestants["vllm_mixed_16"] = rate(
                lambda p, count: server.write(p, few_names, count), ROWS
            )
        echo("warming up")
        for contestant in contestants.values():
            contestant(0, _WARM_UP)
        own.written.clear()

        def memory(repetition: int) -> float:
            bandwidth.append(baselines.read_bandwidth())
            return bandwidth[-1] / 1e9

        turns = {key: partial(run, count=tokens) for key, run in contestants.items()}
        figures = alternate({**turns, "memory_gb_per_second": memory}, repetitions, echo)
        steps = [each.step for each in own.written["own_mixed_16"]]
        floors = [(baselines.bytes_of(plain) + own.adapter_bytes) / each for each in bandwidth]
        compared = {
            "sampled_vs_greedy": ratio(
                steps, [each.step for each in own.written["own_mixed_16_sampled"]]
            ),
            "step_vs_floor": ratio(steps, floors),
        }
        complete = all(
            each.complete
            for contestant, runs in own.written.items()
            if not contestant.endswith("sampled")
            for each in runs
        )
    speed = spread(figures.pop("memory_gb_per_second"))
    figures.setdefault("vllm_mixed_16", [])
    rates = {key: spread(values) if values else None for key, values in figures.items()}
    ratios = {
        key: ratio(figures[over], figures[under]) if figures[under] else None
        for key, (over, under) in _RATIOS.items()
    } | compared
    return {
        "bench": "serve",
        "base": base_name,
        "repetitions": repetitions,
        "tokens_per_second": medians(rates),
        "ratios": medians(ratios),
        "spread": ranges({**rates, **ratios}),
        "step_milliseconds": round(statistics.median(steps) * 1000, 3),
        "memory_gb_per_second": speed.median,
        "own_complete": complete,
    }


class _BackendDriver:
    """Our backend with every adapter in a slot, driven as the engine's loop does."""

    def __init__(self, loaded: LoadedUsers) -> None:
        self.backend = loaded.engine.backend
        self._card = loaded.base.card
        self.written: dict[str, list[BatchResult]] = {}
        self.adapter_bytes = 0
        self._keys: list[str] = []
        for number in range(ROWS):
            stack = loaded.stack(number)
            staged = loaded.stage(stack)
            self.backend.attach(stack.digest, staged)
            self.adapter_bytes += staged.nbytes
            self._keys.append(stack.digest)

    def prompts(self, rows: int, repetition: int) -> list[Tokens]:
        return [self.backend.render(question(number, repetition)) for number in range(rows)]

    def write(
        self, rows: int, adapted: bool, repetition: int, count: int, *, sampled: bool = False
    ) -> float:
        """Return tokens a second; ``written`` keeps the other figures."""
        sampling = both_samplings(self._card, count)["sampled" if sampled else "greedy"]
        batch = [
            # Another owner each time, since cached prompts belong to their owner.
            SequenceState(
                Request(
                    f"{name(number)}-{repetition}-{adapted}-{sampled}",
                    (),
                    Stack(self.backend.base.digest),
                    sampling,
                ),
                prompt,
                self._keys[number] if adapted else None,
            )
            for number, prompt in enumerate(self.prompts(rows, repetition))
        ]
        done = written(self.backend, batch)
        contestant = f"own_{'mixed' if adapted else 'base'}_{rows}{'_sampled' if sampled else ''}"
        self.written.setdefault(contestant, []).append(done)
        return done.rate


def written(backend: Backend, batch: Sequence[SequenceState]) -> BatchResult:
    """Admit all rows at once and step until the last has ended."""
    tokens, complete = 0, True
    steps: list[float] = []
    decoding: list[float] = []
    open_rows: set[int] = set()
    begun: set[int] = set()
    began = last = time.perf_counter()
    for row in batch:
        number = backend.admit(row)
        if number is None:
            raise RuntimeError("the batch has no room for its rows")
        open_rows.add(number)
    while open_rows:
        all_decode = len(begun) == len(open_rows) == len(batch)
        pieces = backend.step()
        now = time.perf_counter()
        (decoding if all_decode else steps).append(now - last)
        last = now
        for piece in pieces:
            tokens += len(piece.tokens)
            begun.add(piece.index)
            if piece.finish is not None:
                open_rows.remove(piece.index)
                complete = complete and piece.finish == "length"
    return BatchResult(tokens / (last - began), statistics.median(decoding or steps), complete)
