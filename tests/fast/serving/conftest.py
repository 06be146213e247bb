"""A fixture: a source of adapters that records its reads."""

from __future__ import annotations

import pytest
from serving_makers import AdapterSource


@pytest.fixture
def source() -> AdapterSource:
    """A source of adapters by digest that records its reads."""
    return AdapterSource()
