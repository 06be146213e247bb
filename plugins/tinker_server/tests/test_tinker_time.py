"""What hours do to runs and results: late repeats, silent clients, suspends and idle runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tinker_makers import (
    TEXT,
    CallFailed,
    MovedClock,
    TinkerServer,
    datum,
    open_server,
    passed,
)

HOUR = 3600.0
FB = {"forward_backward_input": passed([datum(TEXT)], "cross_entropy")}


@pytest.fixture
def moved() -> MovedClock:
    return MovedClock()


@pytest.fixture
def timed(tmp_path: Path, moved: MovedClock, float32: None) -> Iterator[TinkerServer]:
    """A server on the clock that the test moves."""
    with open_server(tmp_path / "home", clock=moved.clock()) as opened:
        yield opened


def test_a_call_that_is_posted_again_after_its_result_was_deleted_is_not_executed_again(
    timed: TinkerServer, moved: MovedClock
) -> None:
    undisturbed, run = (timed.session().run() for _ in range(2))
    expected = undisturbed.train(4)
    run.train(3)
    client = run.session.client
    # The state is stored at the next step, after which the results are not needed.
    moved.advance(40)
    run.step(0.0)
    undisturbed.step(0.0)
    moved.advance(HOUR + 60)
    client.post("session_heartbeat", {"session_id": run.session.id})
    timed.extension.service.do_chores()
    again = run.submit("forward_backward", seq=5, **FB)
    with pytest.raises(CallFailed, match="past call 5") as failed:
        client.result(again)
    assert failed.value.args[1] == "user"
    assert run.train(1) == pytest.approx(expected[3:], rel=1e-6)
