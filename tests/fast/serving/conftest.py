from __future__ import annotations

import pytest
from serving_makers import Shelf


@pytest.fixture
def shelf() -> Shelf:
    """Adapters by digest, and what was asked for."""
    return Shelf()
