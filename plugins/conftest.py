"""Isolated folders for the tests of plugins, and no network."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cache of the session's own, unless the caller named one."""
    os.environ.setdefault("PERSONALPEFT_CACHE", str(tmp_path_factory.mktemp("cache")))
    os.environ["HF_HUB_OFFLINE"] = "1"
