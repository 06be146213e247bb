"""Read what the CPU supports and how busy it is."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil

from personalpeft import host

# Variables that limit the instruction sets of libraries and of our kernels.
KERNELS = "PERSONALPEFT_KERNELS"
_LIMITS = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    KERNELS,
)


def instruction_sets() -> str:
    """Return the CPU's instruction sets and the environment's limits on them."""
    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ]
    return " ".join([host.cpu_flags(), *limits])


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """CPU seconds up to a time: of all programs on this process's cores, and of this process."""

    at: float
    busy_seconds: float
    process_seconds: float


def read_cpu_usage() -> CpuUsage:
    """Read the counters of the operating system.

    Programs of low priority count as busy, unless the system has them yield to this process.
    """
    affinity = host.cpu_affinity()
    ignores_low = host.low_priority_yields() and not host.has_low_priority()
    busy = 0.0
    for core, times in enumerate(psutil.cpu_times(percpu=True)):
        if affinity and core not in affinity:
            continue
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Linux includes guest time in user time.
        twice = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        yielding = getattr(times, "nice", 0.0) if ignores_low else 0.0
        busy += sum(times) - idle - twice - yielding
    return CpuUsage(time.monotonic(), busy, time.process_time())
