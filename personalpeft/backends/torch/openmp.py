"""Set the size of the calling thread's OpenMP team, and end it.

OpenMP keeps a team for every thread that ever asked for one. As soon as all teams together are larger than the machine, none
of them waits awake. A decoding step has hundreds of short parallel loops: with a second team around, each is woken up for
anew and a step takes a quarter longer (docs/benchmarks.md). So a thread that has finished some work releases its team; the next
work finds another in less than a millisecond.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_SOFT = 1  # omp_pause_soft: what the team keeps may be kept.


def release_threads() -> None:
    """End the calling thread's team, if there is one. Never call this from within a parallel loop."""
    pause = _function("omp_pause_resource_all")
    if pause is not None:
        pause(_SOFT)


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Compute with so many threads inside; the calling thread's former number comes back afterwards.

    Other threads keep theirs. The framework's own ``set_num_threads`` would change them for the whole process, and would
    empty the library's cache of primitives.
    """
    get, resize = _function("omp_get_max_threads"), _function("omp_set_num_threads")
    if get is None or resize is None:
        # Not at the top: a process that never computes with the framework should not load it.
        import torch

        get, resize = torch.get_num_threads, torch.set_num_threads
    before = get()
    if count == before:
        yield
        return
    resize(count)
    try:
        yield
    finally:
        resize(before)


@cache
def _function(name: str) -> Any:
    """Return a function of the OpenMP library that the framework has loaded; None where it has none of that name."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
