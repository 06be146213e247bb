from __future__ import annotations

from collections.abc import Iterator

import pytest
from backend_makers import attach, composed

from personalpeft.backends.base import Backend


@pytest.fixture(params=["fake", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Each backend in turn, with the stacks "one", "two" and "three" attached and one slot free."""
    backend: Backend = request.getfixturevalue("fake" if request.param == "fake" else "torch_tiny")
    names = ("one", "two", "three")
    for seed, name in enumerate(names):
        attach(backend, name, composed(backend, seed, rank=2 + seed))
    yield backend
    for name in (*names, "four"):
        backend.detach(name)
