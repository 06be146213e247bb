"""A stack is loaded once for all waiting requests, and stays in its slot while it is used."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
from backend_makers import in_thread
from serving_makers import (
    BASE,
    PATIENCE,
    AdapterSource,
    SteppedBackend,
    ask,
    digest_of,
    engine_on,
    preload,
    request,
    stack,
    start_together,
    text,
    wait_for_running,
    wait_for_waiting,
    wait_until,
)

from personalpeft.backends.base import StagedStack
from personalpeft.backends.fake import FakeBackend
from personalpeft.engine.engine import Engine


def digests(*numbers: int) -> list[str]:
    return [digest_of(n) for n in numbers]


def complete_in_turn(engine: Engine, *numbers: int) -> None:
    for number in numbers:
        text(engine, request((number,)))


def test_an_evicted_stack_is_attached_again_from_host_memory(
    source: AdapterSource,
) -> None:
    with engine_on(read=source) as engine:
        complete_in_turn(engine, 1, 1, 2, 1, 3, 1, 2)
        assert source.reads == digests(1, 2, 3)
        metrics = engine.metrics()
        # 3 evicts 2, the least recently used; then 2 evicts 3.
        assert (metrics["stack_evictions_total"], metrics["stack_host_hits_total"]) == (2, 1)
        assert (
            metrics["stack_loads_total"],
            metrics["stack_hits_total"],
            metrics["stack_misses_total"],
        ) == (3, 3, 4)
        assert metrics["slots_used"] == metrics["slots"] == 2


def test_without_host_memory_an_evicted_stack_is_read_again(source: AdapterSource) -> None:
    with engine_on(read=source, host_bytes=0) as engine:
        complete_in_turn(engine, 1, 1, 2, 1, 3, 1, 2)
        assert source.reads == digests(1, 2, 3, 2)
        assert engine.metrics()["host_bytes"] == 0


def test_host_memory_stays_within_its_bytes(source: AdapterSource) -> None:
    with engine_on(read=source) as engine:
        complete_in_turn(engine, 1)
        size = int(engine.metrics()["host_bytes"])
    source.reads.clear()
    with engine_on(read=source, host_bytes=3 * size) as engine:
        complete_in_turn(engine, 1, 2, 3, 4, 5)
        assert engine.metrics()["host_bytes"] == 3 * size
        assert engine.metrics()["host_evictions_total"] == 2
        complete_in_turn(engine, 3)
        assert source.reads == digests(1, 2, 3, 4, 5)
        complete_in_turn(engine, 1)
        assert source.reads == digests(1, 2, 3, 4, 5, 1)


def test_a_stack_of_two_reads_each_of_its_adapters_once(source: AdapterSource) -> None:
    with engine_on(read=source) as engine:
        complete_in_turn(engine, 1)
        text(engine, request((1, 2)))
        assert source.reads == digests(1, 1, 2)


def test_requests_for_one_missing_stack_share_one_load(source: AdapterSource) -> None:
    held = source.hold(1)
    with engine_on(read=source) as engine:
        readers = [
            ask(engine, request((1,), f"prompt {n}", user=f"user-{n % 3}")) for n in range(5)
        ]
        scored = in_thread(preload, engine, stack(1))
        wait_for_waiting(engine, 5)
        wait_until(lambda: engine._scheduler.adapters.keys and engine._scheduler.pin_requests)
        held.set()
        assert all(reader.text for reader in readers)
        scored.result(PATIENCE)
        assert source.reads == digests(1)


def test_a_failed_load_reaches_only_its_waiting_requests_and_is_not_cached(
    source: AdapterSource,
) -> None:
    held = source.hold(1)
    missing = source.adapters.pop(digest_of(1))
    with engine_on(read=source) as engine:
        bad = [ask(engine, request((1,), f"prompt {n}", user=f"user-{n}")) for n in range(3)]
        fine = ask(engine, request((2,), user="bo"))
        holder = in_thread(preload, engine, stack(1))
        wait_for_waiting(engine, 4)
        wait_until(lambda: len(engine._scheduler.pin_requests) == 1)
        held.set()
        assert [type(reader.end().error) for reader in bad] == [KeyError] * 3
        assert isinstance(holder.exception(PATIENCE), KeyError)
        assert fine.text
        assert source.reads == digests(1, 2)
        with pytest.raises(KeyError):
            text(engine, request((1,)))
        source.adapters[digest_of(1)] = missing
        assert text(engine, request((1,)))
        assert engine.metrics()["stack_load_failures_total"] == 2
        # The failed load occupied no slot.
        assert engine.metrics()["slots_used"] == 2


def test_a_slow_read_delays_no_running_reply(source: AdapterSource) -> None:
    held = source.hold(3)
    with engine_on(read=source) as engine:
        late = ask(engine, request((3,), user="bo"))
        source.started.get(timeout=PATIENCE)
        assert text(engine, request((0,)[:0]))
        shelf_read = [text(engine, request((), f"prompt {n}")) for n in range(3)]
        assert all(shelf_read)
        assert late.pieces == []
        held.set()
        assert late.text


def test_a_slow_read_delays_no_request_for_a_resident_stack(source: AdapterSource) -> None:
    held = source.hold(3)
    with engine_on(read=source) as engine:
        complete_in_turn(engine, 1)
        late = ask(engine, request((3,), user="bo"))
        assert source.started.get(timeout=PATIENCE)
        complete_in_turn(engine, 1, 1)
        held.set()
        assert late.text
        assert source.reads == digests(1, 3)


class SlowAttachBackend(FakeBackend):
    """Attaches some stacks slowly, in the caller's thread."""

    def __init__(self, *slow: int, gives_up: bool = False) -> None:
        super().__init__(BASE, slots=4, rows=4)
        self.may = {stack(number).digest: threading.Event() for number in slow}
        self.attaching: SimpleQueue[str] = SimpleQueue()
        self._gives_up = gives_up

    def attach(self, key: str, staged: StagedStack) -> None:
        self.attaching.put(key)
        if key in self.may:
            assert self.may[key].wait(PATIENCE)
        super().attach(key, staged)

    def detach(self, key: str) -> None:
        if self._gives_up and key in self.may:
            self.may[key].set()
        super().detach(key)


def test_a_slow_attachment_delays_no_other_slot(source: AdapterSource) -> None:
    slow = SlowAttachBackend(1, 2)
    with engine_on(slow, source) as engine:
        late = [ask(engine, request((n,), user=f"user-{n}")) for n in (1, 2)]
        assert {slow.attaching.get(timeout=PATIENCE) for _ in late} == set(slow.may)
        complete_in_turn(engine, 3, 4, 3)
        assert [reader.pieces for reader in late] == [[], []]
        for may in slow.may.values():
            may.set()
        assert all(reader.text for reader in late)


def test_closing_aborts_an_abortable_load(source: AdapterSource) -> None:
    slow = SlowAttachBackend(1, gives_up=True)
    with engine_on(slow, source) as engine:
        late = ask(engine, request((1,)))
        slow.attaching.get(timeout=PATIENCE)
        in_thread(engine.close).result(PATIENCE / 2)
        assert late.finish == "cancelled"


def test_a_stack_is_loaded_while_its_request_is_queued(source: AdapterSource) -> None:
    stepped = SteppedBackend(rows=1)
    with engine_on(stepped, source) as engine:
        first = ask(engine, request((1,)))
        wait_for_running(engine, 1)
        second = ask(engine, request((2,), user="bo"))
        wait_for_waiting(engine, 1)
        stepped.go(2)
        wait_until(lambda: engine.metrics()["stack_loads_total"] == 2)
        assert len(stepped.owners) == 1
        stepped.run()
        assert first.text != second.text


def test_preloaded_stacks_take_no_slot_from_earlier_requests(source: AdapterSource) -> None:
    stepped = SteppedBackend(rows=1)
    with engine_on(stepped, source) as engine:
        readers = [ask(engine, request((1,)))]
        wait_for_running(engine, 1)
        for n in (2, 3, 4):
            readers.append(ask(engine, request((n,), user=f"user-{n}")))
            wait_for_waiting(engine, len(readers) - 1)
        stepped.run()
        assert len({reader.text for reader in readers}) == 4
        assert source.reads == digests(1, 2, 3, 4)


def test_repeated_requests_of_one_user_cannot_hold_a_slot_forever(source: AdapterSource) -> None:
    stepped = SteppedBackend(slots=1, rows=2)
    with engine_on(stepped, source) as engine:
        mine = [ask(engine, *(request((1,), user="ada", max_tokens=length) for length in (2, 5)))]
        wait_for_running(engine, 2)
        other = ask(engine, request((2,), user="bo"))
        mine += [ask(engine, request((1,), f"prompt {n}", user="ada")) for n in range(2, 6)]
        wait_for_waiting(engine, 5)
        stepped.run()
        assert other.text
        assert all(reader.text for reader in mine)
        # A row was free before, but another request of that user would have kept the only slot.
        assert stepped.owners[:4] == ["ada", "ada", "bo", "ada"]


def test_a_stack_in_use_keeps_its_slot(source: AdapterSource) -> None:
    stepped = SteppedBackend()
    with engine_on(stepped, source) as engine:
        first, second = start_together(engine, stepped, request((1,)), request((2,), user="bo"))
        third = ask(engine, request((3,), user="cy"))
        wait_for_waiting(engine, 1)
        stepped.go(3)
        wait_until(lambda: len(first.pieces) == len(second.pieces) == 3)
        assert stepped.detached == []
        stepped.run()
        assert len({first.text, second.text, third.text}) == 3
        assert len(stepped.detached) == 1


def test_a_pinned_stack_keeps_its_slot_and_an_unpinned_one_until_it_is_needed(
    source: AdapterSource,
) -> None:
    with engine_on(read=source) as engine:
        with engine.pin(stack(1)) as key:
            assert key == stack(1).digest
            complete_in_turn(engine, 2, 3, 4)
            assert engine.backend.score([], key) == ()
        assert source.reads == digests(1, 2, 3, 4)
        complete_in_turn(engine, 1)
        assert source.reads == digests(1, 2, 3, 4)


def test_a_preloaded_stack_is_resident_for_its_first_request(source: AdapterSource) -> None:
    with engine_on(read=source) as engine:
        preload(engine, stack(5))
        preload(engine, stack())
        assert source.reads == digests(5)
        complete_in_turn(engine, 5)
        assert engine.metrics()["stack_hits_total"] == 1
        assert source.reads == digests(5)


def test_a_revision_promoted_during_a_reply_serves_the_next_one(
    source: AdapterSource,
) -> None:
    with engine_on(read=source) as engine:
        before, after = (text(engine, request((n,))) for n in (1, 2))
    stepped = SteppedBackend(slots=2, rows=2)
    with engine_on(stepped, source) as engine:
        old = engine.stream([request((1,))])
        stepped.go()
        received = next(old).text
        promoting = in_thread(preload, engine, stack(2))
        new = ask(engine, request((2,)))
        stepped.run()
        promoting.result(PATIENCE)
        assert received + "".join(piece.text for piece in old) == before
        assert new.text == after
        # After a rollback nothing is read.
        read = list(source.reads)
        assert text(engine, request((1,))) == before
        assert source.reads == read
