"""On a disk that is full at any size an operation fails with an error, and the home loses nothing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from crash_makers import CrashFolder, check_home, points
from crash_operations import OPERATIONS, REFUSED
from interruption import can_interrupt, perform
from mounts import mounted

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not can_interrupt(), reason="needs strace"),
]
_PAGE = 4096


def _disk(folder: Path, size: int) -> AbstractContextManager[Path]:
    """Mount a disk of ``size`` bytes in memory."""
    return mounted("disk", folder, "-t", "tmpfs", "-o", f"size={size}")


def _size(folder: Path) -> int:
    """Return what a folder takes in whole pages, with a page for each entry."""
    return sum(
        _PAGE + (-(-path.stat().st_size // _PAGE) * _PAGE if path.is_file() else 0)
        for path in [folder, *folder.rglob("*")]
    )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_full_disk_is_an_error_and_loses_nothing(
    operation: str, prepared: Callable[[str], CrashFolder], tmp_path: Path
) -> None:
    start, work, trace = prepared(operation), tmp_path / "disk" / "work", tmp_path / "trace"
    try:
        with _disk(tmp_path / "disk", 64 << 20):
            shutil.copytree(start.path, work)
            before = _size(work)
            assert perform(operation, work, trace).status == 0
            added = max(_PAGE, _size(work) - before)
    except subprocess.CalledProcessError:
        pytest.skip("needs the right to mount a file system")
    for share in range(points()):
        kept = tmp_path / "kept"
        with _disk(tmp_path / "disk", before + 16 * _PAGE + added * share // points()):
            shutil.copytree(start.path, work)
            ended = perform(operation, work, trace)
            assert ended.status in (0, REFUSED), ended.errors
            assert "Traceback" not in ended.errors
            shutil.copytree(work, kept)
        check_home(operation, kept, start.contents, ended.promises)
        shutil.rmtree(kept)
