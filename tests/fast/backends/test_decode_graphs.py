"""Recorded decoding steps give the bits of steps that are not recorded.

Without a GPU, a recording that computes its step again stands for a CUDA graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backend_makers import (
    attach,
    bits,
    device_choice,
    generate,
    generate_staggered,
    random_stack,
    row,
)
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from personalpeft.backends.torch.backend import TorchBackend
from personalpeft.backends.torch.decode_graphs import Step, record_cuda_graph
from personalpeft.base_models.types import Base

ROWS = 6
STACKS = (None, "s1", "s2")
DEVICE = device_choice("float32")


def repeated(step: Step) -> Step:
    """Return a recording that computes its step again."""
    logits = step()

    @torch.inference_mode()
    def replay() -> Tensor:
        return logits.copy_(step())

    return replay


class Recorder:
    """Counts recordings and replays, and fails on demand."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.fails = False

    def __call__(self, step: Step) -> Step:
        if self.fails:
            raise RuntimeError("the device cannot record")
        self.recorded += 1
        recording = (record_cuda_graph if DEVICE.device.type == "cuda" else repeated)(step)

        def replay() -> Tensor:
            self.replayed += 1
            return recording()

        return replay


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def recorded(tiny_base: Base, shared_cache: Path, recorder: Recorder) -> TorchBackend:
    return make(tiny_base, shared_cache, record=recorder)


@pytest.fixture
def plain(tiny_base: Base, shared_cache: Path) -> TorchBackend:
    """The same backend without recordings."""

    def fail() -> None:
        raise RuntimeError("no graphs in this test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", fail)
        return make(tiny_base, shared_cache)


def make(base: Base, cache: Path, **more: Any) -> TorchBackend:
    backend = TorchBackend(base, where=DEVICE, cache=cache, slots=3, rows=ROWS, **more)
    for seed in (1, 2):
        attach(backend, f"s{seed}", random_stack(backend, seed, rank=3 * seed, size=0.2))
    return backend


requests = st.tuples(
    st.sampled_from(["hello", "what is this? " * 3, "a long story about rain. " * 6]),
    st.sampled_from(STACKS),
    st.sampled_from([0.0, 0.9]),
    st.integers(1, 12),
)


def test_recorded_steps_have_the_bits_of_others(
    recorded: TorchBackend, plain: TorchBackend, recorder: Recorder
) -> None:
    if not plain.batch_invariant:
        pytest.skip(f"padding may change bits here: {plain.description}")

    @examples(6)
    @given(cases=st.lists(requests, min_size=1, max_size=ROWS), data=st.data())
    def holds(cases: list[tuple[str, str | None, float, int]], data: st.DataObject) -> None:
        rows = [
            row(recorded, prompt, stack, logprobs=True, temperature=heat, seed=1, max_tokens=most)
            for prompt, stack, heat, most in cases
        ]
        steps = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
        replies = generate_staggered(recorded, rows, steps)
        assert [bits(reply) for reply in replies] == [
            bits(generate(plain, [each])[0]) for each in rows
        ]

    holds()
    assert recorder.replayed > recorder.recorded > 1


def test_a_stack_of_a_higher_rank_is_used_by_steps_that_were_recorded_before_it(
    recorded: TorchBackend, plain: TorchBackend
) -> None:
    request = row(recorded, "hello", "s1", logprobs=True)
    before = bits(generate(recorded, [request])[0])
    for backend in (recorded, plain):
        attach(backend, "large", random_stack(backend, 9, rank=40, size=0.2))
    large = row(recorded, "hello", "large", logprobs=True)
    assert bits(generate(recorded, [large])[0]) == bits(generate(plain, [large])[0])
    assert bits(generate(recorded, [request])[0]) == before


def test_a_longer_row_reads_tables_that_were_recorded_before_it(
    recorded: TorchBackend, plain: TorchBackend
) -> None:
    for prompt in ("hello", "a long story about rain. " * 40, "hello"):
        request = row(recorded, prompt, "s2", logprobs=True)
        assert bits(generate(recorded, [request])[0]) == bits(generate(plain, [request])[0])


def test_a_step_that_cannot_be_recorded_runs(
    recorded: TorchBackend, plain: TorchBackend, recorder: Recorder
) -> None:
    recorder.fails = True
    rows = [row(recorded, "hello", stack, logprobs=True) for stack in STACKS]
    assert [bits(reply) for reply in generate(recorded, rows)] == [
        bits(reply) for reply in generate(plain, rows)
    ]


def test_a_device_that_cannot_record_says_so(tiny_base: Base, recorder: Recorder) -> None:
    recorder.fails = True
    backend = TorchBackend(tiny_base, where=DEVICE, record=recorder)
    assert "the device cannot record" in backend.description
    assert generate(backend, [row(backend, "hello")])[0].tokens


def test_a_recording_that_gives_other_results_is_not_used(tiny_base: Base) -> None:
    def wrong(step: Step) -> Step:
        logits = step()

        @torch.inference_mode()
        def replay() -> Tensor:
            return logits.add_(1)

        return replay

    backend = TorchBackend(tiny_base, where=DEVICE, record=wrong)
    assert "other results" in backend.description
    assert generate(backend, [row(backend, "hello")])[0].tokens
