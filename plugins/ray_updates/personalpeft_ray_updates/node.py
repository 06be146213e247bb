"""What runs on a node: a process opens a home of its own and the base once, and learns for others.

Invariants: a node needs no disk, folder or setting of the home's machine. A process keeps no copy of
a user after a learn. What a killed process left is deleted when the next one starts on the node.
Only builtin values go out: bytes, texts and numbers.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import personalpeft
from personalpeft import CardError, HomeError, InvalidInput, PersonalPeftError, Runtime
from personalpeft.errors import get_error_type

FOLDER_VARIABLE = "PERSONALPEFT_RAY_FOLDER"
"""On a node: the folder for the copies of users that learn. Each process has a home in it."""
BASE_VARIABLE = "PERSONALPEFT_RAY_BASE"
"""On a node: the base, where it has another name or path than on the home's machine."""

Heartbeat = Callable[[str, float], bool]
"""Receives a stage and its share that is done; returns whether to stop."""

_HEARTBEAT_SECONDS = 0.5
# By the base and the backend: a process keeps the base in memory for its next learn.
runtimes: dict[tuple[str, str], Runtime] = {}
# Held as long as the process lives.
_locks: list[FileLock] = []


def learn(
    bundles: Sequence[bytes], base: str, backend: str, heartbeat: Heartbeat
) -> dict[str, Any]:
    """Learn bundles with the base of this node.

    Args:
        bundles: What ``User.bundle_learn`` returned.
        base: The base, unless this node names its own.
        backend: As for ``personalpeft.open``.
        heartbeat: Called about twice a second.

    Returns:
        "results" with what ``Runtime.learn_bundles`` returned. Or an "error" with its "kind",
        "message" and "hint", and whether it is "of_bundle" and not of this node.
    """
    key = os.environ.get(BASE_VARIABLE, base), backend
    throttle = _Throttle(heartbeat)
    try:
        results = _open(*key).learn_bundles(
            bundles, progress=throttle.show, cancelled=throttle.is_stopped
        )
    except PersonalPeftError as error:
        kind = get_error_type(error)
        of_bundle = issubclass(kind, InvalidInput) and not issubclass(kind, CardError)
        if not of_bundle:
            _discard(*key)
        return {
            "error": {
                "kind": kind.__name__,
                "message": error.message,
                "hint": error.hint,
                "of_bundle": of_bundle,
            }
        }
    except BaseException:
        _discard(*key)
        raise
    return {"results": list(results)}


class _Throttle:
    """Passes progress on, but not at every step."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._stage, self._done, self._stopped = "Opening", 0.0, False
        self._next = 0.0

    def show(self, stage: str, done: float) -> None:
        self._stage, self._done = stage, done
        self.is_stopped()

    def is_stopped(self) -> bool:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _HEARTBEAT_SECONDS
            self._stopped = self._heartbeat(self._stage, self._done)
        return self._stopped


def _open(base: str, backend: str) -> Runtime:
    """Return the runtime of this process. Its home lies in the node's folder."""
    if (base, backend) not in runtimes:
        home = _make_folder() / "home"
        runtimes[base, backend] = personalpeft.open(home, base, backend)
    return runtimes[base, backend]


def _discard(base: str, backend: str) -> None:
    """Close a runtime that failed, and delete its home: a copy of a user may be left in it."""
    runtime = runtimes.pop((base, backend), None)
    if runtime is not None:
        runtime.close()
        shutil.rmtree(runtime.settings.home, ignore_errors=True)


def _make_folder() -> Path:
    """Return a new folder for this process, after deleting those of processes that ended."""
    # A number, since an account of a container may have no name. Windows has a folder for each.
    account = os.getuid() if hasattr(os, "getuid") else "user"
    shared = Path(tempfile.gettempdir(), f"personalpeft-ray-{account}")
    folder = Path(os.environ.get(FOLDER_VARIABLE) or shared)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # In a folder that all may write to, another account may have made it first.
        folder.chmod(0o700)
        _delete_abandoned(folder)
        name = f"worker-{uuid.uuid4().hex}"
        lock = FileLock(folder / f"{name}.lock")
        lock.acquire()
        _locks.append(lock)
        (folder / name).mkdir(mode=0o700)
    except OSError as error:
        raise HomeError(
            f"The folder {folder} of this node cannot be used: {error.strerror or error}.",
            hint=f"Name another one in {FOLDER_VARIABLE} before Ray is started there.",
        ) from error
    return folder / name


def _delete_abandoned(folder: Path) -> None:
    for path in folder.glob("worker-*.lock"):
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        try:
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            path.unlink(missing_ok=True)
        finally:
            lock.release()
