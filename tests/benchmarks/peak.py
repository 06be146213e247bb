"""The peak memory of a process. Alone here so that child processes import nothing else."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def peak_mb() -> int | None:
    """Return this process's peak resident MB, or None where the system does not report it."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: it counts the parent's memory at the start of this process.
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text("ascii", "replace"))
        return int(found[1]) // 1024 if found else None
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak / (1024 * 1024 if sys.platform == "darwin" else 1024))
