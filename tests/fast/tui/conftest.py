"""A fixture: a home with a learned style."""

from __future__ import annotations

import pytest
from runtime_makers import correct

from personalpeft import Runtime


@pytest.fixture
def learned(runtime: Runtime) -> Runtime:
    """A home in which ada corrected five replies and a learn promoted a style layer."""
    ada = runtime.user("ada")
    correct(ada, 5)
    assert ada.learn().live
    return runtime
