"""Engines on the fake backend whose steps, adapter reads and clock a test controls."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np

from personalpeft.adapters.types import Adapter, LoRAWeights, Manifest
from personalpeft.backends.fake import FakeBackend, fake_base
from personalpeft.backends.sequence import OutputChunk, SequenceState
from personalpeft.base_models.types import Base
from personalpeft.clock import Clock
from personalpeft.engine.engine import Engine, Request
from personalpeft.engine.request import OutputStream
from personalpeft.settings import Serving
from personalpeft.types import Message, Sampling, Stack, StackEntry

BASE = fake_base()
# Longer than any step takes here; a test that would hang fails instead.
PATIENCE = 20.0


def digest_of(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


def adapter(number: int, base: Base = BASE, size: float = 0.5) -> Adapter:
    """Return a random adapter. ``size`` is the standard deviation of its weights."""
    random = np.random.default_rng(number)
    blocks = base.architecture.blocks
    pairs = {
        name: LoRAWeights(
            random.standard_normal((blocks, 2, inputs), dtype=np.float32) * np.float32(size),
            random.standard_normal((blocks, outputs, 2), dtype=np.float32) * np.float32(size),
        )
        for name, (inputs, outputs) in base.architecture.projections.items()
    }
    return Adapter(
        Manifest(base.digest, "style", 2, 1.0, tuple(sorted(pairs)), {}, "12" * 32), pairs
    )


def stack(*numbers: int, weight: float = 1.0, base: Base = BASE) -> Stack:
    entries = tuple(
        StackEntry(f"skill.s{n}", f"skill.s{n}@{n}", digest_of(n), weight) for n in numbers
    )
    return Stack(base.digest, entries)


def request(
    numbers: tuple[int, ...] = (),
    prompt: str = "hello",
    *,
    user: str = "ada",
    timeout: float | None = None,
    background: bool = False,
    base: Base = BASE,
    **sampling: Any,
) -> Request:
    messages = (Message("user", prompt),)
    return Request(
        user, messages, stack(*numbers, base=base), Sampling(**sampling), timeout, background
    )


class AdapterSource:
    """Loads adapters by digest and records the reads.

    A read of a digest in ``held`` blocks until its event is set.
    """

    def __init__(self, base: Base = BASE, size: float = 0.5) -> None:
        self.adapters = {digest_of(n): adapter(n, base, size) for n in range(12)}
        self.reads: list[str] = []
        self.started: SimpleQueue[str] = SimpleQueue()
        self.held: dict[str, threading.Event] = {}

    def __call__(self, digest: str) -> Adapter:
        self.reads.append(digest)
        self.started.put(digest)
        if digest in self.held:
            assert self.held[digest].wait(PATIENCE)
        return self.adapters[digest]

    def hold(self, number: int) -> threading.Event:
        return self.held.setdefault(digest_of(number), threading.Event())


class SteppedBackend(FakeBackend):
    """Makes a step only when allowed, and records which rows are added and removed."""

    def __init__(self, *, slots: int = 2, rows: int = 4) -> None:
        super().__init__(BASE, slots=slots, rows=rows)
        self.hold()
        self._free = False
        self.entered: SimpleQueue[None] = SimpleQueue()
        self.left: SimpleQueue[int] = SimpleQueue()
        self.owners: list[str] = []
        self.detached: list[str] = []
        self.broken: list[Exception] = []
        self.steps = 0

    def go(self, steps: int = 1) -> None:
        """Allow ``steps`` more steps."""
        self._may.release(steps)

    def hold(self) -> None:
        """Allow no more steps."""
        self._may = threading.Semaphore(0)

    def run(self) -> None:
        """Allow all further steps."""
        self._free = True
        self._may.release()

    def admit(self, row: SequenceState) -> int | None:
        number = super().admit(row)
        if number is not None:
            self.owners.append(row.owner)
        return number

    def step(self) -> Sequence[OutputChunk]:
        self.entered.put(None)
        if not self._free:
            assert self._may.acquire(timeout=PATIENCE)
        self.steps += 1
        if self.broken:
            raise self.broken.pop()
        return super().step()

    def remove(self, number: int) -> None:
        super().remove(number)
        self.left.put(number)

    def detach(self, key: str) -> None:
        self.detached.append(key)
        super().detach(key)


class ManualClock:
    """A timer that advances only when a test sets it."""

    def __init__(self) -> None:
        self.at = 0.0

    def clock(self) -> Clock:
        return Clock(timer=lambda: self.at)


@contextmanager
def engine_on(
    backend: FakeBackend | None = None,
    read: Callable[[str], Adapter] | None = None,
    *,
    clock: Clock | None = None,
    **serving: Any,
) -> Iterator[Engine]:
    backend = backend or FakeBackend(BASE, slots=2, rows=4)
    engine = Engine(backend, read or AdapterSource(), Serving(**serving), clock or Clock())
    try:
        yield engine
    finally:
        if isinstance(backend, SteppedBackend):
            backend.run()
        engine.close()
        assert backend.occupancy().num_sequences == 0
        engine.check_integrity()


class StreamReader:
    """Reads a stream to its end in a thread of its own."""

    def __init__(self, replies: OutputStream) -> None:
        self.pieces: list[OutputChunk] = []
        self.error: Exception | None = None
        self._replies = replies
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for piece in self._replies:
                self.pieces.append(piece)
        except Exception as error:  # noqa: BLE001
            self.error = error

    def end(self) -> StreamReader:
        """Wait for the end of the stream."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "a reader hangs"
        return self

    @property
    def text(self) -> str:
        self.end()
        if self.error:
            raise self.error
        return "".join(piece.text for piece in self.pieces)

    @property
    def finish(self) -> str | None:
        return self.end().pieces[-1].finish


def preload(engine: Engine, stack: Stack) -> None:
    """Load a stack into a slot and leave it there."""
    with engine.pin(stack):
        pass


def ask(engine: Engine, *requests: Request, **more: Any) -> StreamReader:
    return StreamReader(engine.stream(requests, **more))


def start_together(
    engine: Engine, stepped: SteppedBackend, *requests: Request
) -> list[StreamReader]:
    """Start requests whose rows are all admitted in one step.

    They wait with their stacks loaded until the row of another user has made its step.
    """
    for each in requests:
        preload(engine, each.stack)
    other = ask(engine, request(user="nobody", max_tokens=1))
    wait_for_running(engine, 1)
    readers = [ask(engine, each) for each in requests]
    wait_for_waiting(engine, len(requests))
    stepped.go()
    assert other.text
    wait_for_running(engine, len(requests))
    stepped.owners.remove("nobody")
    return readers


def text(engine: Engine, query: Request) -> str:
    return engine.complete([query])[0]


def wait_until(happened: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.002)):
        if happened():
            return
        pause.wait(0.002)
    raise AssertionError("it did not happen")


def wait_for_waiting(engine: Engine, count: int) -> None:
    """Wait until ``count`` requests are queued."""
    wait_until(lambda: engine.metrics()["num_requests_waiting"] == count)


def wait_for_running(engine: Engine, count: int) -> None:
    """Wait until ``count`` rows are in the batch."""
    wait_until(lambda: engine.metrics()["num_requests_running"] == count)
