"""Killed or failing at any write of Python's, a home loses nothing it promised, on every system.

``test_kills`` does the same at every system call, SQLite's too, where strace is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from crash_makers import CrashFolder, check_home, points
from crash_operations import OPERATIONS, REFUSED
from interruption import perform_without_strace, spread
from write_seam import FAIL, KILL, KILLED, SETTING

# One operation is enough for make test.
INTERRUPTED = [
    each if each == "remember" else pytest.param(each, marks=pytest.mark.exhaustive)
    for each in OPERATIONS
]


@pytest.mark.parametrize("operation", INTERRUPTED)
@pytest.mark.parametrize("effect", [KILL, pytest.param(FAIL, marks=pytest.mark.exhaustive)])
def test_nothing_promised_is_lost_at_any_interrupted_write(
    effect: str, operation: str, prepared: Callable[[str], CrashFolder], tmp_path: Path
) -> None:
    start, folder = prepared(operation), tmp_path / "work"
    shutil.copytree(start.path, folder)
    whole = perform_without_strace(operation, folder)
    assert whole.status == 0, whole.errors
    writes = int(dict(whole.promises)["writes"])
    for call, number in spread([("write", each + 1) for each in range(writes)], points()):
        shutil.rmtree(folder)
        shutil.copytree(start.path, folder)
        ended = perform_without_strace(operation, folder, f"{effect} {number}")
        note = f"{effect} at {call} {number} of {writes}: {ended.errors}"
        # The order of two threads differs, so that there may be fewer writes.
        assert ended.status in (0, KILLED if effect == KILL else REFUSED), note
        assert "Traceback" not in ended.errors, note
        try:
            check_home(operation, folder, start.contents, ended.promises)
        except AssertionError as error:
            error.add_note(note)
            raise


@pytest.mark.parametrize("effect", [KILL, FAIL])
def test_an_interrupted_write_leaves_half_of_its_bytes(effect: str, tmp_path: Path) -> None:
    program = (
        f"from pathlib import Path; from write_seam import WriteSeam; folder = Path({str(tmp_path)!r});"
        "WriteSeam(folder).install(); (folder / 'file').write_bytes(b'0123456789')"
    )
    ended = subprocess.run(
        [sys.executable, "-B", "-c", program],
        env={**os.environ, SETTING: f"{effect} 1"},
        cwd=Path(__file__).parent,
        capture_output=True,
    )
    assert ended.returncode == (KILLED if effect == KILL else 1)
    assert (tmp_path / "file").read_bytes() == b"01234"
