from pathlib import Path

import pytest

from personalpeft.bases.base import Base
from personalpeft.bases.prepare import prepare
from personalpeft.bases.shelf import find_card


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny(tiny_cache: Path) -> Base:
    return prepare(find_card("tiny-random"), cache=tiny_cache)
