"""Fixtures: a command line with a home of its own, at three stages of learning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from app_makers import Shell, correct_replies


@pytest.fixture
def shell(home: Path, tmp_path: Path) -> Shell:
    return Shell(home, tmp_path / "cache")


@pytest.fixture
def corrected(shell: Shell) -> Shell:
    """A home in which ada corrected five replies."""
    correct_replies(shell, 5)
    return shell


@pytest.fixture(scope="session")
def learned_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learned")
    shell = Shell(folder / "home", folder / "cache")
    correct_replies(shell, 5)
    result = shell.run("learn", "--json")
    assert json.loads(result.stdout)["verdict"] == "promoted", result.output
    return shell.home


@pytest.fixture
def learned(learned_home: Path, shell: Shell) -> Shell:
    """A home in which ada's style layer was learned."""
    return shell
