"""A reply's bits depend on its request alone, not on caches, batches, prompt chunks or learns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias

import pytest
from backend_makers import (
    INSTRUCTION_SETS,
    Batch,
    attach,
    bits,
    bytes_of,
    continuation,
    device_choice,
    generate,
    generate_staggered,
    generate_uncached,
    random_stack,
    row,
    session_spec,
    train,
    training_steps,
)
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.backends.base import Backend
from personalpeft.backends.sequence import SequenceState
from personalpeft.backends.torch.ops.base import KV_BLOCK_SIZE
from personalpeft.base_models.types import Base
from personalpeft.host import cpu_flags
from personalpeft.learning.train.losses import ContextDistillationLoss

ROWS = 6
OWNERS = ("ada", "ben")
# One prompt exceeds the chunk of a step, so that its cuts depend on the other rows.
PROMPTS = ("hello", "what is this? " * 3, "x", "a long story about rain. " * 6)


@pytest.fixture(params=["default", pytest.param("other", marks=pytest.mark.exhaustive)])
def backend(request: pytest.FixtureRequest, base: Base, shared_cache: Path) -> Backend:
    """The backend in the precision that the device prefers, or in the other one."""
    from personalpeft.backends.torch.backend import TorchBackend
    from personalpeft.backends.torch.device import choose_device

    where = device_choice("float32")
    default = choose_device(gpu=where.device.type == "cuda").dtype
    if request.param == "default":
        where = replace(where, dtype=default)
    elif default == where.dtype:
        pytest.skip("the device does not multiply bfloat16")
    made = TorchBackend(base, where=where, cache=shared_cache, slots=3, rows=ROWS)
    if not made.batch_invariant:
        pytest.skip(f"nothing is promised here: {made.description}")
    for seed in (1, 2):
        attach(made, f"s{seed}", random_stack(made, seed, rank=3 * seed, size=0.2))
    return made


Case: TypeAlias = tuple[str, str | None, str, float, int]
"""Prompt, stack, owner, temperature and seed."""

requests: st.SearchStrategy[Case] = st.tuples(
    st.sampled_from(PROMPTS),
    st.sampled_from([None, "s1", "s2"]),
    st.sampled_from(OWNERS),
    st.sampled_from([0.0, 0.9]),
    st.integers(0, 3),
)


def rows_of(backend: Backend, cases: Sequence[Case], max_tokens: int) -> list[SequenceState]:
    return [
        row(
            backend,
            prompt,
            stack,
            owner=owner,
            logprobs=True,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        )
        for prompt, stack, owner, temperature, seed in cases
    ]


def test_a_reply_has_the_same_bits_cold_cached_chunked_and_batched(backend: Backend) -> None:
    @examples(3)
    @given(cases=st.lists(requests, min_size=1, max_size=ROWS), data=st.data())
    def holds(cases: list[Case], data: st.DataObject) -> None:
        rows = rows_of(backend, cases, max_tokens=8)
        alone = [bits(generate_uncached(backend, each)) for each in rows]
        for _ in range(2):
            steps = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
            assert [bits(reply) for reply in generate_staggered(backend, rows, steps)] == alone

    holds()


def test_a_reference_has_the_same_bits_in_any_pass(backend: Backend) -> None:
    terms = [
        ContextDistillationLoss(item, item)
        for repeats in (1, 4, 9)
        for item in (
            continuation(backend, f"{'What was it? ' * repeats}{end}", "It is so.")
            for end in ("Why?", "Who?")
        )
    ]
    trained = set()
    for groups in ([terms], [[term] for term in terms]):
        session = backend.session(session_spec(backend, base_key="s1"))
        for group in groups:
            session.precompute_ref_log_probs(group)
        session.step(terms, 1e-2)
        trained.add(bytes_of(session))
        session.close()
    assert len(trained) == 1


def test_a_preempted_row_resumes_with_the_same_bits(backend: Backend) -> None:
    @examples(2)
    @given(cases=st.lists(requests, min_size=2, max_size=3), data=st.data())
    def holds(cases: list[Case], data: st.DataObject) -> None:
        hotter = [(*case[:3], 2 * case[3], case[4]) for case in cases]
        rows = rows_of(backend, hotter, max_tokens=40)
        alone = [generate_uncached(backend, each) for each in rows]
        backend.clear_cache()
        writing = Batch(backend)
        try:
            replies = [writing.join(each) for each in rows]
            preempted: dict[int, Callable[[], bool]] = {}
            for _ in range(data.draw(st.integers(1, 5))):
                writing.step(data.draw(st.integers(0, 20)))
                number = data.draw(st.integers(0, len(rows) - 1))
                if replies[number].finish is None and number not in preempted:
                    preempted[number] = writing.preempt(replies[number])
                if data.draw(st.booleans()):
                    # Nothing is cached, so the whole prompt is read again.
                    backend.clear_cache()
                for each in (
                    data.draw(st.sets(st.sampled_from(sorted(preempted)))) if preempted else ()
                ):
                    assert preempted.pop(each)()
            assert all(resume() for resume in preempted.values())
            writing.finish()
            assert [(bits(reply), reply.text, reply.finish) for reply in replies] == [
                (bits(reply), reply.text, reply.finish) for reply in alone
            ]
        finally:
            writing.abandon()

    holds()


def test_decoded_blocks_are_reused_only_with_a_prompts_bits(
    backend: Backend,
) -> None:
    first = row(backend, PROMPTS[1], "s1", logprobs=True, max_tokens=80, temperature=1.5, seed=4)
    reply = generate_uncached(backend, first)
    longer = replace(first, prompt_tokens=first.prompt_tokens + reply.tokens + first.prompt_tokens)
    expected = bits(generate_uncached(backend, longer))
    generate_uncached(backend, first)
    before = backend.occupancy().reused_tokens
    assert bits(generate(backend, [longer])[0]) == expected
    # Whole blocks of the reply were found, not of the first prompt alone.
    assert len(reply.tokens) < 40 or backend.occupancy().reused_tokens - before > len(
        first.prompt_tokens
    )


def reused(backend: Backend, rows: Sequence[SequenceState]) -> int:
    """Generate the rows together; check their bits; return how many tokens were not read again."""
    expected = [bits(generate_uncached(backend, each)) for each in rows]
    backend.clear_cache()
    before = backend.occupancy().reused_tokens
    assert [bits(reply) for reply in generate(backend, rows)] == expected
    backend.check_integrity()
    return backend.occupancy().reused_tokens - before


@pytest.mark.parametrize("same", [1, KV_BLOCK_SIZE - 1, KV_BLOCK_SIZE, 3 * KV_BLOCK_SIZE + 5])
def test_prompts_share_their_beginning_to_the_token(backend: Backend, same: int) -> None:
    first = row(backend, "the first of many. " * 12, "s1", logprobs=True, max_tokens=4)
    tokens = first.prompt_tokens
    assert len(tokens) > 5 * KV_BLOCK_SIZE
    changed = (*tokens[:same], *(1 if token != 1 else 2 for token in tokens[same:]))
    second = replace(first, prompt_tokens=changed)
    expected = bits(generate_uncached(backend, second))
    backend.clear_cache()
    generate(backend, [first])
    before = backend.occupancy().reused_tokens
    assert bits(generate(backend, [second])[0]) == expected
    assert backend.occupancy().reused_tokens - before == same
    backend.check_integrity()


def test_rows_that_come_together_read_a_common_beginning_once(backend: Backend) -> None:
    prompt = "a long story about rain. " * 6
    rows = [
        row(backend, prompt + word, "s1", logprobs=True, max_tokens=6)
        for word in ("one", "two", "three")
    ]
    columns = zip(*(each.prompt_tokens for each in rows), strict=False)
    common = len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
    # Whole blocks are waited for. A part of a block is copied only where it was read before.
    assert reused(backend, rows) >= 2 * (common // KV_BLOCK_SIZE * KV_BLOCK_SIZE) > 0


def test_rows_of_other_owners_or_stacks_share_nothing(backend: Backend) -> None:
    prompt = "a long story about rain. " * 6
    rows = [
        row(backend, prompt, key, owner=owner, logprobs=True, max_tokens=4)
        for key, owner in (("s1", "ada"), ("s1", "ben"), ("s2", "ada"), (None, "ada"))
    ]
    assert reused(backend, rows) == 0


def test_a_learn_of_another_user_changes_no_bit(backend: Backend) -> None:
    each = row(backend, PROMPTS[3], "s1", logprobs=True)
    before = bits(generate_uncached(backend, each))
    session = backend.session(session_spec(backend))
    train(session, training_steps(backend, 2))
    assert bits(generate_uncached(backend, each)) == before
    session.close()
    assert bits(generate_uncached(backend, each)) == before


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [name for name, (flag, _) in INSTRUCTION_SETS.items() if flag in cpu_flags().split()]
)
def test_batch_invariance_holds_with_each_instruction_set_of_this_processor(
    name: str, tmp_path: Path
) -> None:
    _, limits = INSTRUCTION_SETS[name]
    command = [
        sys.executable,
        "-m",
        "pytest",
        __file__,
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
    ]
    done = subprocess.run(
        [*command, "-k", "not instruction_set"],
        env={
            **os.environ,
            **limits,
            "PERSONALPEFT_CACHE": str(tmp_path),
            "PERSONALPEFT_TEST_DEVICE": "cpu",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
