"""llama.cpp says what torch says, on the real base: with the same numbers nearly always, with its own quantised ones as nearly as
rounding lets it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from backend_makers import attach, composed, llamacpp_backend, row, torch_backend, written

from personalpeft.backends.base import Backend, Continuation
from personalpeft.bases.base import Base, Source
from personalpeft.bases.prepare import prepare
from personalpeft.bases.shelf import find_card
from personalpeft_app.bench.engines_asked import AGREE, FIXED, PROMPTS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real(shared_cache: Path) -> Base:
    return prepare(find_card("smollm2-135m-instruct"), cache=shared_cache)


@pytest.fixture(scope="module")
def unpacked(real: Base, shared_cache: Path) -> Base:
    """The same weights as a folder, which llama.cpp then has in the precision that they lie there in."""
    card = replace(real.card, name="unpacked", source=Source("folder", path=real.folder))
    return prepare(card, cache=shared_cache)


@pytest.fixture(scope="module")
def on_torch(real: Base) -> Iterator[Backend]:
    backend = with_stack(torch_backend(real, slots=1, rows=10))
    yield backend
    backend.close()


def with_stack(backend: Backend) -> Backend:
    attach(backend, "one", composed(backend, 1, rank=8, size=0.02))
    return backend


def said(backend: Backend, stack: str | None) -> list[Sequence[int]]:
    return [reply.tokens for reply in written(backend, [row(backend, p, stack, max_tokens=AGREE) for p in PROMPTS])]


def scored(backend: Backend, stack: str | None) -> list[float]:
    fixed = backend.encode(FIXED)
    items = [Continuation(row(backend, prompt).tokens, fixed) for prompt in PROMPTS[:4]]
    return [logp for score in backend.score(items, stack) for logp in score.tokens]


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
