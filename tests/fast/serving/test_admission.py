"""Under overload every user is served in turn, and refused requests get a time to retry."""

from __future__ import annotations

import threading

import pytest
from backend_makers import in_thread
from serving_makers import (
    AdapterSource,
    ManualClock,
    SteppedBackend,
    ask,
    engine_on,
    preload,
    request,
    stack,
    text,
    wait_for_running,
    wait_for_waiting,
    wait_until,
)

from personalpeft.errors import Busy, InvalidInput, QueueFull
from personalpeft.settings import Serving


def test_a_user_with_a_hundred_requests_delays_others_by_one(source: AdapterSource) -> None:
    stepped = SteppedBackend(rows=2)
    with engine_on(stepped, source, max_queue_per_user=100) as engine:
        preload(engine, stack(2))
        flood = ask(engine, *(request((1,), f"prompt {n}", user="ada") for n in range(100)))
        wait_for_running(engine, 2)
        one = ask(engine, request((2,), user="bo"))
        wait_for_waiting(engine, 99)
        stepped.run()
        assert one.finish == "stop"
        flood.end()
        # Rows that ran already, and one whose turn it was.
        assert stepped.owners.index("bo") <= 3
        assert len(stepped.owners) == 101


def test_while_others_wait_a_user_has_at_most_the_share_of_rows(source: AdapterSource) -> None:
    stepped = SteppedBackend(rows=4)
    with engine_on(stepped, source, max_running_per_user=1) as engine:
        lengths = [1, *[50] * 11]
        mine = ask(engine, *(request((1,), user="ada", max_tokens=length) for length in lengths))
        wait_for_running(engine, 4)
        others = ask(engine, *(request((1,), f"prompt {n}", user="bo") for n in range(2)))
        wait_for_waiting(engine, 10)
        stepped.run()
        mine.end()
        others.end()
        assert stepped.owners[:4] == ["ada"] * 4
        # The first free row is bo's, though ada's request is older.
        assert stepped.owners[4] == "bo"


def test_a_full_queue_refuses_at_once_with_a_time_to_retry(source: AdapterSource) -> None:
    stepped, time = SteppedBackend(rows=1), ManualClock()
    with engine_on(stepped, source, clock=time.clock(), max_queue=2) as engine:
        first = ask(engine, request((1,)))
        wait_for_running(engine, 1)
        time.at = 30.0
        stepped.go(20)
        assert first.text
        wait_until(lambda: engine.metrics()["num_requests_running"] == 0)
        stepped.hold()
        readers = [ask(engine, request((1,), user="ada"))]
        wait_for_running(engine, 1)
        readers += [ask(engine, request((1,), user=user)) for user in ("bo", "cy")]
        wait_for_waiting(engine, 2)
        with pytest.raises(QueueFull, match="2") as busy:
            text(engine, request((1,), user="di"))
        # One more reply like the last has to end first.
        assert busy.value.retry_after == 30.0
        assert "30" in busy.value.hint
        assert engine.metrics()["refusals_total"] == 1
        stepped.run()
        assert all(reader.text for reader in readers)
        assert text(engine, request((1,), user="di"))


def test_a_users_queue_limit_refuses_that_user_alone(source: AdapterSource) -> None:
    stepped = SteppedBackend(rows=1)
    with engine_on(stepped, source, max_queue=5, max_queue_per_user=1) as engine:
        readers = [ask(engine, request((1,), user="ada"))]
        wait_for_running(engine, 1)
        readers.append(ask(engine, request((1,), user="ada")))
        wait_for_waiting(engine, 1)
        with pytest.raises(QueueFull, match="1") as busy:
            text(engine, request((1,), user="ada"))
        assert busy.value.retry_after is not None
        assert busy.value.retry_after >= 1
        readers.append(ask(engine, request((1,), user="bo")))
        wait_for_waiting(engine, 2)
        stepped.run()
        assert all(reader.text for reader in readers)


def test_a_call_that_can_never_fit_is_refused_and_reserves_nothing(source: AdapterSource) -> None:
    with engine_on(read=source, max_queue_per_user=3) as engine:
        with pytest.raises(Busy) as busy:
            engine.complete([request((1,), f"prompt {n}") for n in range(4)])
        assert busy.value.retry_after is None
        assert busy.value.hint
        assert engine.metrics()["num_requests_waiting"] == 0
        assert engine.complete([request((1,), f"prompt {n}") for n in range(3)])


def test_background_work_is_never_refused_and_never_first(source: AdapterSource) -> None:
    stepped = SteppedBackend(rows=2)
    with engine_on(stepped, source, max_queue=2, max_queue_per_user=2) as engine:
        learning = ask(
            engine,
            *(request((1,), f"prompt {n}", user="learner", background=True) for n in range(20)),
        )
        wait_for_running(engine, 1)
        people = [ask(engine, request((2,), user=user)) for user in ("ada", "bo")]
        wait_for_waiting(engine, 21)
        stepped.run()
        assert all(reader.text for reader in people)
        learning.end()
        # A row was kept free of it from the start; both interactive requests precede its next row.
        assert sorted(stepped.owners[:3]) == ["ada", "bo", "learner"]
        assert len(stepped.owners) == 22


def test_a_paused_request_does_not_start_and_a_failing_pause_reaches_its_caller(
    source: AdapterSource,
) -> None:
    with engine_on(read=source) as engine:
        paused = threading.Event()
        paused.set()
        requests = [request((1,), f"prompt {n}", user="learner", background=True) for n in range(3)]
        asking = in_thread(lambda: engine.complete(requests, paused=paused.is_set))
        wait_for_waiting(engine, 3)
        assert text(engine, request((2,), user="ada"))
        assert engine.metrics()["num_requests_waiting"] == 3
        paused.clear()
        assert asking.result(20) == engine.complete(requests)

        def broken() -> bool:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            engine.complete(requests, paused=broken)
        assert text(engine, request((2,), user="ada"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slots", 0),
        ("max_batch", True),
        ("users", 0),
        ("max_batch", 1.5),
        ("host_bytes", -1),
        ("max_queue", 0),
        ("max_queue_per_user", "many"),
        ("max_running_per_user", 0),
        ("self_check", 1.5),
        ("self_check", float("nan")),
    ],
)
def test_invalid_settings_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=name) as raised:
        Serving(**{name: value})  # type: ignore[arg-type]
    assert raised.value.hint
