"""Prepared homes for the crash tests, made once for each operation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from crash_makers import CrashFolder, make_crash_folder
from crash_operations import ENCRYPTED

from personalpeft.settings import KEYS


@pytest.fixture(autouse=True)
def own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the folder of keys back, which each operation sets."""
    monkeypatch.setenv(KEYS, "")


@pytest.fixture(scope="session")
def prepared(
    shared_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], CrashFolder]:
    """Return a function that gives the folder an operation starts from."""
    root, made = tmp_path_factory.mktemp("prepared"), {}

    def prepare(operation: str) -> CrashFolder:
        if operation in ENCRYPTED:
            pytest.importorskip("sqlcipher3")
        if operation not in made:
            made[operation] = make_crash_folder(operation, root / operation)
        return made[operation]

    return prepare
