"""``bench attach``: time to load an adapter of rank 8 into its slot, compared with PEFT.

Files are in the page cache, so work is measured and not the disk. Loading from disk does what the
engine's loader does. It reads, hashes and checks the file, composes and stages the stack, and
copies it to the slot. Loading from host memory only copies the staged stack.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

from benchmarks import baselines
from benchmarks.figures import alternate, medians, ranges, ratio, spread
from benchmarks.homes import temporary_folder
from benchmarks.load_users import load_users
from personalpeft.backends.base import StagedStack
from personalpeft.types import Stack

_ADAPTERS = 8
_LOADS = 10


def bench_attach(
    base_name: str, *, repetitions: int, echo: Callable[[str], None]
) -> dict[str, Any]:
    """Measure our loads and PEFT's alternately.

    Figures are medians over the repetitions, each the mean of ten loads (PEFT: of one). ``spread``
    has their least and most. ``peft_load`` is PEFT's documented ``load_adapter``;
    ``peft_load_quick`` skips its work for training (``low_cpu_mem_usage=True``,
    ``autocast_adapter_dtype=False``).
    """
    with (
        load_users(base_name, _ADAPTERS, echo=echo) as loaded,
        temporary_folder() as work,
    ):
        backend = loaded.engine.backend
        folders = [loaded.peft_folder(number, work) for number in range(_ADAPTERS)]
        stacks = [loaded.stack(number) for number in range(_ADAPTERS)]
        echo("loading the peer")
        peft = baselines.load_with_adapters(loaded.runtime.model_folder(), folders[:1])
        staged = {stack.digest: loaded.stage(stack) for stack in stacks}

        def time_ours(bring: Callable[[Stack], StagedStack]) -> Callable[[int], float]:
            def load(repetition: int) -> float:
                taken = 0.0
                for number in range(_LOADS):
                    stack = stacks[(repetition + number) % _ADAPTERS]
                    began = time.perf_counter()
                    backend.attach(stack.digest, bring(stack))
                    taken += time.perf_counter() - began
                    backend.detach(stack.digest)
                return taken / _LOADS * 1000

            return load

        def peft_load(quick: bool) -> Callable[[int], float]:
            def load(repetition: int) -> float:
                folder = folders[1 + repetition % (_ADAPTERS - 1)]
                began = time.perf_counter()
                peft.load_adapter(
                    str(folder),
                    adapter_name="another",
                    low_cpu_mem_usage=quick,
                    autocast_adapter_dtype=not quick,
                )
                taken = time.perf_counter() - began
                peft.delete_adapter("another")
                return taken * 1000

            return load

        contestants = {
            "disk_to_slot": time_ours(loaded.stage),
            "host_to_slot": time_ours(lambda stack: staged[stack.digest]),
            "peft_load": peft_load(False),
            "peft_load_quick": peft_load(True),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            echo("warming up")
            for contestant in contestants.values():
                contestant(0)
            figures = alternate(contestants, repetitions, echo)
        times = {key: spread(values) for key, values in figures.items()}
        ratios = {
            "peft_vs_disk_to_slot": ratio(figures["peft_load"], figures["disk_to_slot"]),
            "peft_quick_vs_disk_to_slot": ratio(
                figures["peft_load_quick"], figures["disk_to_slot"]
            ),
        }
        return {
            "bench": "attach",
            "base": base_name,
            "repetitions": repetitions,
            "milliseconds": medians(times),
            "ratios": medians(ratios),
            "spread": ranges({**times, **ratios}),
            "adapter_mb": round(staged[stacks[0].digest].nbytes / 1e6, 2),
        }
