"""A step of the batch waits for a part of a training pass, and changes no bit of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest
from backend_makers import (
    attach,
    bits,
    bytes_of,
    generate,
    in_thread,
    random_stack,
    row,
    session_spec,
    train,
    training_steps,
)

from personalpeft.backends.base import Backend
from personalpeft.backends.torch.device_lock import DeviceLock


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_pass_that_gives_way_goes_on_after_one_step() -> None:
    lock, order = DeviceLock(), []

    def step(name: str) -> None:
        with lock.for_step():
            order.append(name)
            # The other step waits before this one ends.
            time.sleep(0.05)

    with lock.for_pass():
        threads = [in_thread(lambda name=name: step(name)) for name in ("one", "two")]
        until(lambda: len(lock._turns) == 3)
        for _ in range(3):
            if lock.is_wanted():
                lock.give_way()
            order.append("part")
    for thread in threads:
        thread.result(10)
    steps = [name for name in order if name != "part"]
    assert sorted(steps) == ["one", "two"]
    assert order == [steps[0], "part", steps[1], "part", "part"]


def test_no_pass_begins_while_another_gives_way() -> None:
    lock, began = DeviceLock(), threading.Event()

    def other() -> None:
        with lock.for_pass():
            began.set()

    def step() -> None:
        with lock.for_step():
            assert not began.wait(0.05)

    with lock.for_pass():
        threads = [in_thread(other), in_thread(step)]
        until(lock.is_wanted)
        lock.give_way()
        assert not began.is_set()
    for thread in threads:
        thread.result(10)
    assert began.is_set()


def test_only_the_thread_of_a_pass_is_asked_to_give_way() -> None:
    lock, seen = DeviceLock(), []

    def step() -> None:
        with lock.for_step():
            seen.append(lock.is_wanted())

    with lock.for_pass():
        thread = in_thread(step)
        until(lock.is_wanted)
    thread.result(10)
    assert seen == [False]
    assert not lock.is_wanted()


def test_steps_amid_passes_change_no_bit_of_either(torch_tiny: Backend) -> None:
    def reply() -> tuple[tuple[int, ...], bytes]:
        sequence = row(torch_tiny, "hello", "two", logprobs=True, temperature=1.0)
        (output,) = generate(torch_tiny, [sequence])
        return bits(output)

    for seed, key in enumerate(("one", "two")):
        attach(torch_tiny, key, random_stack(torch_tiny, seed))
    steps, expected = training_steps(torch_tiny, 6), reply()
    quiet = torch_tiny.session(session_spec(torch_tiny, base_key="one"))
    train(quiet, steps)
    done, replies = threading.Event(), []

    def serve() -> None:
        while not done.is_set():
            replies.append(reply())

    thread = in_thread(serve)
    session = torch_tiny.session(session_spec(torch_tiny, base_key="one"))
    train(session, steps)
    done.set()
    thread.result(20)
    assert bytes_of(session) == bytes_of(quiet)
    assert set(replies) == {expected}


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals to threads are POSIX")
def test_a_pass_that_is_interrupted_while_it_gives_way_releases_the_device() -> None:
    lock, released = DeviceLock(), threading.Event()
    main = threading.main_thread().ident

    def step() -> None:
        with lock.for_step():
            signal.pthread_kill(main or 0, signal.SIGINT)
            time.sleep(0.05)
            assert not released.is_set()

    thread = threading.Thread(target=step, daemon=True)

    def compute() -> None:
        with lock.for_pass():
            thread.start()
            until(lock.is_wanted)
            lock.give_way()

    # A program that a shell started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            compute()
    finally:
        signal.signal(signal.SIGINT, before)
    released.set()
    thread.join(10)
    with lock.for_step():
        pass
    with lock.for_pass():
        assert not lock.is_wanted()
