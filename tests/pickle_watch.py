"""Fail each test while which something is unpickled, since a pickle can run code.

This holds for the process of the tests and for each Python program that it starts.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pickle_log
import pytest

_folder = Path()


def take_found() -> list[str]:
    """Return what was unpickled since the last call, and by which module."""
    log = _log()
    found = log.read_text("utf-8").splitlines()
    if found:
        log.write_text("", "utf-8")
    return found


def _log() -> Path:
    return _folder / "unpickled"


class PickleWatch:
    """The plugin of pytest: it installs the hook, and fails the tests."""

    def pytest_sessionstart(self) -> None:
        """Install the hook here, and in each Python program that is started with our paths."""
        global _folder
        _folder = Path(tempfile.mkdtemp(prefix="pickle-watch-"))
        _log().touch()
        pickle_log.install(str(_log()))
        here = str(Path(__file__).parent)
        (_folder / "sitecustomize.py").write_text(
            f"import sys\nsys.path.insert(0, {here!r})\nimport pickle_log\ndel sys.path[0]\n"
            f"pickle_log.install({str(_log())!r})\n",
            "utf-8",
        )
        # A program without our environment may still get the path of this one.
        sys.path.append(str(_folder))
        paths = filter(None, (str(_folder), os.environ.get("PYTHONPATH")))
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)

    def pytest_sessionfinish(self) -> None:
        """Delete what was written."""
        shutil.rmtree(_folder, ignore_errors=True)

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


def _check() -> None:
    if found := take_found():
        pytest.fail(f"unpickled: {'; '.join(found)}", pytrace=False)
