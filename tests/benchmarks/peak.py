"""How much memory a process had at most."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def peak_mb() -> int | None:
    """The largest resident size of this process so far, in MB; None where the system does not say."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage, which here counts what the parent had when it started this process.
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text("ascii", "replace"))
        return int(found[1]) // 1024 if found else None
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak / (1024 * 1024 if sys.platform == "darwin" else 1024))
