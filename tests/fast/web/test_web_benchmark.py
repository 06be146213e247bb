"""The benchmark of the page reports its figures; the figures have no limits here."""

from __future__ import annotations

import pytest

from benchmarks.page import bench_page
from personalpeft.errors import MissingPackage

pytestmark = pytest.mark.exhaustive


def test_the_page_is_measured_cold_and_warm() -> None:
    messages: list[str] = []
    try:
        found = bench_page(repetitions=1, echo=messages.append)
    except MissingPackage as missing:
        pytest.skip(str(missing))
    assert 0 < found["first_paint_cold_ms"].median <= found["ready_cold_ms"].median
    assert 0 < found["first_paint_warm_ms"].median <= found["ready_warm_ms"].median
    # Small enough for one round trip on a slow connection.
    assert 50_000 < found["bytes"] < 200_000
    assert len(messages) == 1
