"""A fixture: a home with a daemon under a simulated clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_makers import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "home")
    yield world
    world.close()
