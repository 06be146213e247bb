"""A tiny base, and a home on it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

import personalpeft
from personalpeft import Runtime
from personalpeft.memory.embedder import HashEmbedder

TABLES = """
[gate]
max_kl = 100
"""


@pytest.fixture(scope="module", autouse=True)
def quick_embedder() -> Iterator[None]:
    """Embed without a model, which would take most of the time of a learn on the tiny base."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("personalpeft.runtime.MiniLM", HashEmbedder)
        yield


@pytest.fixture(scope="session")
def card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model that ships with personalpeft, with a gate for random weights."""
    tiny = resources.files("personalpeft_models") / "tiny-random.toml"
    path = tmp_path_factory.mktemp("card") / "tiny-world.toml"
    path.write_text(tiny.read_text("utf-8") + TABLES, "utf-8")
    return path


@pytest.fixture
def runtime(tmp_path: Path, card: Path) -> Iterator[Runtime]:
    """An open home on the tiny base."""
    import torch

    torch.set_num_threads(1)
    with personalpeft.open(tmp_path / "home", base=card) as runtime:
        yield runtime
