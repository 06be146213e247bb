"""A reply's bits depend on its own request alone: not on what is cached, on company, on how the prompt is cut, or on learns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from backend_makers import (
    INSTRUCTION_SETS,
    Writing,
    attach,
    bits,
    cold,
    composed,
    lessons,
    row,
    spec,
    staggered,
    train,
    written,
)
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.backends.base import Backend
from personalpeft.backends.batch_invariance import BatchInvariance
from personalpeft.backends.torch.processor import cpu_flags
from personalpeft.base_models.types import Base

ROWS = 6
OWNERS = ("ada", "ben")
# One is longer than what is read at once beside other rows, so it is cut where the others happen to be.
PROMPTS = ("hello", "what is this? " * 3, "x", "a long story about rain. " * 6)


@pytest.fixture(params=["float32", "bfloat16"])
def backend(request: pytest.FixtureRequest, base: Base, shared_cache: Path) -> Backend:
    from personalpeft.backends.torch.backend import TorchBackend
    from personalpeft.backends.torch.model_runner import DeviceChoice, choose_device

    dtype = getattr(torch, request.param)
    if dtype == torch.bfloat16 and choose_device().dtype != dtype:
        pytest.skip("the processor does not multiply bfloat16")
    where = DeviceChoice(torch.device("cpu"), dtype, "for tests")
    made = TorchBackend(base, where=where, cache=shared_cache, slots=3, rows=ROWS)
    if made.batch_invariance is not BatchInvariance.HOLDS:
        pytest.skip(f"nothing is promised here: {made.description}")
    for seed in (1, 2):
        attach(made, f"s{seed}", composed(made, seed, rank=3 * seed, size=0.2))
    return made


requests = st.tuples(
    st.sampled_from(PROMPTS),
    st.sampled_from([None, "s1", "s2"]),
    st.sampled_from(OWNERS),
    st.sampled_from([0.0, 0.9]),
    st.integers(0, 3),
)


def test_a_reply_is_the_same_bits_cold_warm_cut_and_in_company(backend: Backend) -> None:
    @examples(5)
    @given(asked=st.lists(requests, min_size=1, max_size=ROWS), data=st.data())
    def holds(asked: list[tuple[str, str | None, str, float, int]], data: st.DataObject) -> None:
        rows = [
            row(
                backend,
                prompt,
                stack,
                owner=owner,
                logprobs=True,
                max_tokens=8,
                temperature=temperature,
                seed=seed,
            )
            for prompt, stack, owner, temperature, seed in asked
        ]
        alone = [bits(cold(backend, each)) for each in rows]
        for _ in range(2):
            steps = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
            assert [bits(reply) for reply in staggered(backend, rows, steps)] == alone

    holds()


def test_a_row_that_was_preempted_goes_on_with_the_same_bits(backend: Backend) -> None:
    @examples(6)
    @given(asked=st.lists(requests, min_size=1, max_size=4), data=st.data())
    def holds(asked: list[tuple[str, str | None, str, float, int]], data: st.DataObject) -> None:
        rows = [
            row(
                backend,
                prompt,
                stack,
                owner=owner,
                logprobs=True,
                max_tokens=40,
                temperature=2 * temperature,
                seed=seed,
            )
            for prompt, stack, owner, temperature, seed in asked
        ]
        alone = [cold(backend, each) for each in rows]
        backend.clear_cache()
        writing = Writing(backend)
        try:
            replies = [writing.join(each) for each in rows]
            preempted: dict[int, Callable[[], bool]] = {}
            for _ in range(data.draw(st.integers(1, 5))):
                writing.step(data.draw(st.integers(0, 20)))
                number = data.draw(st.integers(0, len(rows) - 1))
                if replies[number].finish is None and number not in preempted:
                    preempted[number] = writing.preempt(replies[number])
                if data.draw(st.booleans()):
                    # Nothing is found again, so all of it is read anew.
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


def test_what_decoding_wrote_is_found_again_only_as_a_prompt_would_have_it(
    backend: Backend,
) -> None:
    first = row(backend, PROMPTS[1], "s1", logprobs=True, max_tokens=80, temperature=1.5, seed=4)
    reply = cold(backend, first)
    longer = replace(first, prompt_tokens=first.prompt_tokens + reply.tokens + first.prompt_tokens)
    expected = bits(cold(backend, longer))
    cold(backend, first)
    before = backend.occupancy().reused_tokens
    assert bits(written(backend, [longer])[0]) == expected
    # Whole blocks of the reply were found, not of the first prompt alone.
    assert len(reply.tokens) < 40 or backend.occupancy().reused_tokens - before > len(
        first.prompt_tokens
    )


def test_a_learn_of_another_user_changes_no_bit(backend: Backend) -> None:
    each = row(backend, PROMPTS[3], "s1", logprobs=True)
    before = bits(cold(backend, each))
    session = backend.session(spec(backend))
    train(session, lessons(backend, 2))
    assert bits(cold(backend, each)) == before
    session.close()
    assert bits(cold(backend, each)) == before


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [name for name, (flag, _) in INSTRUCTION_SETS.items() if flag in cpu_flags().split()]
)
def test_it_holds_with_each_instruction_set_that_this_processor_has(
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
        env={**os.environ, **limits, "PERSONALPEFT_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
