"""Each backend, and somebody on the fake one, for who does not ask for another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from backend_makers import attach, composed
from runtime_makers import opened

from personalpeft import Runtime, User
from personalpeft.backends.base import Backend


@pytest.fixture(params=["fake", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Each backend in turn, with the stack "two" attached."""
    backend: Backend = request.getfixturevalue("fake" if request.param == "fake" else "torch_tiny")
    attach(backend, "two", composed(backend, 1))
    yield backend
    backend.detach("two")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def runtime(home: Path) -> Iterator[Runtime]:
    with opened(home) as runtime:
        yield runtime


@pytest.fixture
def ada(runtime: Runtime) -> User:
    return runtime.user("ada")
