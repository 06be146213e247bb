"""What the engine promises: what is in use stays, what is not gives way, and what cannot be served is refused by name."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import numpy as np
import pytest

from personalpeft.adapters.base import Adapter, Manifest, Pair
from personalpeft.backends.base import Continuation
from personalpeft.backends.fake import FakeBackend, fake_base
from personalpeft.errors import BaseMismatch, Busy, PromptTooLong
from personalpeft.serving.engine import Engine, Request
from personalpeft.types import Message, Sampling, Stack, StackEntry

BASE = fake_base()


def digest_of(number: int) -> str:
    return hashlib.sha256(bytes([number])).hexdigest()


def adapter(number: int) -> Adapter:
    random = np.random.default_rng(number)
    pairs = {
        name: Pair(
            random.standard_normal((2, 2, inputs), dtype=np.float32),
            random.standard_normal((2, outputs, 2), dtype=np.float32),
        )
        for name, (inputs, outputs) in BASE.architecture.projections.items()
    }
    manifest = Manifest(BASE.digest, "style", 2, 1.0, tuple(sorted(pairs)), {}, "12" * 32)
    return Adapter(manifest, pairs)


def stack(*numbers: int, weight: float = 1.0) -> Stack:
    entries = tuple(StackEntry(f"skill.s{n}", f"skill.s{n}@{n}", digest_of(n), weight) for n in numbers)
    return Stack(BASE.digest, entries)


class Shelf:
    """Adapters by digest, and what was asked for."""

    def __init__(self) -> None:
        self.adapters = {digest_of(n): adapter(n) for n in range(10)}
        self.asked: list[str] = []

    def __call__(self, digest: str) -> Adapter:
        self.asked.append(digest)
        return self.adapters[digest]


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def engine(shelf: Shelf) -> Engine:
    return Engine(FakeBackend(BASE, slots=2), shelf)


def request(numbers: tuple[int, ...] = (), prompt: str = "hello", **sampling: object) -> Request:
    return Request((Message("user", prompt),), stack(*numbers), Sampling(**sampling))  # type: ignore[arg-type]


def test_requests_of_one_call_get_what_each_gets_alone(engine: Engine) -> None:
    requests = [request(), request((1,)), request((1, 2)), request((1,), "bye")]
    assert engine.texts(requests) == [engine.texts([each])[0] for each in requests]
    assert len(set(engine.texts(requests))) == 4
    assert engine.texts([]) == []


def test_the_order_and_the_weights_of_a_stack_tell_it_apart() -> None:
    stacks = [stack(1, 2), stack(2, 1), stack(1), stack(1, weight=0.5), Stack("another base", stack(1).entries)]
    assert len({each.digest for each in stacks}) == len(stacks)


def test_layers_of_weight_0_are_not_attached(engine: Engine, shelf: Shelf) -> None:
    with engine.resident(stack(1, weight=0.0)) as key:
        assert key is None
    assert shelf.asked == []


def test_a_stack_is_read_once_while_it_stays_resident_and_again_after_it_had_to_leave(
    engine: Engine, shelf: Shelf
) -> None:
    for numbers in ((1,), (1,), (2,), (1,), (3,), (1,), (2,)):
        engine.texts([request(numbers)])
    # 3 takes the place of 2, which was not used for the longest time; then 2 that of 3.
    assert shelf.asked == [digest_of(n) for n in (1, 2, 3, 2)]


def test_what_is_being_answered_keeps_its_slot_and_a_third_stack_hears_busy(engine: Engine) -> None:
    whole = engine.texts([request((1,)), request((2,))])
    one, two = engine.replies([request((1,))]), engine.replies([request((2,))])
    heard = [next(one).text, next(two).text]
    with pytest.raises(Busy, match="2 slots") as busy:
        engine.texts([request((3,))])
    assert busy.value.hint
    engine.texts([request(), request((1,))])
    heard[0] += "".join(piece.text for piece in one)
    assert engine.texts([request((3,))])
    heard[1] += "".join(piece.text for piece in two)
    assert heard == whole


@pytest.mark.parametrize("ended", [lambda replies: list(replies), lambda replies: replies.close()])
def test_a_reply_that_ended_or_was_closed_gives_its_slot_free(
    engine: Engine, ended: Callable[[object], object]
) -> None:
    for numbers in ((1,), (2,)):
        replies = engine.replies([request(numbers)])
        next(iter(replies))
        ended(replies)
    assert engine.texts([request((3,)), request((4,))])


def test_a_batch_of_more_stacks_than_slots_is_refused_whole_and_holds_nothing(engine: Engine) -> None:
    with pytest.raises(Busy):
        engine.texts([request((n,)) for n in (1, 2, 3)])
    assert engine.texts([request((4,)), request((5,))])


def test_an_adapter_that_cannot_be_read_takes_no_slot(engine: Engine, shelf: Shelf) -> None:
    engine.texts([request((1,)), request((2,))])
    missing = shelf.adapters.pop(digest_of(3))
    for _ in range(3):
        with pytest.raises(KeyError):
            engine.texts([request((3,))])
    shelf.adapters[digest_of(3)] = missing
    assert engine.texts([request((3,)), request((4,))])


def test_a_prompt_that_does_not_fit_is_told_by_how_much(engine: Engine) -> None:
    room = BASE.card.context - 100
    overhead = len(engine.tokens(request(prompt="x", max_tokens=100))) - 1
    assert len(engine.tokens(request(prompt="x" * (room - overhead), max_tokens=100))) == room
    with pytest.raises(
        PromptTooLong, match=rf"has {room + 7} tokens; with 100 for the reply that is 7 more than the 4096"
    ) as long:
        engine.tokens(request(prompt="x" * (room - overhead + 7), max_tokens=100))
    assert long.value.hint == f"Shorten the prompt to {room} tokens, or ask for a shorter reply."
    with pytest.raises(PromptTooLong) as hopeless:
        engine.tokens(request(max_tokens=10**9))
    assert hopeless.value.hint == "Ask for a shorter reply."


def test_one_prompt_that_does_not_fit_starts_none_of_the_batch(engine: Engine) -> None:
    replies = engine.replies([request((1,)), request((2,), "x" * 5000)])
    with pytest.raises(PromptTooLong):
        next(iter(replies))
    assert engine.texts([request((3,)), request((4,))])


def test_a_stack_of_another_base_is_refused(engine: Engine) -> None:
    with pytest.raises(BaseMismatch), engine.resident(Stack("another base", stack(1).entries)):
        pass


def test_scores_are_those_of_the_stack_that_is_named(engine: Engine) -> None:
    item = Continuation((1, 2), (3,))
    scores = {engine.score([item], stack(*numbers))[0].logp for numbers in ((), (1,), (2,), (1, 2))}
    assert len(scores) == 4
    assert engine.score([], stack(1)) == ()


def test_many_threads_share_few_slots_and_each_hears_its_own_stack(engine: Engine) -> None:
    alone = {n: engine.texts([request((n,))])[0] for n in range(6)}
    wrong: list[str] = []

    def ask(number: int) -> None:
        for _ in range(20):
            try:
                heard = engine.texts([request((number,))])[0]
            except Busy:
                continue
            if heard != alone[number]:
                wrong.append(heard)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
