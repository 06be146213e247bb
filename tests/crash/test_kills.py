"""Killed at any write, a home loses nothing it promised, stays valid, and the operation can be done
again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from crash_makers import CrashFolder, check_home, points
from crash_operations import ENCRYPTED, MIGRATIONS, OPERATIONS, REFUSED
from interruption import Interruption, can_interrupt, list_calls, perform, spread

pytestmark = [
    pytest.mark.skipif(not can_interrupt(), reason="needs strace"),
    pytest.mark.exhaustive,
]
KILLED = [*OPERATIONS, *MIGRATIONS, *ENCRYPTED]


@contextmanager
def noting(interruption: Interruption) -> Iterator[None]:
    """Name the interruption in a failure."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"after {interruption}")
        raise


@pytest.mark.parametrize("operation", KILLED)
def test_nothing_promised_is_lost_at_any_kill(
    operation: str, prepared: Callable[[str], CrashFolder], tmp_path: Path
) -> None:
    start = prepared(operation)
    trace, folder = tmp_path / "trace", tmp_path / "work"
    shutil.copytree(start.path, folder)
    whole = perform(operation, folder, trace)
    assert whole.status == 0, whole.errors
    check_home(operation, folder, start.contents, whole.promises)
    chosen, killed = spread(list_calls(trace, folder), points()), 0
    for call, number in chosen:
        shutil.rmtree(folder)
        shutil.copytree(start.path, folder)
        interruption = Interruption(call, number, "signal=KILL")
        ended = perform(operation, folder, trace, interruption)
        with noting(interruption):
            assert ended.status in (-9, 0), ended.errors
            check_home(operation, folder, start.contents, ended.promises)
        killed += ended.status == -9
    # The order of two threads differs, so that a call may come less often than in the whole run.
    assert killed > len(chosen) / 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("effect", ["error=EIO", "error=ENOSPC"])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failing_disk_is_an_error_and_loses_nothing(
    operation: str,
    lasting: bool,
    effect: str,
    prepared: Callable[[str], CrashFolder],
    tmp_path: Path,
) -> None:
    start = prepared(operation)
    trace, folder = tmp_path / "trace", tmp_path / "work"
    shutil.copytree(start.path, folder)
    assert perform(operation, folder, trace).status == 0
    calls = [
        each for each in list_calls(trace, folder) if not each[0].startswith(("chmod", "utimens"))
    ]
    for call, number in spread(calls, max(2, points() // 4)):
        shutil.rmtree(folder)
        shutil.copytree(start.path, folder)
        interruption = Interruption(call, number, effect, lasting)
        ended = perform(operation, folder, trace, interruption)
        with noting(interruption):
            assert ended.status in (0, REFUSED), ended.errors
            assert "Traceback" not in ended.errors
            check_home(operation, folder, start.contents, ended.promises)
