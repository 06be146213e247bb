"""What the engine promises of replies: each hears its own stack, whoever else is there, comes, goes or fails."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from serving_makers import (
    BASE,
    PATIENCE,
    Reader,
    Shelf,
    Stepped,
    Time,
    adapter,
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

from personalpeft.backends.base import Continuation, SequenceState
from personalpeft.backends.batch_invariance import BatchInvariance
from personalpeft.backends.fake import FakeBackend, fake_base
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
def engine(shelf: Shelf) -> Iterator[Engine]:
    with engine_on(read=shelf) as engine:
        yield engine


@pytest.fixture
def stepped() -> Stepped:
    return Stepped()


@pytest.fixture
def slow(stepped: Stepped, shelf: Shelf) -> Iterator[Engine]:
    """An engine whose steps the test allows one by one."""
    with engine_on(stepped, shelf) as engine:
        yield engine


# Rows and stacks


def test_requests_of_one_call_get_what_each_gets_alone(engine: Engine) -> None:
    requests = [request(), request((1,)), request((1, 2)), request((1,), "bye")]
    assert engine.complete(requests) == [text(engine, each) for each in requests]
    assert len(set(engine.complete(requests))) == 4
    assert engine.complete([]) == []


def test_a_call_may_have_more_rows_than_the_batch_and_more_stacks_than_slots(
    engine: Engine,
) -> None:
    requests = [request((n % 7,), f"prompt {n}") for n in range(30)]
    assert engine.complete(requests) == [text(engine, each) for each in requests]


def test_a_prompt_is_rendered_once_from_the_request_to_its_reply(
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


def test_the_order_and_the_weights_of_a_stack_tell_it_apart() -> None:
    stacks = [
        stack(1, 2),
        stack(2, 1),
        stack(1),
        stack(1, weight=0.5),
        Stack("another base", stack(1).entries),
    ]
    assert len({each.digest for each in stacks}) == len(stacks)


def test_layers_of_weight_0_are_not_attached(engine: Engine, shelf: Shelf) -> None:
    with engine.pin(stack(1, weight=0.0)) as key:
        assert key is None
    assert shelf.asked == []


def test_a_row_is_owned_by_the_user_who_asked(slow: Engine, stepped: Stepped) -> None:
    stepped.run()
    for user in ("ada", "bo"):
        text(slow, request((1,), user=user))
    assert stepped.owners == ["ada", "bo"]


def test_scores_are_those_of_the_stack_that_is_named(engine: Engine) -> None:
    item = Continuation((1, 2), (3,))
    scores = {engine.score([item], stack(*numbers))[0].logp for numbers in ((), (1,), (2,), (1, 2))}
    assert len(scores) == 4
    assert engine.score([], stack(1)) == ()


def test_many_threads_share_few_slots_and_each_hears_its_own_stack(engine: Engine) -> None:
    alone = {n: text(engine, request((n,))) for n in range(6)}
    wrong: list[object] = []

    def talk(number: int) -> None:
        for turn in range(20):
            if turn % 5 == 4:
                engine.score([Continuation((1,), (2,))], stack(number))
            heard = text(engine, request((number,), user=f"user-{number}"))
            if heard != alone[number]:
                wrong.append(heard)

    threads = [threading.Thread(target=talk, args=(n,), daemon=True) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert wrong == []


# Joining and leaving


def test_a_request_joins_between_two_steps_of_another(slow: Engine, stepped: Stepped) -> None:
    with engine_on() as alone:
        whole = [text(alone, request((n,))) for n in (1, 2)]
    first = slow.stream([request((1,))])
    stepped.go()
    heard = [next(first).text]
    second = ask(slow, request((2,), user="bo"))
    running(slow, 1)
    wait_until(
        lambda: slow.metrics()["num_requests_waiting"] + slow.metrics()["num_requests_running"] == 2
    )
    stepped.run()
    heard += [piece.text for piece in first]
    assert ["".join(heard), second.text] == whole


def test_a_slow_reader_holds_up_nobody(slow: Engine, stepped: Stepped) -> None:
    idle = slow.stream([request((1,))])
    stepped.run()
    begun = next(idle).text
    others = [text(slow, request((2,), f"prompt {n}")) for n in range(5)]
    assert all(others)
    assert begun + "".join(piece.text for piece in idle) == text(slow, request((1,)))


@pytest.mark.parametrize("went", ["closed", "asked", "forgotten"])
def test_a_client_that_goes_away_frees_its_row_within_a_step(
    slow: Engine, stepped: Stepped, went: str
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
    running(slow, 0)
    assert slow.metrics()["cancellations_total"] == 1
    if went == "asked":
        assert list(replies)[-1].finish == "cancelled"
    if went == "closed":
        assert list(replies) == []


def test_a_reply_may_be_closed_by_another_thread_than_its_readers(slow: Engine) -> None:
    replies = slow.stream([request((1,))])
    reader = Reader(replies)
    running(slow, 1)
    replies.close()
    slow.backend.go()  # type: ignore[attr-defined]
    assert reader.finish in (None, "cancelled")


def test_a_reply_that_nobody_reads_asks_for_nothing(
    slow: Engine, stepped: Stepped, shelf: Shelf
) -> None:
    replies = slow.stream([request((1,))])
    replies.close()
    assert list(replies) == []
    assert (shelf.asked, stepped.owners) == ([], [])


def test_what_waits_can_be_cancelled_too(slow: Engine, stepped: Stepped, shelf: Shelf) -> None:
    rows = together(slow, stepped, *(request((1,), f"prompt {n}") for n in range(4)))
    gone = threading.Event()
    late = ask(slow, request((1,)), cancelled=gone.is_set)
    waiting(slow, 1)
    gone.set()
    stepped.go()
    assert [(piece.text, piece.finish) for piece in late.end().pieces] == [("", "cancelled")]
    stepped.run()
    assert all(row.finish == "stop" for row in rows)
    assert len(stepped.owners) == 4


def test_what_waits_for_a_stack_that_never_comes_can_be_cancelled(
    engine: Engine, shelf: Shelf
) -> None:
    held = shelf.hold(3)
    gone = threading.Event()
    late = ask(engine, request((3,)), cancelled=gone.is_set)
    shelf.reading.get(timeout=PATIENCE)
    gone.set()
    assert late.finish == "cancelled"
    held.set()


def test_a_question_that_raises_ends_its_own_call_and_no_other(
    slow: Engine, stepped: Stepped
) -> None:
    def broken() -> bool:
        raise ZeroDivisionError

    fine, bad = ask(slow, request((1,))), ask(slow, request((1,), user="bo"), cancelled=broken)
    stepped.run()
    assert isinstance(bad.end().error, ZeroDivisionError)
    assert fine.finish == "stop"


def test_texts_of_a_batch_that_was_cancelled_hold_what_there_was(engine: Engine) -> None:
    assert engine.complete([request((1,)), request()], cancelled=lambda: True) == ["", ""]


# Deadlines


def test_a_reply_that_takes_too_long_ends_with_what_came_and_an_error(shelf: Shelf) -> None:
    stepped, time = Stepped(), Time()
    with engine_on(stepped, shelf, clock=time.clock()) as engine:
        asked = request((1,), timeout=5), request((1,), user="bo", timeout=100)
        reply, other = together(engine, stepped, *asked)
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


def test_a_request_that_waits_too_long_never_begins(shelf: Shelf) -> None:
    stepped, time = Stepped(rows=1), Time()
    with engine_on(stepped, shelf, clock=time.clock()) as engine:
        first = ask(engine, request((1,)))
        running(engine, 1)
        late = ask(engine, request((1,), user="bo", timeout=2))
        waiting(engine, 1)
        time.at = 2.0
        stepped.go()
        error = late.end().error
        assert isinstance(error, DeadlineExceeded)
        assert "2 s" in error.message
        assert late.pieces == []
        stepped.run()
        assert first.finish == "stop"
        assert stepped.owners == ["ada"]


def test_a_deadline_comes_while_the_stack_is_loading(shelf: Shelf) -> None:
    time = Time()
    held = shelf.hold(3)
    with engine_on(read=shelf, clock=time.clock()) as engine:
        late = ask(engine, request((3,), timeout=2))
        shelf.reading.get(timeout=PATIENCE)
        time.at = 2.0
        assert isinstance(late.end().error, DeadlineExceeded)
        held.set()


# What cannot be served


def test_a_prompt_that_does_not_fit_is_told_by_how_much(engine: Engine) -> None:
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


def test_what_the_backend_has_no_room_for_is_too_long_as_well() -> None:
    backend = FakeBackend(BASE)
    backend.max_length = 300
    with engine_on(backend) as engine, pytest.raises(PromptTooLong, match="300"):
        engine.tokenize(request(prompt="x" * 200, max_tokens=100))


def test_a_text_that_is_continued_begins_as_texts_of_the_base_do(engine: Engine) -> None:
    engine.backend.bos_tokens = (1,)  # type: ignore[misc]  # a base that has one
    chat = request(prompt="x")
    assert engine.tokenize(replace(chat, template=False)) == (1, ord("x"))
    assert engine.tokenize(chat)[0] != 1


def test_one_prompt_that_does_not_fit_starts_none_of_the_batch(
    slow: Engine, stepped: Stepped
) -> None:
    with pytest.raises(PromptTooLong):
        slow.stream([request((1,)), request((2,), "x" * 5000)])
    assert stepped.owners == []


def test_a_stack_of_another_base_is_refused(engine: Engine) -> None:
    with pytest.raises(BaseMismatch), engine.pin(Stack("another base", stack(1).entries)):
        pass


# Failures


def test_a_step_that_fails_ends_the_replies_in_it_and_serving_goes_on(
    slow: Engine, stepped: Stepped, shelf: Shelf
) -> None:
    readers = together(slow, stepped, request((1,)), request((2,), user="bo"))
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


def test_a_row_that_the_backend_does_not_take_fails_alone(shelf: Shelf) -> None:
    class Choosy(FakeBackend):
        def admit(self, row: SequenceState) -> int | None:
            if row.owner == "bo":
                raise ValueError("not this one")
            return None if row.owner == "cy" else super().admit(row)

    with engine_on(Choosy(BASE, slots=2), shelf) as engine:
        ada, bo = ask(engine, request((1,))), ask(engine, request((1,), user="bo"))
        assert isinstance(bo.end().error, ServingFailed)
        assert ada.finish == "stop"
        # No room in an empty batch will never change.
        assert isinstance(ask(engine, request(user="cy")).end().error, ServingFailed)
        assert text(engine, request((1,)))


def test_when_the_loop_itself_fails_everybody_hears_of_it_and_later_requests_too(
    shelf: Shelf,
) -> None:
    class Doomed(Stepped):
        def detach(self, key: str) -> None:
            super().detach(key)
            if len(self.detached) == 1:
                raise ZeroDivisionError("what no one thought of")

    stepped = Doomed(slots=1)
    with engine_on(stepped, shelf) as engine:
        engine.preload(stack(1))
        bare = ask(engine, request())
        running(engine, 1)
        other = ask(engine, request((2,), user="bo"))
        waiting(engine, 1)
        held: list[BaseException] = []

        def hold() -> None:
            try:
                engine.preload(stack(3))
            except ServingFailed as error:
                held.append(error)

        holder = threading.Thread(target=hold, daemon=True)
        holder.start()
        stepped.run()
        for reader in (bare, other):
            assert isinstance(reader.end().error, ServingFailed)
        holder.join(PATIENCE)
        assert held
        with pytest.raises(ServingFailed) as refused:
            text(engine, request())
        assert isinstance(refused.value.__cause__, ZeroDivisionError)
        assert refused.value.hint


# Closing


def test_closing_ends_open_replies_as_cancelled(shelf: Shelf) -> None:
    stepped = Stepped(rows=1)
    with engine_on(stepped, shelf) as engine:
        runs, waits = ask(engine, request((1,))), ask(engine, request((2,), user="bo"))
        stepped.go(2)
        wait_until(lambda: len(runs.pieces) == 2)
        waiting(engine, 1)
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
            engine.preload(stack(1))


def test_an_engine_that_was_never_asked_closes_at_once() -> None:
    before = set(threading.enumerate())
    with engine_on():
        pass
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("interrupted", ["personalpeft-loader", "personalpeft-serving"])
@pytest.mark.parametrize("runs", [True, False], ids=["which runs", "which never came to run"])
def test_ctrl_c_while_a_thread_begins_leaves_nobody_waiting(
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


def test_half_a_reply_never_passes_for_a_whole_one(shelf: Shelf) -> None:
    stepped = Stepped()
    with engine_on(stepped, shelf) as engine:
        failed: list[Exception] = []

        def write() -> None:
            try:
                text(engine, request((1,)))
            except Cancelled as error:
                failed.append(error)

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        running(engine, 1)
        closer = threading.Thread(target=engine.close, daemon=True)
        closer.start()
        wait_until(lambda: engine._core._ended is not None)
        stepped.go()
        writer.join(PATIENCE)
        closer.join(PATIENCE)
        assert failed
        assert not closer.is_alive()


def test_closing_waits_for_a_load_that_is_under_way_and_drops_the_rest(shelf: Shelf) -> None:
    held = shelf.hold(1)
    with engine_on(read=shelf) as engine:
        readers = [ask(engine, request((n,), user=f"user-{n}")) for n in (1, 2)]
        shelf.reading.get(timeout=PATIENCE)
        waiting(engine, 2)
        closer = threading.Thread(target=engine.close, daemon=True)
        closer.start()
        assert [reader.finish for reader in readers] == ["cancelled", "cancelled"]
        held.set()
        closer.join(PATIENCE)
        assert not closer.is_alive()
    assert digest_of(1) in shelf.asked


def test_what_is_lent_answers_under_the_digest_of_its_own_bytes_and_is_known_no_longer_than_it_is_lent(
    engine: Engine, shelf: Shelf
) -> None:
    lent = adapter(77)
    with engine.temporary_adapter(lent) as digest:
        borrowed = Stack(BASE.digest, (StackEntry("skill.s", f"skill.s@{digest[:12]}", digest),))
        said = engine.complete([replace(request(), stack=borrowed)])
        assert engine.read_adapter(digest) is lent
    assert said != engine.complete([request()])
    assert digest not in shelf.asked
    with pytest.raises(KeyError):
        engine.read_adapter(digest)


# Work beside replies


def test_who_gives_way_goes_on_when_the_last_person_is_answered_and_not_before(
    slow: Engine, stepped: Stepped
) -> None:
    reader, gone_on = ask(slow, request((1,))), threading.Event()
    running(slow, 1)

    def give_way() -> None:
        slow.yield_to_foreground(PATIENCE)
        gone_on.set()

    waits = threading.Thread(target=give_way)
    waits.start()
    assert not gone_on.wait(0.05)
    stepped.run()
    reader.end()
    assert gone_on.wait(PATIENCE)
    waits.join()


def test_who_gives_way_does_not_do_so_for_ever_nor_for_background_work(
    slow: Engine, stepped: Stepped
) -> None:
    slow.yield_to_foreground(PATIENCE)
    working = ask(slow, request((1,), background=True))
    running(slow, 1)
    slow.yield_to_foreground(PATIENCE)
    talking = ask(slow, request((1,), user="bo"))
    wait_until(
        lambda: slow.metrics()["num_requests_waiting"] + slow.metrics()["num_requests_running"] == 2
    )
    slow.yield_to_foreground(0.01)
    stepped.run()
    assert working.text
    assert talking.text


def test_a_backend_that_cannot_repeat_a_reply_to_the_bit_is_named_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Rounding(FakeBackend):
        batch_invariance = BatchInvariance.NONE

    caplog.set_level(logging.INFO)
    for backend, named in ((FakeBackend(fake_base()), False), (Rounding(fake_base()), True)):
        caplog.clear()
        Engine(backend, lambda digest: pytest.fail(digest)).close()
        assert ("batch invariance" in caplog.text) is named
