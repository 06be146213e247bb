"""Set the size of the calling thread's OpenMP team, and end it.

OpenMP keeps a team for each thread that used one. When all teams together exceed the cores, none of
them spins while waiting. A decoding step has hundreds of short loops and then takes a quarter
longer (docs/benchmarks/index.md). So each thread releases its team after its work. A new team takes
less than a millisecond. llama.cpp and torch have their teams of the same library.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from personalpeft.host import loaded_function

_LIBRARY = "libgomp.so.1"

_PAUSE_SOFT = 1  # omp_pause_soft


def release_threads() -> None:
    """End the calling thread's team, if any. Never call this inside a parallel loop."""
    # Only torch loads the library for all to see, and llama.cpp may compute before torch is loaded.
    pause = loaded_function("omp_pause_resource_all", _LIBRARY)
    if pause is not None:
        pause(_PAUSE_SOFT)


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Compute with ``count`` threads inside the block.

    Other threads keep their number. ``torch.set_num_threads`` would change it for the whole process
    and empty oneDNN's cache of primitives.
    """
    get, resize = loaded_function("omp_get_max_threads"), loaded_function("omp_set_num_threads")
    if get is None or resize is None:
        # Not at the top: the embedder imports this module without torch.
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
