"""Fixtures with each backend, and of all homes on the tiny base."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from backend_makers import attach, random_stack

from personalpeft.backends.base import Backend
from personalpeft.memory.embedder import HashEmbedder


@pytest.fixture(scope="module", autouse=True)
def quick_embedder() -> Iterator[None]:
    """Embed without a model, which would take most of the time of a learn on the tiny base."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("personalpeft.runtime.MiniLM", HashEmbedder)
        yield


@pytest.fixture(params=["fake", pytest.param("torch", marks=pytest.mark.exhaustive)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Return each backend in turn, with the stack "two" attached."""
    backend: Backend = request.getfixturevalue("fake" if request.param == "fake" else "torch_tiny")
    attach(backend, "two", random_stack(backend, 1))
    yield backend
    backend.detach("two")
