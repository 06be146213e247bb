"""A real vLLM server for tests, from the Python in ``PERSONALPEFT_BENCH_VLLM`` or ``make
vllm-env``.

It has a base of its own, since vLLM's CPU kernels need larger heads than the tiny base has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from personalpeft.backends.base import Backend
from personalpeft.base_models.registry import find_card
from personalpeft.base_models.resolve import resolve_base, unpacked_folder
from personalpeft.base_models.types import Base
from personalpeft.errors import MissingPackage
from personalpeft.settings import VllmServer

SLOTS, RANK = 6, 16
_MADE = Path(__file__).parent.parent / ".venv-vllm" / "bin" / "python"


def tiny_base_for_vllm(cache: Path, *, seed: int = 9) -> Base:
    """Return the tiny base with heads of 32. With this seed no reply of the tests ends at once."""
    card = find_card("tiny-random")
    shape = replace(card.source.shape, hidden=128, intermediate=256)
    return resolve_base(
        replace(card, source=replace(card.source, shape=shape, seed=seed)), cache=cache
    )


@contextmanager
def running(base: Base, folder: Path, **more: Any) -> Iterator[VllmServer]:
    """Run a server on this base, or skip the test where none can be started."""
    from benchmarks import vllm

    python = vllm.python_with_vllm() or _MADE
    if not python.is_file():
        pytest.skip("there is no vLLM here; make vllm-env makes an environment for it")
    shape: dict[str, Any] = {
        "slots": SLOTS,
        "rank": RANK,
        "longest": base.card.context,
        "dtype": "float32",
        **more,
    }
    options = ("--enforce-eager", "--max-num-seqs", "16", "--max-cpu-loras", "8")
    few: dict[str, str] = (
        {"VLLM_CPU_KVCACHE_SPACE": "1"} if "VLLM_CPU_KVCACHE_SPACE" not in os.environ else {}
    )
    try:
        log = folder / "vllm.log"
        with vllm.run_server(
            python,
            unpacked_folder(base, full=shape["dtype"] == "float32"),
            log,
            options=options,
            environment=few,
            echo=print,
            **shape,
        ) as server:
            yield VllmServer(server.url, retry_seconds=2.0, timeout=60.0)
    except MissingPackage as error:
        pytest.skip(str(error))


def vllm_backend(base: Base, cache: Path, server: VllmServer, **more: Any) -> Backend:
    from personalpeft.backends.vllm.backend import VllmBackend

    return VllmBackend(base, cache=cache, server=server, entropy=os.urandom, **more)
