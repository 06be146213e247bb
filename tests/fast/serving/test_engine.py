"""Each reply uses its own stack, whatever other requests come, leave or fail."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from backend_makers import in_thread
from serving_makers import (
    BASE,
    PATIENCE,
    AdapterSource,
    ManualClock,
    SteppedBackend,
    StreamReader,
    adapter,
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

from personalpeft.backends.base import Continuation
from personalpeft.backends.fake import FakeBackend, fake_base
from personalpeft.backends.sequence import SequenceState
from personalpeft.engine.engine import Engine
from personalpeft.errors import (
    BaseMismatch,
    Cancelled,
    DeadlineExceeded,
    PromptTooLong,
    ServingFailed,
)
from personalpeft.types import Message, Stack, StackEntry


@pytest.fixture
def engine(source: AdapterSource) -> Iterator[Engine]:
    with engine_on(read=source) as engine:
        yield engine


@pytest.fixture
def stepped() -> SteppedBackend:
    return SteppedBackend()


@pytest.fixture
def slow(stepped: SteppedBackend, source: AdapterSource) -> Iterator[Engine]:
    """An engine whose steps the test allows one by one."""
    with engine_on(stepped, source) as engine:
        yield engine


# Rows and stacks


def test_the_requests_of_a_call_get_the_replies_of_single_calls(engine: Engine) -> None:
    requests = [request(), request((1,)), request((1, 2)), request((1,), "bye")]
    assert engine.complete(requests) == [text(engine, each) for each in requests]
    assert len(set(engine.complete(requests))) == 4
    assert engine.complete([]) == []


def test_a_call_may_exceed_the_batch_and_the_slots(
    engine: Engine,
) -> None:
    requests = [request((n % 7,), f"prompt {n}") for n in range(30)]
    assert engine.complete(requests) == [text(engine, each) for each in requests]


def test_a_prompt_is_rendered_once_per_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[str] = []
    render = FakeBackend.render

    def counted(self: FakeBackend, messages: Sequence[Message]) -> tuple[int, ...]:
        rendered.append(messages[-1].content)
        return render(self, messages)

    monkeypatch.setattr(FakeBackend, "render", counted)
    stream = engine.stream([request((1,), "one"), request((), "two")])
    assert all("user: " in engine.backend.decode(prompt) for prompt in stream.prompts)
    assert all(piece.text for piece in stream if not piece.finish)
    assert rendered == ["one", "two"]


def _num_threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")
def test_a_caller_keeps_no_threads_of_its_own_while_it_waits(engine: Engine) -> None:
    """Idle threads of the caller would make those of a step sleep between their loops."""
    torch = pytest.importorskip("torch")
    engine.complete([request()])  # Starts the engine's own threads.
    torch.set_num_threads(2)
    before = _num_threads()
    torch.ones(1 << 20).exp_()
    computing = _num_threads()
    assert computing == before + 1
    engine.complete([request()])
    # The kernel lists a thread that has ended for a moment.
    wait_until(lambda: _num_threads() == before)


def test_order_and_weights_identify_a_stack() -> None:
    stacks = [
        stack(1, 2),
        stack(2, 1),
        stack(1),
        stack(1, weight=0.5),
        Stack("another base", stack(1).entries),
    ]
    assert len({each.digest for each in stacks}) == len(stacks)


def test_layers_of_weight_0_are_not_attached(engine: Engine, source: AdapterSource) -> None:
    with engine.pin(stack(1, weight=0.0)) as key:
        assert key is None
    assert source.reads == []


def test_a_row_is_owned_by_the_requesting_user(slow: Engine, stepped: SteppedBackend) -> None:
    stepped.run()
    for user in ("ada", "bo"):
        text(slow, request((1,), user=user))
    assert stepped.owners == ["ada", "bo"]


def test_scores_are_of_the_named_stack(engine: Engine) -> None:
    item = Continuation((1, 2), (3,))
    scores = {engine.score([item], stack(*numbers))[0].logp for numbers in ((), (1,), (2,), (1, 2))}
    assert len(scores) == 4
    assert engine.score([], stack(1)) == ()


def test_concurrent_threads_with_few_slots_get_their_own_stacks(engine: Engine) -> None:
    alone = {n: text(engine, request((n,))) for n in range(6)}

    def send_requests(number: int) -> None:
        for turn in range(20):
            if turn % 5 == 4:
                engine.score([Continuation((1,), (2,))], stack(number))
            assert text(engine, request((number,), user=f"user-{number}")) == alone[number]

    for sending in [in_thread(send_requests, n) for n in range(6)]:
        sending.result(PATIENCE)


# Joining and leaving


def test_a_request_joins_between_two_steps_of_another(
    slow: Engine, stepped: SteppedBackend
) -> None:
    with engine_on() as alone:
        whole = [text(alone, request((n,))) for n in (1, 2)]
    first = slow.stream([request((1,))])
    stepped.go()
    received = [next(first).text]
    second = ask(slow, request((2,), user="bo"))
    wait_for_running(slow, 1)
    wait_until(
        lambda: slow.metrics()["num_requests_waiting"] + slow.metrics()["num_requests_running"] == 2
    )
    stepped.run()
    received += [piece.text for piece in first]
    assert ["".join(received), second.text] == whole


def test_a_slow_reader_delays_no_other_request(slow: Engine, stepped: SteppedBackend) -> None:
    idle = slow.stream([request((1,))])
    stepped.run()
    begun = next(idle).text
    others = [text(slow, request((2,), f"prompt {n}")) for n in range(5)]
    assert all(others)
    assert begun + "".join(piece.text for piece in idle) == text(slow, request((1,)))


@pytest.mark.parametrize("went", ["closed", "asked", "forgotten"])
def test_a_disconnected_client_frees_its_row_within_a_step(
    slow: Engine, stepped: SteppedBackend, went: str
) -> None:
    gone = threading.Event()
    replies = slow.stream(
        [request((1,), "x" * 600)], cancelled=gone.is_set if went == "asked" else None
    )
    stepped.go(3)
    next(replies)
    stepped.entered.get(timeout=PATIENCE)
    before = stepped.steps
    if went == "closed":
        replies.close()
    elif went == "asked":
        gone.set()
    else:
        del replies
        gc.collect()
    stepped.go(2)
    assert stepped.left.get(timeout=PATIENCE) >= 0
    assert stepped.steps - before <= 2
    wait_for_running(slow, 0)
    assert slow.metrics()["cancellations_total"] == 1
    if went == "asked":
        assert list(replies)[-1].finish == "cancelled"
    if went == "closed":
        assert list(replies) == []


def test_a_reply_can_be_closed_by_another_thread(slow: Engine) -> None:
    replies = slow.stream([request((1,))])
    reader = StreamReader(replies)
    wait_for_running(slow, 1)
    replies.close()
    slow.backend.go()  # type: ignore[attr-defined]
    assert reader.finish in (None, "cancelled")


def test_an_unread_reply_computes_nothing(
    slow: Engine, stepped: SteppedBackend, source: AdapterSource
) -> None:
    replies = slow.stream([request((1,))])
    replies.close()
    assert list(replies) == []
    assert (source.reads, stepped.owners) == ([], [])


def test_a_queued_request_can_be_cancelled(
    slow: Engine, stepped: SteppedBackend, source: AdapterSource
) -> None:
    rows = start_together(slow, stepped, *(request((1,), f"prompt {n}") for n in range(4)))
    gone = threading.Event()
    late = ask(slow, request((1,)), cancelled=gone.is_set)
    wait_for_waiting(slow, 1)
    gone.set()
    stepped.go()
    assert [(piece.text, piece.finish) for piece in late.end().pieces] == [("", "cancelled")]
    stepped.run()
    assert all(row.finish == "stop" for row in rows)
    assert len(stepped.owners) == 4


def test_a_request_waiting_for_its_stack_can_be_cancelled(
    engine: Engine, source: AdapterSource
) -> None:
    held = source.hold(3)
    gone = threading.Event()
    late = ask(engine, request((3,)), cancelled=gone.is_set)
    source.started.get(timeout=PATIENCE)
    gone.set()
    assert late.finish == "cancelled"
    held.set()


def test_an_exception_in_a_cancellation_check_ends_only_its_own_call(
    slow: Engine, stepped: SteppedBackend
) -> None:
    def broken() -> bool:
        raise ZeroDivisionError

    fine, bad = ask(slow, request((1,))), ask(slow, request((1,), user="bo"), cancelled=broken)
    stepped.run()
    assert isinstance(bad.end().error, ZeroDivisionError)
    assert fine.finish == "stop"


def test_a_cancelled_batch_returns_its_partial_texts(engine: Engine) -> None:
    assert engine.complete([request((1,)), request()], cancelled=lambda: True) == ["", ""]


# Deadlines


def test_a_reply_past_its_deadline_ends_with_its_text_and_an_error(source: AdapterSource) -> None:
    stepped, time = SteppedBackend(), ManualClock()
    with engine_on(stepped, source, clock=time.clock()) as engine:
        asked = request((1,), timeout=5), request((1,), user="bo", timeout=100)
        reply, other = start_together(engine, stepped, *asked)
        stepped.go(2)
        wait_until(lambda: len(reply.pieces) == 2)
        time.at = 5.0
        stepped.run()
        error = reply.end().error
        assert isinstance(error, DeadlineExceeded)
        assert "5 s" in error.message
        assert isinstance(error, TimeoutError)
        assert error.hint
        assert other.text.startswith("".join(piece.text for piece in reply.pieces))
        assert all(piece.finish is None for piece in reply.pieces)
        assert engine.metrics()["deadline_errors_total"] == 1


def test_a_queued_request_past_its_deadline_never_starts(source: AdapterSource) -> None:
    stepped, time = SteppedBackend(rows=1), ManualClock()
    with engine_on(stepped, source, clock=time.clock()) as engine:
        first = ask(engine, request((1,)))
        wait_for_running(engine, 1)
        late = ask(engine, request((1,), user="bo", timeout=2))
        wait_for_waiting(engine, 1)
        time.at = 2.0
        stepped.go()
        error = late.end().error
        assert isinstance(error, DeadlineExceeded)
        assert "2 s" in error.message
        assert late.pieces == []
        stepped.run()
        assert first.finish == "stop"
        assert stepped.owners == ["ada"]


def test_a_deadline_may_pass_while_the_stack_is_loading(source: AdapterSource) -> None:
    time = ManualClock()
    held = source.hold(3)
    with engine_on(read=source, clock=time.clock()) as engine:
        late = ask(engine, request((3,), timeout=2))
        source.started.get(timeout=PATIENCE)
        time.at = 2.0
        assert isinstance(late.end().error, DeadlineExceeded)
        held.set()


# Refused requests


def test_a_prompt_that_is_too_long_reports_by_how_much(engine: Engine) -> None:
    room = BASE.card.context - 100
    overhead = len(engine.tokenize(request(prompt="x", max_tokens=100))) - 1
    assert len(engine.tokenize(request(prompt="x" * (room - overhead), max_tokens=100))) == room
    with pytest.raises(PromptTooLong, match=rf"{room + 7}.*100.*7.*4096") as long:
        engine.tokenize(request(prompt="x" * (room - overhead + 7), max_tokens=100))
    assert long.value.excess == 7
    assert str(room) in long.value.hint
    with pytest.raises(PromptTooLong) as hopeless:
        engine.tokenize(request(max_tokens=10**9))
    assert hopeless.value.hint


def test_a_prompt_beyond_the_backends_capacity_is_too_long_too() -> None:
    backend = FakeBackend(BASE)
    backend.max_length = 300
    with engine_on(backend) as engine, pytest.raises(PromptTooLong, match="300"):
        engine.tokenize(request(prompt="x" * 200, max_tokens=100))


def test_a_raw_completion_starts_with_the_bases_special_tokens(engine: Engine) -> None:
    engine.backend.bos_tokens = (1,)  # type: ignore[misc]  # a base that has one
    chat = request(prompt="x")
    assert engine.tokenize(replace(chat, template=False)) == (1, ord("x"))
    assert engine.tokenize(chat)[0] != 1


def test_a_prompt_may_be_given_as_tokens(engine: Engine) -> None:
    asked = request()
    tokens = engine.tokenize(asked)
    raw = replace(asked, messages=(), tokens=tokens)
    assert engine.tokenize(raw) == tokens
    assert text(engine, raw) == text(engine, asked)


def test_a_stack_may_name_adapters_that_a_plugin_keeps(engine: Engine) -> None:
    kept = adapter(77)
    key = "f" * 64
    named = Stack(BASE.digest, (StackEntry("style", f"style@{key[:12]}", key),))
    assert engine.complete([replace(request(), stack=Stack(BASE.digest))])
    engine.add_source(lambda digest: kept if digest == key else None)
    assert text(engine, replace(request(), stack=named)) != text(
        engine, replace(request(), stack=Stack(BASE.digest))
    )
    # Others are still read from the store.
    assert text(engine, request((1,))) != text(engine, request())


def test_one_prompt_that_is_too_long_starts_none_of_the_batch(
    slow: Engine, stepped: SteppedBackend
) -> None:
    with pytest.raises(PromptTooLong):
        slow.stream([request((1,)), request((2,), "x" * 5000)])
    assert stepped.owners == []


def test_a_stack_of_another_base_is_refused(engine: Engine) -> None:
    with pytest.raises(BaseMismatch), engine.pin(Stack("another base", stack(1).entries)):
        pass


# Failures


def test_a_failing_step_ends_its_replies_and_serving_continues(
    slow: Engine, stepped: SteppedBackend, source: AdapterSource
) -> None:
    readers = start_together(slow, stepped, request((1,)), request((2,), user="bo"))
    stepped.broken.append(MemoryError("no memory left"))
    stepped.run()
    for reader in readers:
        error = reader.end().error
        assert isinstance(error, ServingFailed)
        assert isinstance(error.__cause__, MemoryError)
        assert error.hint
    assert text(slow, request((1,)))
    assert slow.metrics()["failures_total"] == 2
    assert slow.metrics()["num_requests_running"] == 0


def test_no_memory_to_clear_a_cache_ends_the_running_replies_and_serving_continues(
    source: AdapterSource,
) -> None:
    class Full(SteppedBackend):
        cleared = 0

        def clear_cache(self) -> None:
            # A copy of what a running reply reads takes memory.
            if self.occupancy().num_sequences:
                raise MemoryError("no memory left")
            self.cleared += 1
            super().clear_cache()

    full = Full()
    with engine_on(full, source) as engine:
        (reader,) = start_together(engine, full, request((1,)))
        clearing = in_thread(engine.clear_caches)
        full.run()
        assert isinstance(reader.end().error, ServingFailed)
        clearing.result(PATIENCE)
        assert full.cleared >= 1
        assert text(engine, request((1,)))


def test_a_row_refused_by_the_backend_fails_alone(source: AdapterSource) -> None:
    class Choosy(FakeBackend):
        def admit(self, row: SequenceState) -> int | None:
            if row.owner == "bo":
                raise ValueError("not this one")
            return None if row.owner == "cy" else super().admit(row)

    with engine_on(Choosy(BASE, slots=2), source) as engine:
        ada, bo = ask(engine, request((1,))), ask(engine, request((1,), user="bo"))
        assert isinstance(bo.end().error, ServingFailed)
        assert ada.finish == "stop"
        # A refusal by an empty batch is final.
        assert isinstance(ask(engine, request(user="cy")).end().error, ServingFailed)
        assert text(engine, request((1,)))


def test_a_failure_of_the_batching_loop_reaches_all_requests_and_later_ones(
    source: AdapterSource,
) -> None:
    class Doomed(SteppedBackend):
        def detach(self, key: str) -> None:
            super().detach(key)
            if len(self.detached) == 1:
                raise ZeroDivisionError("what no one thought of")

    stepped = Doomed(slots=1)
    with engine_on(stepped, source) as engine:
        preload(engine, stack(1))
        bare = ask(engine, request())
        wait_for_running(engine, 1)
        other = ask(engine, request((2,), user="bo"))
        wait_for_waiting(engine, 1)
        holder = in_thread(preload, engine, stack(3))
        stepped.run()
        for reader in (bare, other):
            assert isinstance(reader.end().error, ServingFailed)
        assert isinstance(holder.exception(PATIENCE), ServingFailed)
        with pytest.raises(ServingFailed) as refused:
            text(engine, request())
        assert isinstance(refused.value.__cause__, ZeroDivisionError)
        assert refused.value.hint


# Closing


def test_closing_cancels_open_replies(source: AdapterSource) -> None:
    stepped = SteppedBackend(rows=1)
    with engine_on(stepped, source) as engine:
        runs, waits = ask(engine, request((1,))), ask(engine, request((2,), user="bo"))
        stepped.go(2)
        wait_until(lambda: len(runs.pieces) == 2)
        wait_for_waiting(engine, 1)
        stepped.run()
        engine.close()
        assert (runs.finish, waits.finish) in (
            ("cancelled", "cancelled"),
            ("stop", "cancelled"),
            ("stop", "stop"),
        )
        engine.close()
        with pytest.raises(ServingFailed):
            text(engine, request())
        with pytest.raises(ServingFailed):
            preload(engine, stack(1))


def test_an_unused_engine_closes_at_once() -> None:
    before = set(threading.enumerate())
    with engine_on():
        pass
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("interrupted", ["personalpeft-loader", "personalpeft-serving"])
@pytest.mark.parametrize("runs", [True, False], ids=["which runs", "which never came to run"])
def test_ctrl_c_during_thread_start_leaves_no_waiting_caller(
    monkeypatch: pytest.MonkeyPatch, interrupted: str, runs: bool
) -> None:
    start = threading.Thread.start

    def pressed(thread: threading.Thread) -> None:
        if thread.name != interrupted:
            return start(thread)
        if runs:
            start(thread)
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with engine_on() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", pressed)
            with pytest.raises(KeyboardInterrupt):
                text(engine, request())
        with pytest.raises(ServingFailed):
            text(engine, request())
    assert set(threading.enumerate()) <= before


def test_a_partial_reply_is_never_returned_as_complete(source: AdapterSource) -> None:
    stepped = SteppedBackend()
    with engine_on(stepped, source) as engine:
        writer = in_thread(text, engine, request((1,)))
        wait_for_running(engine, 1)
        closer = in_thread(engine.close)
        wait_until(lambda: engine._ended is not None)
        stepped.go()
        assert isinstance(writer.exception(PATIENCE), Cancelled)
        closer.result(PATIENCE)


def test_closing_waits_for_a_running_load_and_drops_the_rest(source: AdapterSource) -> None:
    held = source.hold(1)
    with engine_on(read=source) as engine:
        readers = [ask(engine, request((n,), user=f"user-{n}")) for n in (1, 2)]
        source.started.get(timeout=PATIENCE)
        wait_for_waiting(engine, 2)
        closer = in_thread(engine.close)
        assert [reader.finish for reader in readers] == ["cancelled", "cancelled"]
        held.set()
        closer.result(PATIENCE)
    assert digest_of(1) in source.reads


def test_a_temporary_adapter_serves_under_its_own_digest_and_only_while_registered(
    engine: Engine, source: AdapterSource
) -> None:
    lent = adapter(77)
    with engine.temporary_adapter(lent) as digest:
        borrowed = Stack(BASE.digest, (StackEntry("skill.s", f"skill.s@{digest[:12]}", digest),))
        reply = engine.complete([replace(request(), stack=borrowed)])
        assert engine.read_adapter(digest) is lent
    assert reply != engine.complete([request()])
    assert digest not in source.reads
    with pytest.raises(KeyError):
        engine.read_adapter(digest)


# Background work


def test_background_work_yields_until_the_last_request_is_answered(
    slow: Engine, stepped: SteppedBackend
) -> None:
    reader = ask(slow, request((1,)))
    wait_for_running(slow, 1)
    waits = in_thread(slow.yield_to_foreground, PATIENCE)
    with pytest.raises(TimeoutError):
        waits.result(0.05)
    stepped.run()
    reader.end()
    waits.result(PATIENCE)


def test_background_work_yields_for_a_bounded_time_and_not_to_other_background_work(
    slow: Engine, stepped: SteppedBackend
) -> None:
    slow.yield_to_foreground(PATIENCE)
    working = ask(slow, request((1,), background=True))
    wait_for_running(slow, 1)
    slow.yield_to_foreground(PATIENCE)
    # Training for others yields to it, too, and as briefly.
    slow.yield_to_requests(0.01)
    talking = ask(slow, request((1,), user="bo"))
    wait_until(
        lambda: slow.metrics()["num_requests_waiting"] + slow.metrics()["num_requests_running"] == 2
    )
    slow.yield_to_foreground(0.01)
    stepped.run()
    slow.yield_to_requests(PATIENCE)
    assert working.text
    assert talking.text


def test_a_backend_without_bit_exact_replies_is_named_at_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Rounding(FakeBackend):
        batch_invariant = False

    caplog.set_level(logging.INFO)
    for backend, named in ((FakeBackend(fake_base()), False), (Rounding(fake_base()), True)):
        caplog.clear()
        Engine(backend, lambda digest: pytest.fail(digest)).close()
        assert ("batch invariance" in caplog.text) is named
