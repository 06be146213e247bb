"""The engine keeps its promises on every backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from backend_makers import fake_backend, in_thread, llamacpp_backend, torch_backend
from serving_makers import AdapterSource, StreamReader, preload, request, stack
from vllm_maker import vllm_backend

from personalpeft.backends.base import Backend
from personalpeft.base_models.types import Base
from personalpeft.engine.engine import Engine
from personalpeft.errors import BaseMismatch, PromptTooLong
from personalpeft.settings import Serving
from personalpeft.types import Stack


@pytest.fixture(params=["fake", "torch", "llamacpp", pytest.param("vllm", marks=pytest.mark.vllm)])
def backend(
    request: pytest.FixtureRequest, tiny_base: Base, shared_cache: Path
) -> Iterator[Backend]:
    size = {"slots": 2, "rows": 4}
    match request.param:
        case "fake":
            made = fake_backend(**size)
        case "torch":
            made = torch_backend(tiny_base, **size)
        case "llamacpp":
            made = llamacpp_backend(tiny_base, shared_cache, **size)
        case _:
            base, server = (request.getfixturevalue(name) for name in ("vllm_base", "vllm_server"))
            made = vllm_backend(base, shared_cache, server, **size)
    yield made
    made.close()


@pytest.fixture
def engine(backend: Backend) -> Iterator[Engine]:
    engine = Engine(backend, AdapterSource(backend.base), Serving(slots=2, max_batch=4))
    yield engine
    engine.close()
    engine.check_integrity()


def complete(engine: Engine, *numbers: int, prompt: str = "hello", **more: object) -> str:
    asked = request(
        numbers, prompt, base=engine.backend.base, **{"max_tokens": 10, "temperature": 0.0, **more}
    )  # type: ignore[arg-type]
    return engine.complete([asked])[0]


def test_stream_chunks_join_to_the_completed_text(engine: Engine) -> None:
    asked = request((1,), base=engine.backend.base, max_tokens=12, temperature=0.0)
    pieces = [piece.text for piece in engine.stream([asked])]
    assert "".join(pieces) == engine.complete([asked])[0]
    assert len(pieces) > 1


def test_a_batch_of_different_stacks_gives_the_replies_of_single_requests(
    engine: Engine,
) -> None:
    base = engine.backend.base
    asked = [
        request(numbers, prompt, user=f"u{n}", base=base, max_tokens=8, temperature=0.0)
        for n, (numbers, prompt) in enumerate(
            (((1,), "hi"), ((), "hi"), ((2,), "why"), ((1, 2), "hi"), ((3,), "x" * 200))
        )
    ]
    alone = [engine.complete([each])[0] for each in asked]
    assert engine.complete(asked) == alone
    assert len(set(alone[:2])) == 2


def test_a_weight_scales_a_layer_and_zero_is_the_base(engine: Engine) -> None:
    base = engine.backend.base

    def at(weight: float) -> str:
        asked = request((1,), base=base, max_tokens=8, temperature=0.0)
        return engine.complete([replace(asked, stack=stack(1, weight=weight, base=base))])[0]

    assert at(0.0) == complete(engine, max_tokens=8)
    assert len({at(0.0), at(0.5), at(2.0)}) == 3
    assert at(1.0) == complete(engine, 1, max_tokens=8)


def test_the_same_seed_repeats_and_a_stop_string_ends_a_reply(engine: Engine) -> None:
    first, again, other = (
        complete(engine, 1, temperature=1.0, seed=seed, max_tokens=16) for seed in (3, 3, 4)
    )
    assert first == again != other
    stop = first[4:6]
    assert (
        complete(engine, 1, temperature=1.0, seed=3, max_tokens=16, stop=(stop,))
        == first.partition(stop)[0]
    )


def test_a_cancelled_request_frees_its_row_and_changes_no_other(engine: Engine) -> None:
    whole = complete(engine, 2, max_tokens=30)
    leaving = engine.stream([request((1,), base=engine.backend.base, max_tokens=400)])
    staying = StreamReader(
        engine.stream([request((2,), base=engine.backend.base, max_tokens=30, temperature=0.0)])
    )
    next(leaving)
    leaving.close()
    staying.end()
    assert staying.text == whole
    assert complete(engine, 2, max_tokens=30) == whole


def test_a_reply_finishes_on_the_stack_it_started_with(
    engine: Engine,
) -> None:
    whole = complete(engine, 1, max_tokens=60)
    reader = StreamReader(
        engine.stream([request((1,), base=engine.backend.base, max_tokens=60, temperature=0.0)])
    )
    newer = [in_thread(preload, engine, stack(n, base=engine.backend.base)) for n in (4, 5, 6, 7)]
    heard = [complete(engine, number) for number in (4, 5, 6, 7)]
    for each in newer:
        each.result()
    reader.end()
    assert reader.text == whole
    assert len(set(heard)) == 4


def test_log_probs_belong_to_the_generated_tokens(engine: Engine) -> None:
    asked = replace(
        request((1,), base=engine.backend.base, max_tokens=8, temperature=0.0), logprobs=True
    )
    pieces = list(engine.stream([asked]))
    assert [len(piece.logprobs) for piece in pieces] == [len(piece.tokens) for piece in pieces]
    assert all(value <= 0 for piece in pieces for value in piece.logprobs)


def test_a_prompt_that_is_too_long_reports_by_how_much(engine: Engine) -> None:
    with pytest.raises(PromptTooLong) as caught:
        complete(engine, 1, prompt="x" * 10_000)
    assert caught.value.excess > 0
    assert caught.value.hint


def test_a_stack_of_another_base_is_refused(engine: Engine) -> None:
    foreign = replace(
        request((1,), base=engine.backend.base), stack=Stack("0" * 64, stack(1).entries)
    )
    with pytest.raises(BaseMismatch):
        engine.complete([foreign])
