"""Fixtures: a user with a home on the fake backend, unless a test defines another."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_makers import open_runtime

from personalpeft import Runtime, User
from personalpeft.memory.embedder import HashEmbedder


@pytest.fixture(scope="session", autouse=True)
def quick_embedder() -> Iterator[None]:
    """Embed without a model, which would take most of the time of a learn on the tiny base."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("personalpeft.runtime.MiniLM", HashEmbedder)
        yield


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder of a test's home, with a copy of ``learned_home`` where a test needs it.

    Learning takes long, so the tests of a module copy one home that learned.
    """
    home = tmp_path / "home"
    if "learned_home" in request.fixturenames:
        shutil.copytree(request.getfixturevalue("learned_home"), home)
    return home


@pytest.fixture
def runtime(home: Path) -> Iterator[Runtime]:
    with open_runtime(home) as runtime:
        yield runtime


@pytest.fixture
def ada(runtime: Runtime) -> User:
    return runtime.user("ada")
