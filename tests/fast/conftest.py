"""Fixtures: a user with a home on the fake backend, unless a test defines another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_makers import open_runtime

from personalpeft import Runtime, User


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def runtime(home: Path) -> Iterator[Runtime]:
    with open_runtime(home) as runtime:
        yield runtime


@pytest.fixture
def ada(runtime: Runtime) -> User:
    return runtime.user("ada")
