"""``bench attach``: how long an adapter of rank 8 takes from its file into the slot that rows point to, and how long PEFT takes
to load the same one from its own format.

Files lie in the system's page cache: what is measured is work and not the disk. From disk is what the engine's loader does:
read and hash the file, check it, compose the stack, bring it into the form of the slots, copy it into one.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import baselines
from benchmarks.figures import ratio, spread, taking_turns
from benchmarks.load_users import crowd
from personalpeft.backends.base import StagedStack
from personalpeft.types import Stack

_ADAPTERS = 8
_LOADS = 10


@dataclass(frozen=True, slots=True)
class AttachBench:
    """The object that ``--json`` prints: medians over the repetitions, of which each is the mean of ten loads of different
    adapters (PEFT: of one load); ``spread`` has the least and the most.

    ``peft_load`` is ``load_adapter`` as PEFT's documentation has it, ``peft_load_quick`` without what it then does for
    training: ``low_cpu_mem_usage=True``, ``autocast_adapter_dtype=False``.
    """

    bench: str
    base: str
    repetitions: int
    milliseconds: dict[str, float]
    ratios: dict[str, float]
    spread: dict[str, tuple[float, float]]
    adapter_mb: float


def bench_attach(base_name: str, *, repetitions: int, say: Callable[[str], None]) -> AttachBench:
    """Runs ours and PEFT's in turns. Raises ``MissingPackage`` without PEFT."""
    with (
        crowd(base_name, _ADAPTERS, say=say) as people,
        tempfile.TemporaryDirectory(prefix="personalpeft-bench-") as work,
    ):
        backend = people.engine.backend
        folders = [people.peft_folder(number, Path(work)) for number in range(_ADAPTERS)]
        stacks = [people.stack(number) for number in range(_ADAPTERS)]
        say("loading the peer")
        peft = baselines.load_with_adapters(people.base.folder, folders[:1])

        staged = {stack.digest: people.stage(stack) for stack in stacks}

        def own(bring: Callable[[Stack], StagedStack]) -> Callable[[int], float]:
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
            "disk_to_slot": own(people.stage),
            "host_to_slot": own(lambda stack: staged[stack.digest]),
            "peft_load": peft_load(False),
            "peft_load_quick": peft_load(True),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            say("warming up")
            for contestant in contestants.values():
                contestant(0)
            figures = taking_turns(contestants, repetitions, say)
        times = {key: spread(values) for key, values in figures.items()}
        ratios = {
            "peft_vs_disk_to_slot": ratio(figures["peft_load"], figures["disk_to_slot"]),
            "peft_quick_vs_disk_to_slot": ratio(
                figures["peft_load_quick"], figures["disk_to_slot"]
            ),
        }
        return AttachBench(
            bench="attach",
            base=base_name,
            repetitions=repetitions,
            milliseconds={key: each.median for key, each in times.items()},
            ratios={key: each.median for key, each in ratios.items()},
            spread={key: (each.least, each.most) for key, each in {**times, **ratios}.items()},
            adapter_mb=round(staged[stacks[0].digest].nbytes / 1e6, 2),
        )
