"""What hours do to runs and results: late repeats, silent clients, suspends and idle runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tinker_makers import (
    BASE,
    FB,
    TEXT,
    CallFailed,
    MovedClock,
    TinkerServer,
    datum,
    loss_of,
    open_server,
    refused,
)

from personalpeft.backends.torch.training.session import TorchSession
from personalpeft_tinker_server import service
from personalpeft_tinker_server.executor import STORE_SECONDS

HOUR = 3600.0


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
    moved.advance(STORE_SECONDS + 10)
    run.step(0.0)
    undisturbed.step(0.0)
    moved.advance(HOUR + 60)
    run.session.beat()
    timed.maintain()
    again = run.submit("forward_backward", seq=5, **FB)
    with refused("past call 5"):
        client.result(again)
    assert run.train(1) == pytest.approx(expected[3:], rel=1e-6)


@pytest.mark.parametrize("days", [2, -2])
def test_a_run_outlives_a_suspend_or_a_jump_of_the_clock(
    timed: TinkerServer, moved: MovedClock, days: int
) -> None:
    undisturbed, run = (timed.session().run() for _ in range(2))
    expected = undisturbed.train(2)
    losses = run.train(1)
    request = run.submit("forward", forward_input=FB["forward_backward_input"])
    client = run.session.client
    before = client.result(request)
    moved.wall += days * 24 * HOUR
    timed.maintain()
    assert client.result(request) == before
    losses += run.train(1)
    assert losses == pytest.approx(expected, rel=1e-6)


def test_a_run_whose_client_is_silent_for_a_day_is_over(
    timed: TinkerServer, moved: MovedClock
) -> None:
    silent, alive = (timed.session().run() for _ in range(2))
    path = silent.save("kept")
    moved.advance(25 * HOUR)
    # A jump back does not bring it back.
    moved.wall -= 48 * HOUR
    alive.session.beat()
    timed.maintain()
    with pytest.raises(CallFailed, match="released"):
        silent.train(1)
    alive.train(1)
    # Its saved weights stay.
    again = silent.session.client.session().run()
    again.call("load_weights", path=path, optimizer=True)


def test_a_run_leaves_memory_a_minute_after_the_last_heartbeat(
    timed: TinkerServer, moved: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, run = (timed.session().run() for _ in range(2))
    expected = undisturbed.train(3)
    losses = run.train(1)
    closed, close = list[object](), TorchSession.close
    monkeypatch.setattr(TorchSession, "close", lambda each: (closed.append(each), close(each)))
    for _ in range(3):
        moved.advance(50)
        run.session.beat()
        timed.maintain()
    # That of the other client.
    assert len(closed) == 1
    losses += run.train(1)
    moved.advance(61)
    timed.maintain()
    assert len(closed) == 2
    # A heartbeat or a call brings it back.
    run.session.beat()
    losses += run.train(1)
    assert losses == pytest.approx(expected, rel=1e-6)


def test_weights_go_when_their_time_has_passed(timed: TinkerServer, moved: MovedClock) -> None:
    run = timed.session().run()
    run.train(1)
    path = run.save("soon", ttl_seconds=3600)
    client = run.session.client
    client.post("unload_model", {"model_id": run.id})
    moved.advance(3590)
    timed.maintain()
    assert client.post("weights_info", {"tinker_path": path})["lora_rank"] == 4
    moved.advance(11)
    client.post("weights_info", {"tinker_path": path}, status=404)
    assert client.get("checkpoints")["checkpoints"] == []
    timed.maintain()
    folder = timed.runtime.settings.home / "tinker" / "files"
    assert list(folder.iterdir()) == []


def test_weights_without_a_name_are_kept_as_long_as_their_client_is_there(
    timed: TinkerServer, moved: MovedClock
) -> None:
    run = timed.session().run()
    session, client = run.session, run.session.client
    saved = run.call("save_weights_for_sampler", sampling_session_seq_id=40)
    sampler = saved["sampling_session_id"]
    (listed,) = client.get("checkpoints")["checkpoints"]
    for _ in range(3):
        moved.advance(0.7 * HOUR)
        session.beat()
        timed.maintain()
    assert session.sample(sampler, TEXT[:4])["sequences"]
    moved.advance(1.1 * HOUR)
    timed.maintain()
    with pytest.raises(CallFailed, match="no weights"):
        session.sample(sampler, TEXT[:4])
    client.post("weights_info", {"tinker_path": listed["tinker_path"]}, status=404)


def test_runs_without_calls_make_room_for_others_and_go_on(
    timed: TinkerServer, moved: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep in one process never ends its runs, since no SDK does."""
    monkeypatch.setattr(service, "MAX_RUNS", 2)
    session = timed.session()
    undisturbed = timed.session().run()
    expected = undisturbed.train(3)
    first = session.run()
    losses = first.train(2)
    losses += [loss_of(first.forward_backward([datum(TEXT)]))]
    second = session.run()
    # It waits for the call before.
    second.submit("forward", second.seq + 2, forward_input=FB["forward_backward_input"])
    body = {"session_id": session.id, "model_seq_id": 2, "base_model": BASE}
    assert session.client.ask("POST", "create_model", body).status_code == 429
    for _ in range(6):
        moved.advance(61)
        session.beat()
        timed.maintain()
    session.run()
    # The second has a call that waits, so it still counts.
    body["model_seq_id"] = 3
    assert session.client.ask("POST", "create_model", body).status_code == 429
    first.step()
    losses += first.train(1)
    assert losses[:3] == pytest.approx(expected, rel=1e-6)
    assert losses[3] < losses[2]


@pytest.mark.exhaustive
def test_calls_that_wait_for_a_missing_number_end_with_a_text_that_names_it(
    timed: TinkerServer, moved: MovedClock
) -> None:
    run = timed.session().run()
    run.train(1)
    client = run.session.client
    missing = run.seq + 1
    ids = [
        run.submit("forward_backward", missing + 2, **FB),
        run.submit("optim_step", missing + 1, adam_params={}),
    ]
    moved.advance(500)
    ids.append(run.submit("forward_backward", missing + 3, **FB))
    run.seq = missing + 3
    run.session.beat()
    timed.maintain()
    assert len(timed.extension.service.futures.queued(in_runs=True)) == 3
    moved.advance(120)
    for request in ids:
        with refused(f"Call {missing} of the run did not arrive"):
            client.result(request)
    run.train(1)
    late = run.submit("optim_step", missing, adam_params={})
    with pytest.raises(CallFailed, match="came too late"):
        client.result(late)


def test_a_missing_number_may_still_come_after_a_restart(
    tmp_path: Path, moved: MovedClock, float32: None
) -> None:
    clock = moved.clock()
    with open_server(tmp_path / "home", clock=clock) as opened:
        run = opened.session().run()
        later = run.submit("optim_step", run.seq + 2, adam_params={})
    moved.advance(HOUR)
    with open_server(tmp_path / "home", clock=clock) as opened:
        opened.maintain()
        run = run.on(opened)
        run.forward_backward([datum(TEXT)])
        assert run.session.client.result(later)["metrics"]
