from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import personalpeft
from personalpeft import Runtime


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with personalpeft.open(tmp_path / "home", backend="fake") as opened:
        yield opened


@pytest.fixture
def learned(runtime: Runtime) -> Runtime:
    """A home in which ada corrected five replies and learned from that."""
    ada = runtime.user("ada")
    for number in range(5):
        ada.feedback(ada.chat(f"question {number}"), edit=f"the answer to question {number}")
    assert ada.learn().live
    return runtime
