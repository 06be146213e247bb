"""Engines on the fake backend whose steps, reads and time a test holds in its hands."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np

from personalpeft.adapters.types import Adapter, LoRAWeights, Manifest
from personalpeft.backends.base import OutputChunk, SequenceState
from personalpeft.backends.fake import FakeBackend, fake_base
from personalpeft.base_models.types import Base
from personalpeft.clock import Clock
from personalpeft.engine.engine import Engine, Request
from personalpeft.engine.request import OutputStream
from personalpeft.settings import Serving
from personalpeft.types import Message, Sampling, Stack, StackEntry

BASE = fake_base()
# Longer than anything here takes; what would wait for ever fails instead.
PATIENCE = 20.0


def digest_of(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


def adapter(number: int, base: Base = BASE) -> Adapter:
    random = np.random.default_rng(number)
    blocks = base.architecture.blocks
    pairs = {
        name: LoRAWeights(
            random.standard_normal((blocks, 2, inputs), dtype=np.float32) * np.float32(0.5),
            random.standard_normal((blocks, outputs, 2), dtype=np.float32) * np.float32(0.5),
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


class Shelf:
    """Adapters by digest, and what was asked for. A digest in ``held`` is not handed out before its event is set."""

    def __init__(self, base: Base = BASE) -> None:
        self.adapters = {digest_of(n): adapter(n, base) for n in range(12)}
        self.asked: list[str] = []
        self.reading: SimpleQueue[str] = SimpleQueue()
        self.held: dict[str, threading.Event] = {}

    def __call__(self, digest: str) -> Adapter:
        self.asked.append(digest)
        self.reading.put(digest)
        if digest in self.held:
            assert self.held[digest].wait(PATIENCE)
        return self.adapters[digest]

    def hold(self, number: int) -> threading.Event:
        return self.held.setdefault(digest_of(number), threading.Event())


class Stepped(FakeBackend):
    """Makes a step only when it may, and remembers who came and who left."""

    def __init__(self, *, slots: int = 2, rows: int = 4) -> None:
        super().__init__(BASE, slots=slots, rows=rows)
        self._may = threading.Semaphore(0)
        self._free = False
        self.entered: SimpleQueue[None] = SimpleQueue()
        self.left: SimpleQueue[int] = SimpleQueue()
        self.owners: list[str] = []
        self.detached: list[str] = []
        self.broken: list[Exception] = []
        self.steps = 0

    def go(self, steps: int = 1) -> None:
        """Allows so many more steps."""
        self._may.release(steps)

    def run(self) -> None:
        """Allows all steps from now on."""
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


class Time:
    """A timer that stands still until it is told."""

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
    engine = Engine(backend, read or Shelf(), Serving(**serving), clock or Clock())
    try:
        yield engine
    finally:
        if isinstance(backend, Stepped):
            backend.run()
        engine.close()
        assert backend.occupancy().num_sequences == 0
        assert not backend._attached
        engine.check_integrity()


class Reader:
    """Reads a call to its end in a thread of its own."""

    def __init__(self, replies: OutputStream, count: int = 1) -> None:
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

    def end(self) -> Reader:
        """Waits for the end."""
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


def ask(engine: Engine, *requests: Request, **more: Any) -> Reader:
    return Reader(engine.stream(requests, **more))


def together(engine: Engine, stepped: Stepped, *requests: Request) -> list[Reader]:
    """Readers whose rows begin in one step: all wait, their stacks there, until a row of nobody's has had its step."""
    for each in requests:
        engine.preload(each.stack)
    nobody = ask(engine, request(user="nobody", max_tokens=1))
    running(engine, 1)
    readers = [ask(engine, each) for each in requests]
    waiting(engine, len(requests))
    stepped.go()
    assert nobody.text
    running(engine, len(requests))
    stepped.owners.remove("nobody")
    return readers


def text(engine: Engine, asked: Request) -> str:
    return engine.complete([asked])[0]


def wait_until(happened: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.002)):
        if happened():
            return
        pause.wait(0.002)
    raise AssertionError("it did not happen")


def waiting(engine: Engine, count: int) -> None:
    """Returns when so many requests wait for a row."""
    wait_until(lambda: engine.metrics()["num_requests_waiting"] == count)


def running(engine: Engine, count: int) -> None:
    """Returns when so many rows are in the batch."""
    wait_until(lambda: engine.metrics()["num_requests_running"] == count)
