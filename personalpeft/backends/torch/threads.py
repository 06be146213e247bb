"""Who has the processor's cores.

OpenMP keeps a team of threads for every thread that ever asked for one, and as soon as all teams together are larger than
the machine it lets none of them wait awake. A decoding step has hundreds of short parallel loops: with a second team
around, each is woken up for anew and a step takes a quarter longer (docs/benchmarks.md). So whoever has finished some
work dismisses their team; the next work finds another in less than a millisecond.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_SOFT = 1  # omp_pause_soft: what the team keeps may be kept.


def dismiss() -> None:
    """Ends the calling thread's team, where there is one. Not to be called from within a parallel loop."""
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


@cache
def _pause() -> Any:
    """OpenMP 5's omp_pause_resource_all, of the library that the framework has loaded; None where that has none."""
    try:
        return ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):
        return None
