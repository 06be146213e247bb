"""A fixture: an open home."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_makers import Home, opened


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with opened(tmp_path / "home") as home:
        yield home
