"""When key-value blocks run out the youngest row is preempted, and replies keep their bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from example_counts import examples
from hypothesis import example, given
from hypothesis import strategies as st
from serving_makers import (
    BASE,
    AdapterSource,
    SteppedBackend,
    ask,
    engine_on,
    preload,
    request,
    stack,
    start_together,
    wait_for_running,
    wait_for_waiting,
    wait_until,
)

from personalpeft.backends.base import OutOfBlocks
from personalpeft.backends.fake import FakeBackend
from personalpeft.backends.sequence import OutputChunk, SequenceState
from personalpeft.base_models.types import Base
from personalpeft.engine.engine import Engine, Request
from personalpeft.engine.request import RequestStatus
from personalpeft.errors import PromptTooLong
from personalpeft.settings import Serving


class LimitedBackend(FakeBackend):
    """Has room for a fixed number of tokens of all rows, and records preempted rows."""

    def __init__(self, tokens: int, *, slots: int = 2, rows: int = 4) -> None:
        super().__init__(BASE, slots=slots, rows=rows)
        self.tokens = self.max_length = tokens
        self.removed: list[str] = []

    def admit(self, row: SequenceState) -> int | None:
        return None if self._tokens() + len(row.token_ids) > self.tokens else super().admit(row)

    def step(self) -> Sequence[OutputChunk]:
        if self._tokens() + len(self._running) > self.tokens and len(self._running) > 1:
            raise OutOfBlocks
        return super().step()

    def remove(self, number: int) -> None:
        if number in self._running:
            self.removed.append(self._running[number].state.owner)
        super().remove(number)

    def _tokens(self) -> int:
        return sum(len(live.state.token_ids) for live in self._running.values())


def test_the_youngest_row_is_preempted_and_all_replies_are_complete(source: AdapterSource) -> None:
    requests = [request((n % 2,), f"prompt {n}", user=f"user-{n}", max_tokens=9) for n in range(4)]
    with engine_on(read=source) as engine:
        alone = [engine.complete([each])[0] for each in requests]
        size = len(engine.tokenize(requests[0]))
    backend = LimitedBackend(3 * size + 9)
    with engine_on(backend, source) as engine:
        for number in (0, 1):
            preload(engine, stack(number))
        assert engine.complete(requests) == alone
        assert engine.metrics()["num_preemptions_total"] == len(backend.removed) > 0
        # The first row never, and of three the last before the second.
        assert backend.removed[0] == "user-2"
        assert "user-0" not in backend.removed
        # Tokens read again after a preemption do not count as prompt tokens.
        assert engine.metrics()["prompt_tokens_total"] == 4 * size
        assert engine.metrics()["request_success_total"] == 4
        assert engine.metrics()["num_requests_waiting"] == 0
        engine.check_integrity()


class FailingBackend(SteppedBackend):
    """Has no memory for its next step when the test says so."""

    short = 0

    def step(self) -> Sequence[OutputChunk]:
        if self.short:
            self.short -= 1
            raise OutOfBlocks
        return super().step()


def test_background_work_is_preempted_before_interactive_requests_and_resumes_after_them(
    source: AdapterSource,
) -> None:
    backend = FailingBackend(slots=2, rows=4)
    with engine_on(backend, source) as engine:
        preload(engine, stack(1))
        learn = ask(engine, request((1,), user="learn", background=True))
        wait_for_running(engine, 1)
        people = []
        for number, user in enumerate(("ada", "bo"), 1):
            people.append(ask(engine, request((1,), user=user)))
            # Each request has a thread of its own, so the second could arrive first.
            wait_for_waiting(engine, number)
        backend.go()
        wait_for_running(engine, 3)
        backend.short = 2
        backend.go()
        wait_until(lambda: engine.metrics()["num_preemptions_total"] == 2)
        # The learn was first; still ada's request stays.
        assert [backend._running[n].state.owner for n in backend._running] == ["ada"]
        states = [r.status for r in engine._scheduler.queue]
        assert states == [RequestStatus.PREEMPTED] * 2
        backend.run()
        assert all(reader.text for reader in (*people, learn))
        assert backend.owners == ["learn", "ada", "bo", "bo", "learn"]


def test_a_single_row_is_never_preempted_but_fails(source: AdapterSource) -> None:
    backend = FailingBackend()
    with engine_on(backend, source) as engine:
        reader = ask(engine, request())
        wait_for_running(engine, 1)
        backend.short = 1
        backend.run()
        assert reader.end().error is not None
        assert ask(engine, request()).text


def test_a_preempted_request_can_be_cancelled_and_can_miss_its_deadline(
    source: AdapterSource,
) -> None:
    backend = FailingBackend()
    with engine_on(backend, source) as engine:
        first, second = start_together(engine, backend, request((1,)), request((1,), user="bo"))
        backend.go(2)
        wait_until(lambda: len(second.pieces) == 2)
        backend.short = 1
        backend.go()
        wait_until(lambda: engine.metrics()["num_preemptions_total"] == 1)
        second._replies.close()
        backend.run()
        # A reader that is between two chunks ends without a last one.
        assert second.finish in (None, "cancelled")
        wait_until(lambda: engine.metrics()["cancellations_total"] == 1)
        assert first.finish == "stop"


def test_a_request_that_cannot_fit_alone_is_refused_at_once() -> None:
    backend = LimitedBackend(40)
    with engine_on(backend) as engine, pytest.raises(PromptTooLong):
        engine.stream([request(prompt="x" * 20, max_tokens=30)])


# With a model


@pytest.fixture(scope="module")
def cramped(tiny_base: Base, shared_cache: Path) -> Iterator[Engine]:
    """An engine on torch with six key-value blocks."""
    from personalpeft.backends.torch import backend as torch_backend

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "default_num_blocks", lambda model, rows: 6)
        backend = torch_backend.TorchBackend(tiny_base, slots=2, rows=4, cache=shared_cache)
    engine = Engine(backend, AdapterSource(tiny_base), Serving(slots=2, max_batch=4))
    yield engine
    engine.check_integrity()
    engine.close()
    engine.check_integrity()
    backend.close()


def bits(engine: Engine, requests: Sequence[Request]) -> list[tuple[object, ...]]:
    replies: list[tuple[object, ...]] = [()] * len(requests)
    for piece in engine.stream(requests):
        replies[piece.index] += (
            *piece.tokens,
            *piece.logprobs,
            *piece.top_logprobs,
            piece.text,
            piece.finish,
        )
        # The text is cut into the same chunks, too.
    return replies


requests = st.tuples(
    st.sampled_from([(), (1,), (2,)]),
    st.sampled_from(["hello", "what is this? "]),
    st.sampled_from(["ada", "bo"]),
    st.sampled_from([0.0, 1.5]),
    st.integers(0, 3),
    st.booleans(),
)


@pytest.mark.timeout(300)
def test_replies_keep_their_bits_through_any_number_of_preemptions(
    cramped: Engine,
) -> None:
    preempted = 0

    # What is drawn may end before the blocks run out.
    @example([((number,), "what is this? ", "ada", 0.0, 0, False) for number in (1, 2, 1, 2)], True)
    @examples(2)
    @given(st.lists(requests, min_size=3, max_size=4), st.booleans())
    def holds(
        some: list[tuple[tuple[int, ...], str, str, float, int, bool]], forgets: bool
    ) -> None:
        nonlocal preempted
        requests = [
            replace(
                request(
                    numbers,
                    prompt,
                    user=user,
                    background=background,
                    base=cramped.backend.base,
                    max_tokens=90,
                    temperature=temperature,
                    seed=seed,
                ),
                logprobs=True,
                top_logprobs=2,
            )
            for numbers, prompt, user, temperature, seed, background in some
        ]
        alone = [bits(cramped, [each])[0] for each in requests]
        if forgets:
            cramped.clear_caches()
        before = cramped.metrics()["num_preemptions_total"]
        assert bits(cramped, requests) == alone
        preempted += int(cramped.metrics()["num_preemptions_total"] - before)
        cramped.check_integrity()

    holds()
    assert preempted
