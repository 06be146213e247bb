"""Note in a file each class that a pickle looks up, in every thread. Imports nothing of ours.

An audit hook of the interpreter cannot be removed again, and a copy of the process has it too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

ALLOWED: Mapping[str, str] = {
    "multiprocessing": "sends objects between processes that a program started itself",
    "ray": "its workers exchange their own objects within one cluster",
    "vllm": "its processes exchange their own objects",
}
"""The packages that may unpickle, and what. None of them reads a file of a user or of a stranger."""


_logs: list[str] = []


def install(log: str) -> None:
    """Note from now on, in this file, what this process and its copies unpickle."""
    if not _logs:
        sys.addaudithook(_note)
    _logs[:] = [log]


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    # Of foreign programs, such as clients in environments of their own, we promise nothing.
    if event != "pickle.find_class" or "personalpeft" not in sys.modules:
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "pickle":
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__"))
    if module.partition(".")[0] not in ALLOWED:
        line = f"{'.'.join(map(str, arguments))}, by {module}\n"
        # Opened each time, since a child may have closed what it inherited.
        descriptor = os.open(_logs[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
