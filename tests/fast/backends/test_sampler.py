"""Sampling equals sampling from the sorted vocabulary, without sorting it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from example_counts import examples
from hypothesis import example, given
from hypothesis import strategies as st

from personalpeft.backends.sampler import Sampler, token_logprobs
from personalpeft.backends.torch.batch_sampling import (
    draw_tokens,
    sample_on_device,
    sample_tokens,
)
from personalpeft.backends.torch.ops import Ops
from personalpeft.types import Sampling

Logits = npt.NDArray[np.float32]

_OPS = Ops(torch.device("cpu"), torch.float32)


class SortedSampler:
    """Samples by definition: sort all tokens, keep the first ones, then draw."""

    def __init__(self, sampling: Sampling, *, by_torch: bool = False) -> None:
        self._sampling, self._by_torch = sampling, by_torch
        self._generator = np.random.Generator(np.random.PCG64(sampling.seed))

    def pick(self, logits: Logits) -> int:
        drops = logits.max() - logits
        order = np.argsort(drops, kind="stable")[: self._sampling.top_k or None]
        if self._sampling.top_p == 1:
            order = np.sort(order)
        scaled = drops[order] / -np.float32(max(self._sampling.temperature, 1e-4))
        # Of torch: two libraries differ in the last bit, and a draw may hit it.
        chances = torch.from_numpy(scaled).exp().numpy() if self._by_torch else np.exp(scaled)
        # Whole numbers of any size, so that no sum is rounded.
        weights = [int(weight) for weight in np.rint(chances * np.float32(2**30))]
        nucleus = self._first(weights, math.ceil(self._sampling.top_p * sum(weights)))
        mass = sum(weights[: nucleus + 1])
        drawn = math.floor(self._generator.random() * mass) + 1
        return int(order[self._first(weights, drawn)])

    def _first(self, weights: list[int], target: int) -> int:
        summed = 0
        for index, weight in enumerate(weights):
            summed += weight
            if summed >= target:
                return index
        raise AssertionError("the weights are below the target")


# Values of top_p that sums of equal probabilities hit exactly, and ones close to 0 and 1.
_TOP_P = st.one_of(
    st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1e-300, 1 - 2**-53, 1 - 1e-12]),
    st.floats(0, 1, exclude_min=True, exclude_max=True),
)
_TEMPERATURE = st.sampled_from([1e-6, 0.01, 0.3, 0.7, 1.0, 2.0, 10.0])
# Few distinct values make many tokens equally likely; -inf has no probability.
_FEW = st.lists(
    st.sampled_from([-np.inf, -40.0, -1.0, 0.0, 0.5, 30.0]), min_size=1, max_size=60
).filter(lambda values: max(values) > -np.inf)
_MANY = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=60)
_SEED = st.integers(0, 2**32)


def _vocabulary(kind: str, size: int, seed: int) -> Logits:
    """Return logits of a large vocabulary, of a kind that is hard to select from."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal(size).astype(np.float32)
    match kind:
        case "peaked":
            logits[random.integers(0, size, 40)] += np.float32(12)
        case "flat":
            logits *= np.float32(0.01)
        case "equal":
            logits[:] = 1
        case "tied":
            logits = np.round(logits * 4) / 4
        case "masked":
            logits[random.random(size) < 0.9] = -np.inf
        case "flat below one":
            logits *= np.float32(1e-4)
            logits[random.integers(0, size)] = 5
    return logits.astype(np.float32)


_KINDS = ("peaked", "flat", "equal", "tied", "masked", "flat below one")


@examples(60)
@given(
    values=_FEW | _MANY,
    top_p=_TOP_P,
    temperature=_TEMPERATURE,
    seed=_SEED,
    top_k=st.integers(0, 70),
)
@example(values=[0.0, -0.0], top_p=0.1, temperature=1.0, seed=0, top_k=0)
def test_a_seed_samples_the_token_of_the_sorted_vocabulary(
    values: list[float], top_p: float, temperature: float, seed: int, top_k: int
) -> None:
    logits = np.array(values, np.float32)
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed, top_k=top_k)
    ours, plain = Sampler(sampling), SortedSampler(sampling)
    assert [ours.sample(logits) for _ in range(8)] == [plain.pick(logits) for _ in range(8)]


@examples(15)
@given(
    kind=st.sampled_from(_KINDS),
    top_p=_TOP_P,
    temperature=_TEMPERATURE,
    seed=_SEED,
    top_k=st.sampled_from([0, 0, 20, 5000]),
)
def test_sampling_is_exact_for_large_vocabularies_of_any_kind(
    kind: str, top_p: float, temperature: float, seed: int, top_k: int
) -> None:
    logits = _vocabulary(kind, 20_000, seed)
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed, top_k=top_k)
    ours, plain = Sampler(sampling), SortedSampler(sampling)
    assert [ours.sample(logits) for _ in range(3)] == [plain.pick(logits) for _ in range(3)]


@examples(30)
@given(
    rows=st.lists(
        st.tuples(
            _TEMPERATURE,
            st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 1.0]),
            st.integers(0, 40),
            _SEED,
        ),
        min_size=1,
        max_size=4,
    ),
    size=st.integers(1, 30),
    kinds=st.sampled_from([1, 3, 1000]),
    most=st.integers(1, 30),
    chance=_SEED,
)
def test_a_batch_on_a_device_draws_what_each_row_draws_alone(
    rows: list[tuple[float, float, int, int]], size: int, kinds: int, most: int, chance: int
) -> None:
    drawn = np.random.default_rng(chance).integers(-1, kinds, (len(rows), size))
    logits = np.where(drawn < 0, -np.inf, drawn * 8 / kinds).astype(np.float32)
    logits[:, -1] = 1
    settings = [
        Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        for temperature, top_p, top_k, seed in rows
    ]
    draws = [Sampler(each).draw() for each in settings]
    expected = [
        SortedSampler(each, by_torch=True).pick(row)
        for each, row in zip(settings, logits, strict=True)
    ]
    numbers = torch.tensor(draws, dtype=torch.float64)
    tokens, are_right = draw_tokens(torch.from_numpy(logits), draws, numbers, most)
    for token, is_right, wanted in zip(tokens.tolist(), are_right.tolist(), expected, strict=True):
        assert token == wanted or not is_right
    tokens, are_right = draw_tokens(torch.from_numpy(logits), draws, numbers, size)
    assert tokens.tolist() == expected
    assert all(are_right)


@pytest.mark.parametrize("reported", [{}, {0: 0, 3: 5, 8: 20}])
def test_a_device_and_the_host_pick_the_same_of_a_large_vocabulary(
    reported: dict[int, int],
) -> None:
    kinds = (*_KINDS, "peaked", "flat", "tied")
    logits = np.stack([_vocabulary(kind, 20_000, seed) for seed, kind in enumerate(kinds)])
    limits = [(0.9, 0), (1.0, 0), (0.9, 40), (1.0, 40), (0.9, 0)]
    settings = [
        Sampling(temperature=0.8 * (seed != 3), top_p=top_p, top_k=top_k, seed=seed)
        for seed, (top_p, top_k) in zip(range(len(kinds)), itertools.cycle(limits))
    ]
    on_device, on_host = ([Sampler(each) for each in settings] for _ in range(2))
    for _ in range(3):
        expected = sample_tokens(torch.from_numpy(logits), on_host, reported, _OPS)
        assert sample_on_device(torch.from_numpy(logits), on_device, reported, _OPS) == expected
        tokens, logprobs = expected
        for row, top in reported.items():
            one = token_logprobs(logits[row], tokens[row], top)
            assert logprobs[row].logprob == pytest.approx(one.logprob, abs=1e-4)
            assert len(logprobs[row].top) == top


def test_logits_that_are_not_numbers_stop_neither_host_nor_device() -> None:
    """One row's model failed. The others of its batch go on."""
    broken = np.full((1, 5000), np.nan, np.float32)
    for sampling in (Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9, top_k=20)):
        for sample in (sample_tokens, sample_on_device):
            (token,), _ = sample(torch.from_numpy(broken), [Sampler(sampling)], {}, _OPS)
            assert 0 <= token < 5000
