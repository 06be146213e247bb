"""Fixture of all homes on the tiny base."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from personalpeft.memory.embedder import HashEmbedder


@pytest.fixture(scope="module", autouse=True)
def quick_embedder() -> Iterator[None]:
    """Embed without a model, which would take most of the time of a learn on the tiny base."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("personalpeft.runtime.MiniLM", HashEmbedder)
        yield
