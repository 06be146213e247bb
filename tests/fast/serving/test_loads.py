"""From disk to a slot: once for all who wait, beside the steps, and nobody's stack leaves while it is used."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
from serving_makers import (
    BASE,
    PATIENCE,
    Shelf,
    Stepped,
    ask,
    digest_of,
    engine_on,
    request,
    running,
    stack,
    text,
    together,
    wait_until,
    waiting,
)

from personalpeft.backends.base import StagedStack
from personalpeft.backends.fake import FakeBackend
from personalpeft.engine.engine import Engine
from personalpeft.engine.request import RequestStatus


def digests(*numbers: int) -> list[str]:
    return [digest_of(n) for n in numbers]


def in_turn(engine: Engine, *numbers: int) -> None:
    for number in numbers:
        text(engine, request((number,)))


def test_a_stack_is_read_once_and_attached_from_host_memory_after_it_had_to_leave_its_slot(
    shelf: Shelf,
) -> None:
    with engine_on(read=shelf) as engine:
        in_turn(engine, 1, 1, 2, 1, 3, 1, 2)
        assert shelf.asked == digests(1, 2, 3)
        metrics = engine.metrics()
        # 3 takes the place of 2, which was not used for the longest time; then 2 that of 3.
        assert (metrics["stack_evictions_total"], metrics["stack_host_hits_total"]) == (2, 1)
        assert (
            metrics["stack_loads_total"],
            metrics["stack_hits_total"],
            metrics["stack_misses_total"],
        ) == (3, 3, 4)
        assert metrics["slots_used"] == metrics["slots"] == 2


def test_without_host_memory_it_is_read_again(shelf: Shelf) -> None:
    with engine_on(read=shelf, host_bytes=0) as engine:
        in_turn(engine, 1, 1, 2, 1, 3, 1, 2)
        assert shelf.asked == digests(1, 2, 3, 2)
        assert engine.metrics()["host_bytes"] == 0


def test_host_memory_stays_within_its_bytes(shelf: Shelf) -> None:
    with engine_on(read=shelf) as engine:
        in_turn(engine, 1)
        size = int(engine.metrics()["host_bytes"])
    shelf.asked.clear()
    with engine_on(read=shelf, host_bytes=3 * size) as engine:
        in_turn(engine, 1, 2, 3, 4, 5)
        assert engine.metrics()["host_bytes"] == 3 * size
        assert engine.metrics()["host_evictions_total"] == 2
        in_turn(engine, 3)
        assert shelf.asked == digests(1, 2, 3, 4, 5)
        in_turn(engine, 1)
        assert shelf.asked == digests(1, 2, 3, 4, 5, 1)


def test_a_stack_of_two_reads_each_of_its_adapters_once(shelf: Shelf) -> None:
    with engine_on(read=shelf) as engine:
        in_turn(engine, 1)
        text(engine, request((1, 2)))
        assert shelf.asked == digests(1, 1, 2)


def test_several_requests_for_one_missing_stack_share_one_load(shelf: Shelf) -> None:
    held = shelf.hold(1)
    with engine_on(read=shelf) as engine:
        readers = [
            ask(engine, request((1,), f"prompt {n}", user=f"user-{n % 3}")) for n in range(5)
        ]
        scored = threading.Thread(target=engine.preload, args=(stack(1),), daemon=True)
        scored.start()
        waiting(engine, 5)
        wait_until(
            lambda: {r.status for r in engine._core._scheduler.queue} == {RequestStatus.LOADING}
        )
        held.set()
        assert all(reader.text for reader in readers)
        scored.join(PATIENCE)
        assert shelf.asked == digests(1)


def test_a_load_that_fails_reaches_exactly_those_who_wait_for_it_and_is_not_remembered(
    shelf: Shelf,
) -> None:
    held = shelf.hold(1)
    missing = shelf.adapters.pop(digest_of(1))
    with engine_on(read=shelf) as engine:
        bad = [ask(engine, request((1,), f"prompt {n}", user=f"user-{n}")) for n in range(3)]
        fine = ask(engine, request((2,), user="bo"))
        errors: list[Exception] = []

        def hold() -> None:
            try:
                engine.preload(stack(1))
            except KeyError as error:
                errors.append(error)

        holder = threading.Thread(target=hold, daemon=True)
        holder.start()
        waiting(engine, 4)
        wait_until(lambda: len(engine._core._scheduler.pin_requests) == 1)
        held.set()
        assert [type(reader.end().error) for reader in bad] == [KeyError] * 3
        holder.join(PATIENCE)
        assert len(errors) == 1
        assert fine.text
        assert shelf.asked == digests(1, 2)
        with pytest.raises(KeyError):
            text(engine, request((1,)))
        shelf.adapters[digest_of(1)] = missing
        assert text(engine, request((1,)))
        assert engine.metrics()["stack_load_failures_total"] == 2
        # It took no slot from anybody.
        assert engine.metrics()["slots_used"] == 2


def test_a_slow_read_stops_nobody_elses_tokens(shelf: Shelf) -> None:
    held = shelf.hold(3)
    with engine_on(read=shelf) as engine:
        late = ask(engine, request((3,), user="bo"))
        shelf.reading.get(timeout=PATIENCE)
        assert text(engine, request((0,)[:0]))
        shelf_read = [text(engine, request((), f"prompt {n}")) for n in range(3)]
        assert all(shelf_read)
        assert late.pieces == []
        held.set()
        assert late.text


def test_a_slow_read_stops_nobody_whose_stack_is_there(shelf: Shelf) -> None:
    held = shelf.hold(3)
    with engine_on(read=shelf) as engine:
        in_turn(engine, 1)
        late = ask(engine, request((3,), user="bo"))
        assert shelf.reading.get(timeout=PATIENCE)
        in_turn(engine, 1, 1)
        held.set()
        assert late.text
        assert shelf.asked == digests(1, 3)


class Slow(FakeBackend):
    """Whose slots are filled by somebody else, who is slow with some stacks."""

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


def test_a_slot_that_is_slow_to_fill_holds_up_nobody_elses(shelf: Shelf) -> None:
    slow = Slow(1, 2)
    with engine_on(slow, shelf) as engine:
        late = [ask(engine, request((n,), user=f"user-{n}")) for n in (1, 2)]
        assert {slow.attaching.get(timeout=PATIENCE) for _ in late} == set(slow.may)
        in_turn(engine, 3, 4, 3)
        assert [reader.pieces for reader in late] == [[], []]
        for may in slow.may.values():
            may.set()
        assert all(reader.text for reader in late)


def test_closing_gives_up_a_load_that_can_be_given_up(shelf: Shelf) -> None:
    slow = Slow(1, gives_up=True)
    with engine_on(slow, shelf) as engine:
        late = ask(engine, request((1,)))
        slow.attaching.get(timeout=PATIENCE)
        closer = threading.Thread(target=engine.close, daemon=True)
        closer.start()
        closer.join(PATIENCE / 2)
        assert not closer.is_alive()
        assert late.finish == "cancelled"


def test_a_stack_is_brought_while_its_request_still_waits_for_a_row(shelf: Shelf) -> None:
    stepped = Stepped(rows=1)
    with engine_on(stepped, shelf) as engine:
        first = ask(engine, request((1,)))
        running(engine, 1)
        second = ask(engine, request((2,), user="bo"))
        waiting(engine, 1)
        stepped.go(2)
        wait_until(lambda: engine.metrics()["stack_loads_total"] == 2)
        assert len(stepped.owners) == 1
        stepped.run()
        assert first.text != second.text


def test_stacks_that_are_brought_ahead_take_no_slot_from_those_in_front(shelf: Shelf) -> None:
    stepped = Stepped(rows=1)
    with engine_on(stepped, shelf) as engine:
        readers = [ask(engine, request((1,)))]
        running(engine, 1)
        for n in (2, 3, 4):
            readers.append(ask(engine, request((n,), user=f"user-{n}")))
            waiting(engine, len(readers) - 1)
        stepped.run()
        assert len({reader.text for reader in readers}) == 4
        assert shelf.asked == digests(1, 2, 3, 4)


def test_whoever_comes_again_and_again_keeps_no_slot_from_the_one_who_waits(shelf: Shelf) -> None:
    stepped = Stepped(slots=1, rows=2)
    with engine_on(stepped, shelf) as engine:
        mine = [ask(engine, *(request((1,), user="ada", max_tokens=length) for length in (2, 5)))]
        running(engine, 2)
        other = ask(engine, request((2,), user="bo"))
        mine += [ask(engine, request((1,), f"prompt {n}", user="ada")) for n in range(2, 6)]
        waiting(engine, 5)
        stepped.run()
        assert other.text
        assert all(reader.text for reader in mine)
        # A row was free long before, but another request of theirs in it would have kept the only slot.
        assert stepped.owners[:4] == ["ada", "ada", "bo", "ada"]


def test_what_is_in_use_keeps_its_slot(shelf: Shelf) -> None:
    stepped = Stepped()
    with engine_on(stepped, shelf) as engine:
        first, second = together(engine, stepped, request((1,)), request((2,), user="bo"))
        third = ask(engine, request((3,), user="cy"))
        waiting(engine, 1)
        stepped.go(3)
        wait_until(lambda: len(first.pieces) == len(second.pieces) == 3)
        assert stepped.detached == []
        stepped.run()
        assert len({first.text, second.text, third.text}) == 3
        assert len(stepped.detached) == 1


def test_a_held_stack_keeps_its_slot_and_a_let_go_one_stays_until_it_is_needed(
    shelf: Shelf,
) -> None:
    with engine_on(read=shelf) as engine:
        with engine.pin(stack(1)) as key:
            assert key == stack(1).digest
            in_turn(engine, 2, 3, 4)
            assert engine.backend.score([], key) == ()
        assert shelf.asked == digests(1, 2, 3, 4)
        in_turn(engine, 1)
        assert shelf.asked == digests(1, 2, 3, 4)


def test_a_warmed_stack_is_there_when_its_first_request_comes(shelf: Shelf) -> None:
    with engine_on(read=shelf) as engine:
        engine.preload(stack(5))
        engine.preload(stack())
        assert shelf.asked == digests(5)
        in_turn(engine, 5)
        assert engine.metrics()["stack_hits_total"] == 1
        assert shelf.asked == digests(5)


def test_what_is_published_while_a_reply_is_written_changes_the_next_reply_and_not_this_one(
    shelf: Shelf,
) -> None:
    with engine_on(read=shelf) as engine:
        before, after = (text(engine, request((n,))) for n in (1, 2))
    stepped = Stepped(slots=2, rows=2)
    with engine_on(stepped, shelf) as engine:
        old = engine.stream([request((1,))])
        stepped.go()
        heard = next(old).text
        publishing = threading.Thread(target=engine.preload, args=(stack(2),), daemon=True)
        publishing.start()
        new = ask(engine, request((2,)))
        stepped.run()
        publishing.join(PATIENCE)
        assert heard + "".join(piece.text for piece in old) == before
        assert new.text == after
        # And back: nothing is read for it.
        read = list(shelf.asked)
        assert text(engine, request((1,))) == before
        assert shelf.asked == read
