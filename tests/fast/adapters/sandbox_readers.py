"""Readers that do harm, for the tests of the sandbox."""

from __future__ import annotations

import os
import time
from pathlib import Path

from personalpeft.errors import AdapterError


def crash() -> dict[str, str]:
    os.abort()


def never_end() -> dict[str, str]:
    while True:
        pass


def wait(seconds_to_wait: float) -> dict[str, str]:
    time.sleep(seconds_to_wait)
    return {}


def take_memory(count: int) -> dict[str, str]:
    return {"taken": str(len(bytearray(count)))}


def fail() -> dict[str, str]:
    raise KeyError("my dog is called Biscuit")


def refuse() -> dict[str, str]:
    raise AdapterError("x: is refused.", hint="Get another.")


def answer_nonsense() -> object:
    return ["not", "digests"]


def list_environment() -> dict[str, str]:
    return dict(os.environ)


def list_descriptors() -> dict[str, str]:
    found = {}
    for handle in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            found[handle] = str(Path("/proc/self/fd", handle).readlink())
        except OSError:
            continue  # The handle of the listing itself.
    return found


def write(path: str) -> dict[str, str]:
    return {"written": str(Path(path).write_bytes(b"evil"))}
