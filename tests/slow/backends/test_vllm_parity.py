"""vLLM agrees with torch on the real base and a real server, both in float32."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from backend_makers import attach, generate, random_stack, row, torch_backend
from vllm_maker import running, vllm_backend

from benchmarks.engine_comparison import AGREE, PROMPTS
from personalpeft.backends.base import Backend, Continuation
from personalpeft.base_models.registry import find_card
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.types import Base

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


@pytest.fixture(scope="module")
def real(shared_cache: Path) -> Base:
    return resolve_base(find_card("smollm2-135m-instruct"), cache=shared_cache)


@pytest.fixture(scope="module")
def on_torch(real: Base) -> Iterator[Backend]:
    backend = with_stack(torch_backend(real, slots=1, rows=len(PROMPTS)))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def on_vllm(
    real: Base, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Backend]:
    with running(real, tmp_path_factory.mktemp("vllm"), longest=1024) as server:
        backend = with_stack(vllm_backend(real, shared_cache, server, slots=1, rows=len(PROMPTS)))
        yield backend
        backend.close()


def with_stack(backend: Backend) -> Backend:
    attach(backend, "one", random_stack(backend, 1, rank=8, size=0.02))
    return backend


@pytest.mark.parametrize("stack", [None, "one"])
def test_first_tokens_and_their_log_probs_are_equal(
    stack: str | None, on_vllm: Backend, on_torch: Backend
) -> None:
    rows = [row(on_torch, prompt, stack, logprobs=True, max_tokens=AGREE) for prompt in PROMPTS]
    theirs, ours = generate(on_vllm, rows), generate(on_torch, rows)
    same = [their.tokens == our.tokens for their, our in zip(theirs, ours, strict=True)]
    # Of the text that vLLM wrote, since it cannot score given text.
    items = [
        Continuation(row.prompt_tokens, their.tokens)
        for row, their in zip(rows, theirs, strict=True)
    ]
    apart = [
        abs(a - b)
        for their, score in zip(theirs, on_torch.score(items, stack), strict=True)
        for a, b in zip(their.logprobs, score.token_logprobs, strict=True)
    ]
    assert sum(same) >= 9
    assert statistics.fmean(apart) < 0.0001
