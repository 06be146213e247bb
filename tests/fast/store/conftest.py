"""A fixture: an open store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_makers import opened

from personalpeft.store.store import Store


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with opened(home) as store:
        yield store
