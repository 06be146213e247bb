"""Fixture with each backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from backend_makers import attach, random_stack

from personalpeft.backends.base import Backend


@pytest.fixture(params=["fake", pytest.param("torch", marks=pytest.mark.exhaustive)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Return each backend in turn, with the stack "two" attached."""
    backend: Backend = request.getfixturevalue("fake" if request.param == "fake" else "torch_tiny")
    attach(backend, "two", random_stack(backend, 1))
    yield backend
    backend.detach("two")
