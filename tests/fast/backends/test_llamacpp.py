"""llama.cpp computes what torch computes, of every kind of model that our cards name, with and without a stack."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from backend_makers import (
    Writing,
    attach,
    composed,
    lessons,
    llamacpp_backend,
    row,
    spec,
    torch_backend,
    train,
    written,
)

from personalpeft.backends.base import Backend, Continuation
from personalpeft.bases.base import Base


@pytest.mark.parametrize("stack", [None, "one"])
def test_every_kind_of_model_says_on_llamacpp_what_it_says_on_torch(
    base: Base, stack: str | None, shared_cache: Path
) -> None:
    both = [torch_backend(base, slots=1, rows=4), llamacpp_backend(base, shared_cache, slots=1, rows=4)]
    prompts = ("hello", "what is this? " * 9)
    said = []
    for backend in both:
        attach(backend, "one", composed(backend, 1, rank=3, size=0.2))
        replies = written(backend, [row(backend, prompt, stack, max_tokens=12, logprobs=True) for prompt in prompts])
        said.append(replies)
    for ours, theirs in zip(*said, strict=True):
        assert ours.tokens == theirs.tokens
        assert np.allclose(ours.logprobs, theirs.logprobs, atol=2e-3)
    both[1].close()


def test_a_lane_that_grows_takes_its_rows_along(llamacpp_tiny: Backend) -> None:
    long = row(llamacpp_tiny, "x" * 600, max_tokens=40)
    alone = written(llamacpp_tiny, [row(llamacpp_tiny, "hello", max_tokens=40)])[0].text
    llamacpp_tiny.forget()
    writing = Writing(llamacpp_tiny)
    reply = writing.join(row(llamacpp_tiny, "hello", max_tokens=40))
    writing.step(5)
    writing.join(long)
    writing.finish()
    assert reply.text == alone


def test_the_next_turn_of_a_conversation_reads_only_what_is_new(llamacpp_tiny: Backend) -> None:
    llamacpp_tiny.forget()
    before = llamacpp_tiny.occupancy().reused
    first = row(llamacpp_tiny, "a question of some length", owner="ada", max_tokens=4)
    written(llamacpp_tiny, [first])
    written(llamacpp_tiny, [row(llamacpp_tiny, "a question of some other length", owner="bo", max_tokens=4)])
    assert llamacpp_tiny.occupancy().reused == before
    written(llamacpp_tiny, [row(llamacpp_tiny, "a question of some other length", owner="ada", max_tokens=4)])
    assert llamacpp_tiny.occupancy().reused > before + 10


def test_torch_is_let_go_of_when_nothing_learns_any_more(tiny_base: Base, shared_cache: Path) -> None:
    backend = llamacpp_backend(tiny_base, shared_cache, slots=1)
    session = backend.session(spec(backend))
    train(session, lessons(backend, 2))
    session.close()
    session.close()
    with pytest.raises(ValueError, match="not sessions"):
        backend.advance([session], [[]], [0.1])
    backend.close()


def test_a_context_that_is_used_again_knows_nothing_of_the_stack_before(tiny_base: Base, shared_cache: Path) -> None:
    backend = llamacpp_backend(tiny_base, shared_cache, slots=1)
    said: dict[str | None, list[str]] = {}
    for name in ("one", "two", "one", None, "two"):
        if name is not None:
            attach(backend, name, composed(backend, len(name) + ord(name[0]), rank=3))
        said.setdefault(name, []).append(written(backend, [row(backend, "hello", name)])[0].text)
        if name is not None:
            backend.detach(name)
    assert len(set(said["one"])) == len(set(said["two"])) == 1
    assert len({said["one"][0], said["two"][0], said[None][0]}) == 3
    backend.close()


def test_an_item_longer_than_there_is_memory_for_is_refused(llamacpp_tiny: Backend) -> None:
    with pytest.raises(ValueError, match="more than"):
        llamacpp_tiny.score([Continuation((1,) * 10**5, (1,))], None)
