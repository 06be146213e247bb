"""llama.cpp agrees with torch on the real base: equal weights give equal tokens, quantised ones
equal up to rounding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeAlias

import pytest
from backend_makers import (
    Batch,
    attach,
    generate,
    llamacpp_backend,
    random_stack,
    row,
    sequence,
    torch_backend,
)

from benchmarks.engine_comparison import AGREE, FIXED, PROMPTS
from personalpeft.backends.base import Backend, Continuation
from personalpeft.backends.llamacpp.backend import context_bytes
from personalpeft.backends.llamacpp.binding import ContextParams, Model
from personalpeft.backends.llamacpp.context_pool import CHUNK
from personalpeft.backends.sequence import SequenceState
from personalpeft.base_models.gguf.tensor_names import gguf_names
from personalpeft.base_models.gguf.writer import resolve_gguf_file
from personalpeft.base_models.registry import find_card
from personalpeft.base_models.resolve import resolve_base, unpacked_folder
from personalpeft.base_models.types import Base, Source
from personalpeft.types import Message, Sampling

Reply: TypeAlias = tuple[tuple[int, ...], tuple[float, ...]]
"""Tokens and log-probs."""

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def real_base(shared_cache: Path) -> Base:
    return resolve_base(find_card("smollm2-135m-instruct"), cache=shared_cache)


@pytest.fixture(scope="module")
def unpacked(real_base: Base, shared_cache: Path) -> Base:
    """Return the same weights as a folder. llama.cpp keeps its precision."""
    card = replace(
        real_base.card, name="unpacked", source=Source("folder", path=unpacked_folder(real_base))
    )
    return resolve_base(card, cache=shared_cache)


@pytest.fixture(scope="module")
def on_torch(unpacked: Base) -> Iterator[Backend]:
    backend = with_stack(torch_backend(unpacked, slots=1, rows=10))
    yield backend
    backend.close()


def with_stack(backend: Backend) -> Backend:
    attach(backend, "one", random_stack(backend, 1, rank=8, size=0.02))
    return backend


def reply_tokens(backend: Backend, stack: str | None) -> list[Sequence[int]]:
    return [
        reply.tokens
        for reply in generate(backend, [row(backend, p, stack, max_tokens=AGREE) for p in PROMPTS])
    ]


def scores(backend: Backend, stack: str | None) -> list[float]:
    fixed = backend.encode(FIXED)
    items = [Continuation(row(backend, prompt).prompt_tokens, fixed) for prompt in PROMPTS[:4]]
    return [logp for score in backend.score(items, stack) for logp in score.token_logprobs]


def mean_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


@pytest.mark.parametrize("stack", [None, "one"])
def test_equal_weights_give_equal_first_tokens(
    stack: str | None, unpacked: Base, on_torch: Backend, shared_cache: Path
) -> None:
    backend = with_stack(llamacpp_backend(unpacked, shared_cache, slots=1, rows=10, threads=2))
    pairs = zip(reply_tokens(backend, stack), reply_tokens(on_torch, stack), strict=True)
    same = [tuple(ours) == tuple(theirs) for ours, theirs in pairs]
    difference = mean_difference(scores(backend, stack), scores(on_torch, stack))
    backend.close()
    assert sum(same) >= 9
    assert difference < 0.01


@pytest.mark.parametrize("stack", [None, "one"])
def test_quantised_weights_give_log_probs_equal_up_to_8_bit_rounding(
    stack: str | None, real_base: Base, on_torch: Backend, shared_cache: Path
) -> None:
    backend = with_stack(llamacpp_backend(real_base, shared_cache, slots=1, rows=10, threads=2))
    difference = mean_difference(scores(backend, stack), scores(on_torch, stack))
    backend.close()
    assert difference < 0.2


QUESTIONS = ("What is the sea made of? " * 40, "And the moon?", "Why do cats purr?")


def conversation(
    backend: Backend, owner: str, stack: str | None, *, beside: Sequence[SequenceState] = ()
) -> list[Reply]:
    """Return greedy replies, each after the whole conversation so far, while other rows run beside
    them.
    """
    writing = Batch(backend)
    for each in beside:
        writing.join(each)
        writing.step()
    messages: list[Message] = []
    replies = []
    for question in QUESTIONS:
        messages.append(Message("user", question))
        asked = sequence(
            backend.render(messages), stack, Sampling(max_tokens=40), owner, logprobs=True
        )
        reply = writing.join(asked)
        while reply.finish is None:
            writing.step()
        messages.append(Message("assistant", reply.text))
        replies.append((reply.tokens, reply.logprobs))
    writing.finish()
    return replies


def replies_in_a_new_process(base: Base, cache: Path, stack: str | None) -> list[Reply]:
    backend = with_stack(llamacpp_backend(base, cache, slots=1, rows=4, threads=2))
    replies = conversation(backend, "ada", stack)
    backend.close()
    return replies


@pytest.mark.parametrize("stack", [None, "one"])
def test_conversation_repeats_exactly_uncached_cached_batched_and_in_a_new_process(
    stack: str | None, real_base: Base, shared_cache: Path
) -> None:
    backend = with_stack(llamacpp_backend(real_base, shared_cache, slots=1, rows=4, threads=2))
    first = conversation(backend, "ada", stack)
    again = conversation(backend, "ada", stack)
    assert backend.occupancy().reused_tokens > 0
    others = [
        row(backend, PROMPTS[n] * 20, other, owner="ada", max_tokens=100)
        for n, other in enumerate((None, "one"))
    ]
    beside = conversation(backend, "ada", stack, beside=others)
    backend.clear_cache()
    cold = conversation(backend, "bo", stack)
    backend.close()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        other = process.submit(replies_in_a_new_process, real_base, shared_cache, stack).result()
    assert again == beside == cold == other == first


def test_context_takes_no_more_memory_than_estimated(
    real_base: Base, shared_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = gguf_names(real_base)
    model = Model(resolve_gguf_file(real_base, names), repack=False, threads=lambda: 1)
    for places in (512, 4096):
        shape = ContextParams(places, CHUNK, 1, names.full)
        place, lane = context_bytes(names, model.vocab_size, shape)
        caplog.clear()
        with caplog.at_level("DEBUG", "personalpeft.backends.llamacpp.binding"):
            model.new_context(shape, None).close()
        sizes = [float(size) for size in re.findall(r"buffer size = +([0-9.]+) MiB", caplog.text)]
        assert len(sizes) >= 3
        assert sum(sizes) * 2**20 <= places * place + lane
    model.close()
