"""The benchmark of the page measures what it says; how much that is holds nobody up."""

from __future__ import annotations

import pytest

from benchmarks.page import bench_page
from personalpeft.errors import MissingPackage

pytestmark = pytest.mark.exhaustive


def test_the_page_is_measured_cold_and_warm() -> None:
    said: list[str] = []
    try:
        found = bench_page(repetitions=1, say=said.append)
    except MissingPackage as missing:
        pytest.skip(str(missing))
    assert 0 < found.first_paint_cold_ms.median <= found.ready_cold_ms.median
    assert 0 < found.first_paint_warm_ms.median <= found.ready_warm_ms.median
    # Small enough to be sent in one go over a slow line.
    assert 50_000 < found.bytes < 200_000
    assert len(said) == 1
