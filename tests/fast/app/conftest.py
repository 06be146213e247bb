"""Fixtures: a command line with a home of its own, at three stages of learning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from app_makers import Shell, correct_replies


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "home", tmp_path / "cache")


@pytest.fixture
def corrected(shell: Shell) -> Shell:
    """A home in which ada corrected five replies."""
    correct_replies(shell, 5)
    return shell


@pytest.fixture
def learned(corrected: Shell) -> Shell:
    """A home in which ada's style layer was learned."""
    result = corrected.run("learn", "--json")
    assert json.loads(result.stdout)["verdict"] == "promoted", result.output
    return corrected
