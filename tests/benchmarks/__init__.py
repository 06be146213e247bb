"""Benchmarks: each module measures one thing, and ``cli`` has a command for each.

They are part of a checkout, not of the installed package.
"""

from __future__ import annotations

import os
from pathlib import Path


def child_environment() -> dict[str, str]:
    """Return the environment of a child process that imports this package."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
