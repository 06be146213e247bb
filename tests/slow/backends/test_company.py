"""What the real base says to a row does not depend on who else is in the batch, nor on when they come and go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from backend_makers import Writing, Written, attach, composed, row

from personalpeft.backends.base import Backend, Row
from personalpeft.bases.base import Base

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

ROWS = 12
PROMPTS = (
    "What is the capital of France?",
    "Write a poem about rain.",
    "How do I boil an egg?",
    "Tell me a story about a dog. " * 12,
)
# In nats a token. Where sums are as long and as exact as in bfloat16, another order of adding may change this much; on a
# processor with AVX-512 nothing changes at all (docs/benchmarks.md).
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def real_base(shared_cache: Path) -> Base:
    from personalpeft.bases.prepare import prepare
    from personalpeft.bases.shelf import find_card

    return prepare(find_card("smollm2-135m-instruct"), cache=shared_cache)


def backend_in(dtype: str, base: Base, cache: Path) -> Backend:
    from personalpeft.backends.torch.backend import TorchBackend
    from personalpeft.backends.torch.model import Device

    where = Device(torch.device("cpu"), getattr(torch, dtype), "for tests")
    backend = TorchBackend(base, where=where, cache=cache, slots=ROWS, rows=ROWS)
    for seed in range(ROWS):
        attach(backend, f"s{seed}", composed(backend, seed, rank=1 + seed, size=0.02))
    return backend


def rows_of(backend: Backend, owner: str) -> list[Row]:
    return [
        row(
            backend,
            PROMPTS[seed % len(PROMPTS)],
            f"s{seed}" if seed % 4 else None,
            owner=f"{owner}{seed}",
            logprobs=True,
            max_tokens=24,
            temperature=0.7 if seed % 5 == 1 else 0.0,
            seed=seed,
        )
        for seed in range(ROWS)
    ]


def said(backend: Backend, rows: Sequence[Row], *, apart: int) -> list[Written]:
    """Each row joins ``apart`` steps after the one before it."""
    writing = Writing(backend)
    replies = []
    for each in rows:
        replies.append(writing.join(each))
        writing.step(apart)
    writing.finish()
    return replies


def alone(backend: Backend) -> list[Written]:
    return [said(backend, [each], apart=0)[0] for each in rows_of(backend, "alone")]


def test_in_float32_every_token_is_the_same_alone_and_in_company(real_base: Base, shared_cache: Path) -> None:
    backend = backend_in("float32", real_base, shared_cache)
    expected = [reply.tokens for reply in alone(backend)]
    assert [reply.tokens for reply in said(backend, rows_of(backend, "together"), apart=0)] == expected
    assert [reply.tokens for reply in said(backend, rows_of(backend, "one by one"), apart=2)] == expected


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="nobody is served in bfloat16 here: the processor has none"
)
def test_in_bfloat16_no_token_is_further_from_the_one_said_alone_than_the_tolerance(
    real_base: Base, shared_cache: Path
) -> None:
    backend = backend_in("bfloat16", real_base, shared_cache)
    expected = alone(backend)
    for apart in (0, 2):
        for reply, wanted in zip(
            said(backend, rows_of(backend, f"apart {apart} "), apart=apart), expected, strict=True
        ):
            for token, other, logprob, was in zip(
                reply.tokens, wanted.tokens, reply.logprobs, wanted.logprobs, strict=False
            ):
                assert logprob == pytest.approx(was, abs=TOLERANCE)
                if token != other:
                    break  # Two tokens that were as good as equal; from here on they are replies to different texts.


def test_a_prompt_that_was_read_before_is_not_read_again_and_changes_nothing(
    real_base: Base, shared_cache: Path
) -> None:
    backend = backend_in("bfloat16", real_base, shared_cache)
    first = said(backend, rows_of(backend, "ada"), apart=0)
    before = backend.occupancy().reused
    again = said(backend, rows_of(backend, "ada"), apart=0)
    assert backend.occupancy().reused > before
    for reply, wanted in zip(again, first, strict=True):
        assert reply.logprobs[0] == pytest.approx(wanted.logprobs[0], abs=TOLERANCE)
