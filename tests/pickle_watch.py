"""Fail each test while which something is unpickled, since a pickle can run code.

An audit hook of the interpreter sees each class that a pickle looks up, in every thread. It cannot
be removed again. Programs that are started by a test do not stand under it.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from typing import Any

import pytest

ALLOWED: Mapping[str, str] = {
    "multiprocessing": "sends objects between processes that a test started itself",
    "ray": "its workers exchange their own objects within one cluster",
}
"""The packages that may unpickle, and what. None of them reads a file of a user or of a stranger."""

_found: list[str] = []


def take_found() -> list[str]:
    """Return what was unpickled since the last call, and by which module."""
    found = list(_found)
    _found.clear()
    return found


class PickleWatch:
    """The plugin of pytest: it installs the hook, and fails the tests."""

    def pytest_sessionstart(self) -> None:
        """Install the hook."""
        sys.addaudithook(_note)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        """Check a test, and the fixtures before it."""
        result = yield
        _check()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, Any, Any]:
        """Check the end of the fixtures."""
        result = yield
        _check()
        return result


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "pickle.find_class":
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "pickle":
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__"))
    if module.partition(".")[0] not in ALLOWED:
        _found.append(f"{'.'.join(map(str, arguments))}, by {module}")


def _check() -> None:
    if found := take_found():
        pytest.fail(f"unpickled: {'; '.join(found)}", pytrace=False)
