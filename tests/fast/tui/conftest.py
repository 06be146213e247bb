"""Fixtures: a home with a learned style."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime_makers import correct, open_runtime

from personalpeft import Runtime


@pytest.fixture(scope="session")
def learned_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("learned") / "home"
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        assert ada.learn().live
    return home


@pytest.fixture
def learned(learned_home: Path, runtime: Runtime) -> Runtime:
    """A home in which ada corrected five replies and a learn promoted a style layer."""
    return runtime
