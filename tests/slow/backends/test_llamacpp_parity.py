"""llama.cpp says what torch says, on the real base: with the same numbers nearly always, with its own quantised ones as nearly as
rounding lets it.
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
from backend_makers import Writing, attach, composed, llamacpp_backend, row, torch_backend, written

from benchmarks.engines_asked import AGREE, FIXED, PROMPTS
from personalpeft.backends.base import Backend, Continuation, SequenceState
from personalpeft.backends.llamacpp.backend import context_bytes
from personalpeft.backends.llamacpp.binding import ContextParams, Model
from personalpeft.backends.llamacpp.context_pool import CHUNK
from personalpeft.base_models.gguf.file import resolve_gguf_file
from personalpeft.base_models.gguf.tensor_names import gguf_names
from personalpeft.base_models.registry import find_card
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.types import Base, Source
from personalpeft.types import Message, Sampling

Reply: TypeAlias = tuple[tuple[int, ...], tuple[float, ...]]
"""Tokens and log-probs."""

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def real(shared_cache: Path) -> Base:
    return resolve_base(find_card("smollm2-135m-instruct"), cache=shared_cache)


@pytest.fixture(scope="module")
def unpacked(real: Base, shared_cache: Path) -> Base:
    """The same weights as a folder, which llama.cpp then has in the precision that they lie there in."""
    card = replace(real.card, name="unpacked", source=Source("folder", path=real.folder))
    return resolve_base(card, cache=shared_cache)


@pytest.fixture(scope="module")
def on_torch(real: Base) -> Iterator[Backend]:
    backend = with_stack(torch_backend(real, slots=1, rows=10))
    yield backend
    backend.close()


def with_stack(backend: Backend) -> Backend:
    attach(backend, "one", composed(backend, 1, rank=8, size=0.02))
    return backend


def said(backend: Backend, stack: str | None) -> list[Sequence[int]]:
    return [
        reply.tokens
        for reply in written(backend, [row(backend, p, stack, max_tokens=AGREE) for p in PROMPTS])
    ]


def scored(backend: Backend, stack: str | None) -> list[float]:
    fixed = backend.encode(FIXED)
    items = [Continuation(row(backend, prompt).prompt_tokens, fixed) for prompt in PROMPTS[:4]]
    return [logp for score in backend.score(items, stack) for logp in score.token_logprobs]


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


@pytest.mark.parametrize("stack", [None, "one"])
def test_with_the_same_numbers_the_first_tokens_are_the_same(
    stack: str | None, unpacked: Base, on_torch: Backend, shared_cache: Path
) -> None:
    backend = with_stack(llamacpp_backend(unpacked, shared_cache, slots=1, rows=10, threads=2))
    pairs = zip(said(backend, stack), said(on_torch, stack), strict=True)
    same = [tuple(ours) == tuple(theirs) for ours, theirs in pairs]
    difference = apart(scored(backend, stack), scored(on_torch, stack))
    backend.close()
    assert sum(same) >= 9
    assert difference < 0.01


@pytest.mark.parametrize("stack", [None, "one"])
def test_with_quantised_numbers_log_probs_are_as_near_as_rounding_to_8_bits_lets_them(
    stack: str | None, real: Base, on_torch: Backend, shared_cache: Path
) -> None:
    backend = with_stack(llamacpp_backend(real, shared_cache, slots=1, rows=10, threads=2))
    difference = apart(scored(backend, stack), scored(on_torch, stack))
    backend.close()
    assert difference < 0.2


QUESTIONS = ("What is the sea made of? " * 40, "And the moon?", "Why do cats purr?")


def conversation(
    backend: Backend, owner: str, stack: str | None, *, beside: Sequence[SequenceState] = ()
) -> list[Reply]:
    """Greedy replies, each after all that was said before it, while other rows are served beside them."""
    writing = Writing(backend)
    for each in beside:
        writing.join(each)
        writing.step()
    said: list[Message] = []
    replies = []
    for question in QUESTIONS:
        said.append(Message("user", question))
        asked = SequenceState(
            backend.render(said), stack, Sampling(max_tokens=40), owner, logprobs=True
        )
        reply = writing.join(asked)
        while reply.finish is None:
            writing.step()
        said.append(Message("assistant", reply.text))
        replies.append((reply.tokens, reply.logprobs))
    writing.finish()
    return replies


def in_a_new_process(base: Base, cache: Path, stack: str | None) -> list[Reply]:
    backend = with_stack(llamacpp_backend(base, cache, slots=1, rows=4, threads=2))
    replies = conversation(backend, "ada", stack)
    backend.close()
    return replies


@pytest.mark.parametrize("stack", [None, "one"])
def test_a_conversation_repeats_to_the_bit_cold_warm_in_company_and_in_a_new_process(
    stack: str | None, real: Base, shared_cache: Path
) -> None:
    backend = with_stack(llamacpp_backend(real, shared_cache, slots=1, rows=4, threads=2))
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
        other = process.submit(in_a_new_process, real, shared_cache, stack).result()
    assert again == beside == cold == other == first


def test_a_context_takes_no_more_memory_than_is_reckoned(
    real: Base, shared_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = gguf_names(real)
    model = Model(resolve_gguf_file(real, names, shared_cache), repack=False)
    for places in (512, 4096):
        shape = ContextParams(places, CHUNK, 1, 1, names.full)
        place, lane = context_bytes(names, model.vocab_size, shape)
        caplog.clear()
        with caplog.at_level("DEBUG", "personalpeft.backends.llamacpp.binding"):
            model.new_context(shape, None).close()
        sizes = [float(size) for size in re.findall(r"buffer size = +([0-9.]+) MiB", caplog.text)]
        assert len(sizes) >= 3
        assert sum(sizes) * 2**20 <= places * place + lane
    model.close()
