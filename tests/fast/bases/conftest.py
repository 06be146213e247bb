"""Fixtures: the tiny random base in a cache of its own."""

from pathlib import Path

import pytest

from personalpeft.base_models.registry import find_card
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.types import Base


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny(tiny_cache: Path) -> Base:
    return resolve_base(find_card("tiny-random"), cache=tiny_cache)
