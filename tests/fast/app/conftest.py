from __future__ import annotations

import json
from pathlib import Path

import pytest
from app_makers import Place, teach


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "home", tmp_path / "cache")


@pytest.fixture
def taught(place: Place) -> Place:
    """A home in which ada corrected five replies."""
    teach(place, 5)
    return place


@pytest.fixture
def learned(taught: Place) -> Place:
    """A home in which ada's style was learned."""
    result = taught.run("learn", "--json")
    assert json.loads(result.stdout)["verdict"] == "promoted", result.output
    return taught
