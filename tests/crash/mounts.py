"""Disks of their own for the crash tests, where the system allows to mount one."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mounted(source: str | Path, folder: Path, *options: str) -> Iterator[Path]:
    """Mount something on a folder. Raises ``CalledProcessError`` without the right to."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", *options, source, folder], check=True, capture_output=True)
    try:
        yield folder
    finally:
        # A killed process holds its files a moment longer than its parent.
        while subprocess.run(["umount", folder], capture_output=True).returncode:
            time.sleep(0.05)
