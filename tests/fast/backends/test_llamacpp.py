"""llama.cpp computes what torch computes, of every kind of model that our cards name, with and without a stack."""

from __future__ import annotations

import json
import os
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
    Writing,
    Written,
    attach,
    base_with_merges,
    composed,
    lessons,
    llamacpp_backend,
    row,
    spec,
    torch_backend,
    train,
    written,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from personalpeft.backends.base import Backend, Continuation, SequenceState
from personalpeft.backends.llamacpp import backend as reckoning
from personalpeft.backends.llamacpp.backend import LlamaCppBackend, context_bytes
from personalpeft.backends.llamacpp.binding import ContextParams, Model
from personalpeft.backends.llamacpp.context_pool import CHUNK
from personalpeft.base_models.gguf.file import resolve_gguf_file
from personalpeft.base_models.gguf.tensor_names import gguf_names
from personalpeft.base_models.gguf.writer import write_gguf
from personalpeft.base_models.types import Base
from personalpeft.errors import WeightsError
from personalpeft.types import Message, Sampling

few = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("stack", [None, "one"])
def test_every_kind_of_model_says_on_llamacpp_what_it_says_on_torch(
    base: Base, stack: str | None, shared_cache: Path
) -> None:
    both = [
        torch_backend(base, slots=1, rows=4),
        llamacpp_backend(base, shared_cache, slots=1, rows=4),
    ]
    prompts = ("hello", "what is this? " * 9)
    said = []
    for backend in both:
        attach(backend, "one", composed(backend, 1, rank=3, size=0.2))
        replies = written(
            backend,
            [row(backend, prompt, stack, max_tokens=12, logprobs=True) for prompt in prompts],
        )
        said.append(replies)
    for ours, theirs in zip(*said, strict=True):
        assert ours.tokens == theirs.tokens
        assert np.allclose(ours.logprobs, theirs.logprobs, atol=2e-3)
    both[1].close()


def test_a_lane_that_grows_keeps_what_it_holds_to_the_bit(llamacpp_tiny: Backend) -> None:
    long = row(llamacpp_tiny, "hello " * 90, max_tokens=300, logprobs=True)
    llamacpp_tiny.clear_cache()
    (cold,) = written(llamacpp_tiny, [long])
    llamacpp_tiny.clear_cache()
    written(llamacpp_tiny, [row(llamacpp_tiny, "hello " * 60, max_tokens=4)])
    before = llamacpp_tiny.occupancy().reused_tokens
    (grown,) = written(llamacpp_tiny, [long])
    assert llamacpp_tiny.occupancy().reused_tokens > before
    assert (grown.tokens, grown.logprobs) == (cold.tokens, cold.logprobs)


def test_the_next_turn_of_a_conversation_reads_whole_parts_of_the_prompt_before_no_more(
    llamacpp_tiny: Backend,
) -> None:
    llamacpp_tiny.clear_cache()
    long = "a question of some length, " * 9
    first = row(llamacpp_tiny, long, owner="ada", max_tokens=40)
    written(llamacpp_tiny, [first])
    before = llamacpp_tiny.occupancy().reused_tokens
    written(llamacpp_tiny, [row(llamacpp_tiny, long + "and more", owner="bo", max_tokens=4)])
    assert llamacpp_tiny.occupancy().reused_tokens == before
    following = row(llamacpp_tiny, long + "and more", owner="ada", max_tokens=4)
    written(llamacpp_tiny, [following])
    same = next(
        n
        for n, (a, b) in enumerate(zip(first.prompt_tokens, following.prompt_tokens, strict=False))
        if a != b
    )
    assert llamacpp_tiny.occupancy().reused_tokens - before == same // CHUNK * CHUNK > 0


def asked_in_turn(
    backend: Backend, owner: str, questions: Sequence[str], stack: str | None = None
) -> list[Written]:
    """The replies of one conversation, each of whose prompts begins with all that was said before."""
    said: list[Message] = []
    replies = []
    for question in questions:
        said.append(Message("user", question))
        sampling = Sampling(max_tokens=24)
        (reply,) = written(
            backend, [SequenceState(backend.render(said), stack, sampling, owner, logprobs=True)]
        )
        said.append(Message("assistant", reply.text))
        replies.append(reply)
    return replies


QUESTIONS = ("What is the sea made of? " * 5, "And the moon?", "Why do cats purr? " * 9)


@pytest.mark.parametrize("stack", [None, "one"])
def test_a_conversation_repeats_to_the_bit_whatever_was_kept_and_whoever_asked_between(
    base: Base, stack: str | None, shared_cache: Path
) -> None:
    backend = llamacpp_backend(base, shared_cache, slots=2, rows=4)
    attach(backend, "one", composed(backend, 1, rank=3, size=0.2))
    attach(backend, "two", composed(backend, 2, rank=3, size=0.2))
    first = asked_in_turn(backend, "ada", QUESTIONS, stack)
    again = asked_in_turn(backend, "ada", QUESTIONS, stack)
    asked_in_turn(backend, "ada", QUESTIONS[::-1], stack)
    asked_in_turn(backend, "bo", QUESTIONS[1:], "two")
    later = asked_in_turn(backend, "ada", QUESTIONS, stack)
    other = asked_in_turn(backend, "cy", QUESTIONS, stack)
    backend.clear_cache()
    cold = asked_in_turn(backend, "ada", QUESTIONS, stack)
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
        attach(backend, name, composed(backend, seed, rank=2))
    yield backend
    backend.close()


@few
@given(
    company=st.lists(
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
def test_a_reply_is_the_same_to_the_bit_whoever_is_served_beside_it(
    with_two: LlamaCppBackend,
    company: list[tuple[int, str, int, str | None]],
    forgets: bool,
    stack: str | None,
) -> None:
    asked = row(with_two, QUESTIONS[0], stack, owner="ada", logprobs=True, max_tokens=16)
    (alone,) = written(with_two, [asked])
    writing = Writing(with_two)
    replies = []
    for number, (steps, owner, length, other) in enumerate(company):
        writing.join(row(with_two, QUESTIONS[0][:length], other, owner=owner, max_tokens=12))
        if number == 0:
            replies.append(writing.join(asked))
        writing.step(steps)
        if forgets:
            with_two.clear_cache()
    writing.finish()
    replies += written(with_two, [asked])
    assert {(reply.tokens, reply.logprobs) for reply in replies} == {(alone.tokens, alone.logprobs)}


def test_torch_is_let_go_of_when_nothing_learns_any_more(
    tiny_base: Base, shared_cache: Path
) -> None:
    backend = llamacpp_backend(tiny_base, shared_cache, slots=1)
    session = backend.session(spec(backend))
    train(session, lessons(backend, 2))
    session.close()
    session.close()
    assert backend._training._backend is None
    with pytest.raises(ValueError, match="session"):
        backend.advance([session], [[]], [0.1])
    backend.close()


def test_a_context_that_is_used_again_knows_nothing_of_the_stack_before(
    tiny_base: Base, shared_cache: Path
) -> None:
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
    with pytest.raises(ValueError, match="2048"):
        llamacpp_tiny.score([Continuation((1,) * 10**5, (1,))], None)


@pytest.fixture
def own(tiny_base: Base, shared_cache: Path) -> Iterator[LlamaCppBackend]:
    """A backend of this test alone, with one slot."""
    backend = LlamaCppBackend(tiny_base, slots=1, rows=4, cache=shared_cache, threads=1)
    yield backend
    backend.close()


def test_what_is_scored_after_another_stack_took_the_slot_is_scored_with_that_one(
    own: LlamaCppBackend,
) -> None:
    item = Continuation((1, 2, 3), (4, 5))
    said: dict[int, set[float]] = {}
    for number in (1, 2, 3, 1, 3, 2, 1):
        attach(own, f"s{number}", composed(own, number, rank=1 + number))
        (score,) = own.score([item], f"s{number}", kl=True)
        said.setdefault(number, set()).add(round(score.logp, 5))
        own.detach(f"s{number}")
    assert [len(each) for each in said.values()] == [1, 1, 1]
    assert len(set.union(*said.values())) == 3


def test_what_is_forgotten_while_it_is_scored_waits_for_it(
    own: LlamaCppBackend,
) -> None:
    items = [Continuation((n % 200, 2, 3), (4, 5, 6)) for n in range(200)]
    attach(own, "one", composed(own, 1))
    whole = own.score(items, "one")
    said: list[object] = []
    scorer = threading.Thread(target=lambda: said.append(own.score(items, "one")))
    with begun(own) as reading:
        scorer.start()
        reading()
        own.clear_cache()
        own.clear_cache()
    scorer.join()
    assert said == [whole]
    own.detach("one")
    attach(own, "two", composed(own, 2))
    assert own.score(items[:1], "two")


def test_who_is_scored_while_it_closes_hears_so_and_nothing_freed_is_read(
    own: LlamaCppBackend,
) -> None:
    attach(own, "one", composed(own, 1))
    failed: list[RuntimeError] = []

    def score() -> None:
        try:
            own.score([Continuation((n % 200, 2, 3), (4, 5, 6)) for n in range(2000)], "one")
        except RuntimeError as error:
            failed.append(error)

    scorer = threading.Thread(target=score)
    with begun(own) as reading:
        scorer.start()
        reading()
        own.close()
    scorer.join()
    assert [str(error) for error in failed] == ["the backend is closed"]


@contextmanager
def begun(backend: LlamaCppBackend) -> Iterator[Callable[[], object]]:
    """Gives what waits until an item is being scored."""
    read, reading = backend._scorer._read, threading.Event()

    def watched(*asked: Any) -> Any:
        reading.set()
        return read(*asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend._scorer, "_read", watched)
        yield lambda: reading.wait(20)


def test_a_context_that_cannot_be_made_takes_no_slot(
    own: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(own, "one", composed(own, 1))
    with monkeypatch.context() as broken:
        broken.setattr("personalpeft.backends.llamacpp.binding.Context.__init__", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            own.admit(row(own, "hello", "one"))
    own.detach("one")
    attach(own, "two", composed(own, 2))
    assert written(own, [row(own, "hello", "two")])[0].text


def failing(*_: object) -> None:
    raise RuntimeError("out of memory")


def test_sessions_above_different_stacks_need_no_more_slots_than_stand_at_once(
    own: LlamaCppBackend,
) -> None:
    for name in ("one", "two"):
        attach(own, name, composed(own, 1))
        session = own.session(spec(own, base_key=name))
        own.detach(name)
        train(session, lessons(own, 1))
        session.close()


def test_many_rows_of_one_stack_are_served_at_once(tiny_base: Base, shared_cache: Path) -> None:
    backend = LlamaCppBackend(tiny_base, slots=1, rows=140, cache=shared_cache, threads=1)
    rows = [row(backend, f"{n % 3}", max_tokens=2) for n in range(140)]
    replies = written(backend, rows)
    assert len({reply.tokens for reply in replies[::3]}) == 1
    assert backend.occupancy().used_tokens == 0
    backend.close()


def test_after_it_is_closed_nothing_is_computed(own: LlamaCppBackend) -> None:
    own.admit(row(own, "hello"))
    own.close()
    assert list(own.step()) == []
    with pytest.raises(RuntimeError, match="closed"):
        own.session(spec(own))


def test_a_continuation_of_nothing_is_refused(own: LlamaCppBackend) -> None:
    for item in (Continuation((), (1,)), Continuation((1,), ())):
        with pytest.raises(ValueError, match="prompt"):
            own.score([item], None)


def test_prompts_are_read_within_one_budget_whatever_their_stacks(
    tiny_base: Base, shared_cache: Path
) -> None:
    backend = LlamaCppBackend(tiny_base, slots=3, rows=4, cache=shared_cache, threads=1)
    for name in ("one", "two", "three"):
        attach(backend, name, composed(backend, len(name)))
    writing = Writing(backend)
    writing.join(row(backend, "hello", max_tokens=30))
    writing.step()
    before = backend.occupancy().used_tokens
    for name in ("one", "two", "three"):
        writing.join(row(backend, "x" * 400, name, max_tokens=2))
    writing.step()
    assert backend.occupancy().used_tokens - before <= 65
    writing.finish()
    backend.close()


def test_a_vocabulary_with_merges_and_embeddings_to_spare_is_served(
    tmp_path: Path, shared_cache: Path
) -> None:
    base = base_with_merges(tmp_path)
    both = [
        torch_backend(base, slots=1, rows=1),
        llamacpp_backend(base, shared_cache, slots=1, rows=1),
    ]
    said = [written(backend, [row(backend, "the cat", max_tokens=8)])[0].tokens for backend in both]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": None},
        {"sliding_window": 16},
        {"hidden_act": "relu"},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_what_llamacpp_would_compute_otherwise_is_refused_by_name(
    changes: dict[str, object], tiny_base: Base, tmp_path: Path
) -> None:
    config = json.loads((tiny_base.folder / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}), "utf-8")
    base = replace(tiny_base, folder=tmp_path)
    with pytest.raises(WeightsError):
        write_gguf(base, gguf_names(base), tmp_path / "model.gguf")


def test_what_a_lane_takes_is_reckoned_at_no_less_than_llamacpp_says(
    base: Base, shared_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = gguf_names(base)
    file = resolve_gguf_file(base, names, shared_cache)
    model = Model(file, repack=False)
    for places in (512, 4096):
        shape = ContextParams(places, CHUNK, 1, 1, names.full)
        place, lane = context_bytes(names, model.vocab_size, shape)
        caplog.clear()
        with caplog.at_level("DEBUG", "personalpeft.backends.llamacpp.binding"):
            model.new_context(shape, None).close()
        said = re.findall(r"buffer size = +([0-9.]+) MiB", caplog.text)
        assert len(said) >= 3
        taken = sum(map(float, said)) * 2**20
        assert taken <= places * place + lane
    model.close()


def test_lanes_keep_within_the_memory_with_what_each_takes_besides_its_tokens(
    tiny_base: Base, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each lane takes as much as 600 tokens besides, and there is memory for two lanes of 512, or for the tokens of four.
    monkeypatch.setattr(reckoning, "context_bytes", lambda names, *_: (1 << 20, 600 << 20))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(reckoning, "_MEMORY_SHARE", (2 * 600 + 2 * 512 << 20) / memory)
    backend = llamacpp_backend(tiny_base, shared_cache, slots=3, rows=4)
    for seed, name in enumerate(("one", "two")):
        attach(backend, name, composed(backend, seed))
    writing = Writing(backend)
    first, _ = (writing.join(row(backend, "hello", stack, max_tokens=8)) for stack in ("one", None))
    last = row(backend, "hello", "two", max_tokens=8)
    assert backend.admit(last) is None
    writing.leave(first)
    assert writing.join(last)
    writing.finish()
    backend.close()
