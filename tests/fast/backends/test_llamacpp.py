"""llama.cpp computes what torch computes for every architecture, with and without a stack."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_makers import (
    Batch,
    Output,
    attach,
    base_with_merges,
    generate,
    in_thread,
    llamacpp_backend,
    random_stack,
    row,
    sequence,
    torch_backend,
)
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from llama_cpp import llama_cpp

from personalpeft.backends.base import Backend, Continuation
from personalpeft.backends.llamacpp import backend as reckoning
from personalpeft.backends.llamacpp.backend import LlamaCppBackend, context_bytes
from personalpeft.backends.llamacpp.binding import Context, ContextParams, Model
from personalpeft.backends.llamacpp.context_pool import CHUNK
from personalpeft.base_models.gguf.tensor_names import gguf_names
from personalpeft.base_models.gguf.writer import resolve_gguf_file, write_gguf
from personalpeft.base_models.types import Base
from personalpeft.errors import WeightsError
from personalpeft.types import Message, Sampling

few = examples(4, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_every_architecture_matches_torch(base: Base, shared_cache: Path) -> None:
    both = [
        torch_backend(base, slots=1, rows=4),
        llamacpp_backend(base, shared_cache, slots=1, rows=4),
    ]
    requests = (("hello", None), ("hello", "one"), ("what is this? " * 9, "one"))
    results = []
    for backend in both:
        attach(backend, "one", random_stack(backend, 1, rank=3, size=0.2))
        replies = generate(
            backend,
            [
                row(backend, prompt, stack, max_tokens=12, logprobs=True)
                for prompt, stack in requests
            ],
        )
        results.append(replies)
    for ours, theirs in zip(*results, strict=True):
        assert ours.tokens == theirs.tokens
        assert np.allclose(ours.logprobs, theirs.logprobs, atol=2e-3)
    both[1].close()


def test_a_context_that_grows_keeps_its_cache_bit_for_bit(llamacpp_tiny: Backend) -> None:
    long = row(llamacpp_tiny, "hello " * 90, max_tokens=300, logprobs=True)
    llamacpp_tiny.clear_cache()
    (cold,) = generate(llamacpp_tiny, [long])
    llamacpp_tiny.clear_cache()
    generate(llamacpp_tiny, [row(llamacpp_tiny, "hello " * 60, max_tokens=4)])
    before = llamacpp_tiny.occupancy().reused_tokens
    (grown,) = generate(llamacpp_tiny, [long])
    assert llamacpp_tiny.occupancy().reused_tokens > before
    assert (grown.tokens, grown.logprobs) == (cold.tokens, cold.logprobs)


def test_the_next_turn_of_a_conversation_reuses_whole_parts_of_the_former_prompt(
    llamacpp_tiny: Backend,
) -> None:
    llamacpp_tiny.clear_cache()
    long = "a question of some length, " * 9
    first = row(llamacpp_tiny, long, owner="ada", max_tokens=40)
    generate(llamacpp_tiny, [first])
    before = llamacpp_tiny.occupancy().reused_tokens
    generate(llamacpp_tiny, [row(llamacpp_tiny, long + "and more", owner="bo", max_tokens=4)])
    assert llamacpp_tiny.occupancy().reused_tokens == before
    following = row(llamacpp_tiny, long + "and more", owner="ada", max_tokens=4)
    generate(llamacpp_tiny, [following])
    same = next(
        n
        for n, (a, b) in enumerate(zip(first.prompt_tokens, following.prompt_tokens, strict=False))
        if a != b
    )
    assert llamacpp_tiny.occupancy().reused_tokens - before == same // CHUNK * CHUNK > 0


def converse(
    backend: Backend, owner: str, questions: Sequence[str], stack: str | None = None
) -> list[Output]:
    """Return the replies of a conversation. Each prompt begins with all turns before it."""
    results: list[Message] = []
    replies = []
    for question in questions:
        results.append(Message("user", question))
        sampling = Sampling(max_tokens=24)
        (reply,) = generate(
            backend, [sequence(backend.render(results), stack, sampling, owner, logprobs=True)]
        )
        results.append(Message("assistant", reply.text))
        replies.append(reply)
    return replies


QUESTIONS = ("What is the sea made of? " * 5, "And the moon?", "Why do cats purr? " * 9)


@pytest.mark.parametrize("stack", [pytest.param(None, marks=pytest.mark.exhaustive), "one"])
def test_a_conversation_repeats_its_bits_with_any_cache_and_any_requests_between(
    base: Base, stack: str | None, shared_cache: Path
) -> None:
    backend = llamacpp_backend(base, shared_cache, slots=2, rows=4)
    attach(backend, "one", random_stack(backend, 1, rank=3, size=0.2))
    attach(backend, "two", random_stack(backend, 2, rank=3, size=0.2))
    first = converse(backend, "ada", QUESTIONS, stack)
    again = converse(backend, "ada", QUESTIONS, stack)
    converse(backend, "ada", QUESTIONS[::-1], stack)
    converse(backend, "bo", QUESTIONS[1:], "two")
    later = converse(backend, "ada", QUESTIONS, stack)
    other = converse(backend, "cy", QUESTIONS, stack)
    backend.clear_cache()
    cold = converse(backend, "ada", QUESTIONS, stack)
    assert backend.occupancy().reused_tokens > 0
    backend.close()
    for replies in (again, later, other, cold):
        assert [reply.tokens for reply in replies] == [reply.tokens for reply in first]
        assert [reply.logprobs for reply in replies] == [reply.logprobs for reply in first]


@pytest.fixture
def with_two(tiny_base: Base, shared_cache: Path) -> Iterator[LlamaCppBackend]:
    """A backend of this test alone, with the stacks "one" and "two"."""
    backend = LlamaCppBackend(tiny_base, slots=2, rows=4, cache=shared_cache, threads=1)
    for seed, name in enumerate(("one", "two")):
        attach(backend, name, random_stack(backend, seed, rank=2))
    yield backend
    backend.close()


@few
@given(
    batch_rows=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(["ada", "bo"]),
            st.sampled_from([1, 20, 70, 180]),
            st.sampled_from([None, "one", "two"]),
        ),
        max_size=3,
    ),
    forgets=st.booleans(),
    stack=st.sampled_from([None, "one"]),
)
def test_a_reply_has_the_same_bits_in_any_batch(
    with_two: LlamaCppBackend,
    batch_rows: list[tuple[int, str, int, str | None]],
    forgets: bool,
    stack: str | None,
) -> None:
    request = row(with_two, QUESTIONS[0], stack, owner="ada", logprobs=True, max_tokens=16)
    (alone,) = generate(with_two, [request])
    writing = Batch(with_two)
    replies = []
    for number, (steps, owner, length, other) in enumerate(batch_rows):
        writing.join(row(with_two, QUESTIONS[0][:length], other, owner=owner, max_tokens=12))
        if number == 0:
            replies.append(writing.join(request))
        writing.step(steps)
        if forgets:
            with_two.clear_cache()
    writing.finish()
    replies += generate(with_two, [request])
    assert {(reply.tokens, reply.logprobs) for reply in replies} == {(alone.tokens, alone.logprobs)}


def test_a_reused_context_holds_nothing_of_its_former_stack(
    tiny_base: Base, shared_cache: Path
) -> None:
    backend = llamacpp_backend(tiny_base, shared_cache, slots=1)
    results: dict[str | None, list[str]] = {}
    for name in ("one", "two", "one", None, "two"):
        if name is not None:
            attach(backend, name, random_stack(backend, len(name) + ord(name[0]), rank=3))
        results.setdefault(name, []).append(
            generate(backend, [row(backend, "hello", name)])[0].text
        )
        if name is not None:
            backend.detach(name)
    assert len(set(results["one"])) == len(set(results["two"])) == 1
    assert len({results["one"][0], results["two"][0], results[None][0]}) == 3
    backend.close()


def test_all_is_computed_on_the_processor(
    tiny_base: Base, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A build for GPUs has the same parameters, and would use the GPU by default.
    options = []

    def record(name: str) -> None:
        call = getattr(llama_cpp, name)
        monkeypatch.setattr(
            llama_cpp, name, lambda first, given: options.append(given) or call(first, given)
        )

    record("llama_model_load_from_file")
    record("llama_init_from_model")
    backend = llamacpp_backend(tiny_base, shared_cache, slots=1)
    assert generate(backend, [row(backend, "hello", max_tokens=2)])
    backend.score([Continuation((1, 2), (3,))], None)
    backend.close()
    models = [each for each in options if hasattr(each, "n_gpu_layers")]
    contexts = [each for each in options if hasattr(each, "op_offload")]
    assert {each.n_gpu_layers for each in models} == {0}
    assert {(each.op_offload, each.offload_kqv) for each in contexts} == {(False, False)}


def test_an_item_that_exceeds_the_memory_is_refused(llamacpp_tiny: Backend) -> None:
    with pytest.raises(ValueError, match="2048"):
        llamacpp_tiny.score([Continuation((1,) * 10**5, (1,))], None)


@pytest.fixture
def solo(tiny_base: Base, shared_cache: Path) -> Iterator[LlamaCppBackend]:
    """A backend of this test alone, with one slot."""
    backend = LlamaCppBackend(tiny_base, slots=1, rows=4, cache=shared_cache, threads=1)
    yield backend
    backend.close()


def test_a_score_after_a_slot_was_reused_uses_the_new_stack(
    solo: LlamaCppBackend,
) -> None:
    item = Continuation((1, 2, 3), (4, 5))
    results: dict[int, set[float]] = {}
    for number in (1, 2, 3, 1, 3, 2, 1):
        attach(solo, f"s{number}", random_stack(solo, number, rank=1 + number))
        (score,) = solo.score([item], f"s{number}", kl=True)
        results.setdefault(number, set()).add(round(score.logp, 5))
        solo.detach(f"s{number}")
    assert [len(each) for each in results.values()] == [1, 1, 1]
    assert len(set.union(*results.values())) == 3


@pytest.mark.exhaustive
def test_clearing_the_cache_changes_no_running_score(
    solo: LlamaCppBackend,
) -> None:
    items = [Continuation((n % 200, 2, 3), (4, 5, 6)) for n in range(200)]
    attach(solo, "one", random_stack(solo, 1))
    whole = solo.score(items, "one")
    with scoring_started() as reading:
        scoring = in_thread(solo.score, items, "one")
        reading()
        solo.clear_cache()
        solo.clear_cache()
    assert scoring.result() == whole
    solo.detach("one")
    attach(solo, "two", random_stack(solo, 2))
    assert solo.score(items[:1], "two")


def test_a_score_during_closing_raises_and_reads_no_freed_memory(
    solo: LlamaCppBackend,
) -> None:
    attach(solo, "one", random_stack(solo, 1))
    items = [Continuation((n % 200, 2, 3), (4, 5, 6)) for n in range(2000)]
    with scoring_started() as reading:
        scoring = in_thread(solo.score, items, "one")
        reading()
        solo.close()
    with pytest.raises(RuntimeError, match=r"^the backend is closed$"):
        scoring.result()


@contextmanager
def scoring_started() -> Iterator[Callable[[], object]]:
    """Yield a function that waits until an item is being scored."""
    decode, reading = Context.decode, threading.Event()

    def watched(*request: Any) -> Any:
        reading.set()
        return decode(*request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "decode", watched)
        yield lambda: reading.wait(20)


def test_a_context_that_cannot_be_created_occupies_no_slot(
    solo: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(solo, "one", random_stack(solo, 1))
    with monkeypatch.context() as broken:
        broken.setattr(Context, "__init__", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            solo.admit(row(solo, "hello", "one"))
    solo.detach("one")
    attach(solo, "two", random_stack(solo, 2))
    assert generate(solo, [row(solo, "hello", "two")])[0].text


def failing(*_: object) -> None:
    raise RuntimeError("out of memory")


def test_many_rows_of_one_stack_run_at_once(tiny_base: Base, shared_cache: Path) -> None:
    backend = LlamaCppBackend(tiny_base, slots=1, rows=140, cache=shared_cache, threads=1)
    rows = [row(backend, f"{n % 3}", max_tokens=2) for n in range(140)]
    replies = generate(backend, rows)
    assert len({reply.tokens for reply in replies[::3]}) == 1
    assert backend.occupancy().used_tokens == 0
    backend.close()


def test_a_closed_backend_computes_nothing(solo: LlamaCppBackend) -> None:
    solo.admit(row(solo, "hello"))
    solo.close()
    assert list(solo.step()) == []
    with pytest.raises(RuntimeError, match="closed"):
        solo.score([Continuation((1,), (1,))], None)


def test_an_empty_continuation_is_refused(solo: LlamaCppBackend) -> None:
    for item in (Continuation((), (1,)), Continuation((1,), ())):
        with pytest.raises(ValueError, match="prompt"):
            solo.score([item], None)


def test_prompts_are_read_within_one_budget_for_all_stacks(
    tiny_base: Base, shared_cache: Path
) -> None:
    backend = LlamaCppBackend(tiny_base, slots=3, rows=4, cache=shared_cache, threads=1)
    for name in ("one", "two", "three"):
        attach(backend, name, random_stack(backend, len(name)))
    writing = Batch(backend)
    writing.join(row(backend, "hello", max_tokens=30))
    writing.step()
    before = backend.occupancy().used_tokens
    for name in ("one", "two", "three"):
        writing.join(row(backend, "x" * 400, name, max_tokens=2))
    writing.step()
    assert backend.occupancy().used_tokens - before <= 65
    writing.finish()
    backend.close()


def test_a_vocabulary_with_merges_and_surplus_embeddings_is_served(
    tmp_path: Path, shared_cache: Path
) -> None:
    base = base_with_merges(tmp_path)
    both = [
        torch_backend(base, slots=1, rows=1),
        llamacpp_backend(base, shared_cache, slots=1, rows=1),
    ]
    results = [
        generate(backend, [row(backend, "the cat", max_tokens=8)])[0].tokens for backend in both
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": None},
        {"sliding_window": 16},
        {"hidden_act": "relu"},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_a_model_that_llamacpp_computes_differently_is_refused_by_name(
    changes: dict[str, object], tiny_base: Base, tmp_path: Path
) -> None:
    config = json.loads((tiny_base.folder / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}), "utf-8")
    base = replace(tiny_base, folder=tmp_path)
    with pytest.raises(WeightsError):
        write_gguf(base, gguf_names(base), tmp_path / "model.gguf")


def test_the_estimated_memory_of_a_context_is_no_less_than_llamacpps(
    base: Base, shared_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = gguf_names(base)
    file = resolve_gguf_file(base, names)
    model = Model(file, repack=False, threads=lambda: 1)
    for places in (512, 4096):
        shape = ContextParams(places, CHUNK, 1, names.full)
        place, context = context_bytes(names, model.vocab_size, shape)
        caplog.clear()
        with caplog.at_level("DEBUG", "personalpeft.backends.llamacpp.binding"):
            model.new_context(shape, None).close()
        results = re.findall(r"buffer size = +([0-9.]+) MiB", caplog.text)
        assert len(results) >= 3
        taken = sum(map(float, results)) * 2**20
        assert taken <= places * place + context
    model.close()


def test_contexts_stay_within_the_memory_including_their_fixed_cost(
    tiny_base: Base, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Beside its tokens, a context costs as much as 600 tokens. Memory suffices for two contexts of
    # 512 tokens, or for the tokens of four.
    monkeypatch.setattr(reckoning, "context_bytes", lambda names, *_: (1 << 20, 600 << 20))
    monkeypatch.setattr("personalpeft.host.total_memory", lambda: 8 * (2 * 600 + 2 * 512 << 20))
    backend = llamacpp_backend(tiny_base, shared_cache, slots=3, rows=4)
    for seed, name in enumerate(("one", "two")):
        attach(backend, name, random_stack(backend, seed))
    writing = Batch(backend)
    first, _ = (writing.join(row(backend, "hello", stack, max_tokens=8)) for stack in ("one", None))
    last = row(backend, "hello", "two", max_tokens=8)
    assert backend.admit(last) is None
    writing.leave(first)
    assert writing.join(last)
    writing.finish()
    backend.close()
