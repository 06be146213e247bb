"""Sampling equals sampling from the sorted vocabulary, without sorting it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.backends.sampler import Sampler
from personalpeft.backends.torch.batch_sampling import draw_tokens
from personalpeft.types import Sampling

Logits = npt.NDArray[np.float32]


class SortedSampler:
    """Samples by definition: sort all tokens, keep the top-p set, then draw."""

    def __init__(self, sampling: Sampling, *, by_torch: bool = False) -> None:
        self._sampling, self._by_torch = sampling, by_torch
        self._generator = np.random.Generator(np.random.PCG64(sampling.seed))

    def pick(self, logits: Logits) -> int:
        if self._sampling.top_k:
            kept = np.sort(np.argsort(-logits, kind="stable")[: self._sampling.top_k])
            if len(kept) < len(logits):
                return int(kept[self._pick(logits[kept])])
        return self._pick(logits)

    def _pick(self, logits: Logits) -> int:
        shifted = (logits - logits.max()) / np.float32(self._sampling.temperature)
        # Of torch: two libraries differ in the last bit, and a draw may hit it.
        chances = torch.from_numpy(shifted).exp().numpy() if self._by_torch else np.exp(shifted)
        order = np.argsort(-chances, kind="stable")
        summed = np.cumsum(chances[order], dtype=np.float64)
        within = int(np.searchsorted(summed, self._sampling.top_p * summed[-1])) + 1
        summed = np.cumsum(chances[order[:within]], dtype=np.float64)
        drawn = int(np.searchsorted(summed, self._generator.random() * summed[-1], side="right"))
        return int(order[min(drawn, len(summed) - 1)])


# Values of top_p that sums of equal probabilities hit exactly, and ones close to 0 and 1.
_TOP_P = st.one_of(
    st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 1e-300, 1 - 2**-53, 1 - 1e-12]),
    st.floats(0, 1, exclude_min=True, exclude_max=True),
)
# Few distinct values make many tokens equally likely; -inf has no probability.
_FEW = st.lists(
    st.sampled_from([-np.inf, -40.0, -1.0, 0.0, 0.5, 30.0]), min_size=1, max_size=60
).filter(lambda values: max(values) > -np.inf)
_MANY = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=60)


@examples(60)
@given(
    values=_FEW | _MANY,
    top_p=_TOP_P,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    seed=st.integers(0, 2**32),
    top_k=st.integers(0, 70),
)
def test_a_seed_samples_the_token_of_the_sorted_vocabulary(
    values: list[float], top_p: float, temperature: float, seed: int, top_k: int
) -> None:
    logits = np.array(values, np.float32)
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed, top_k=top_k)
    ours, plain = Sampler(sampling), SortedSampler(sampling)
    assert [ours.sample(logits) for _ in range(8)] == [plain.pick(logits) for _ in range(8)]


@examples(20)
@given(top_p=_TOP_P, spread=st.sampled_from([0.0, 0.1, 2.0, 8.0]), seed=st.integers(0, 2**32))
def test_sampling_is_exact_for_large_vocabularies_of_any_spread(
    top_p: float, spread: float, seed: int
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(20_000) * spread).astype(np.float32)
    sampling = Sampling(temperature=1.0, top_p=top_p, seed=seed)
    ours, plain = Sampler(sampling), SortedSampler(sampling)
    assert [ours.sample(logits) for _ in range(3)] == [plain.pick(logits) for _ in range(3)]


@examples(30)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.3, 0.7, 1.0, 2.0]),
            st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 1.0]),
            st.integers(0, 40),
            st.integers(0, 2**32),
        ),
        min_size=1,
        max_size=4,
    ),
    size=st.integers(1, 30),
    kinds=st.sampled_from([1, 3, 1000]),
    chance=st.integers(0, 2**32),
)
def test_a_batch_on_a_device_draws_what_each_row_draws_alone(
    rows: list[tuple[float, float, int, int]], size: int, kinds: int, chance: int
) -> None:
    drawn = np.random.default_rng(chance).integers(0, kinds, (len(rows), size))
    logits = (drawn * 8 / kinds).astype(np.float32)
    settings = [
        Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        for temperature, top_p, top_k, seed in rows
    ]
    draws = [Sampler(each).draw() for each in settings]
    # Without a top-p set the draw is in the order of the vocabulary.
    expected = [
        Sampler(each).sample(row)
        if each.top_p == 1
        else SortedSampler(each, by_torch=True).pick(row)
        for each, row in zip(settings, logits, strict=True)
    ]
    assert draw_tokens(torch.from_numpy(logits), draws).tolist() == expected


def test_a_device_and_the_host_draw_the_same_of_a_large_vocabulary() -> None:
    logits = np.random.default_rng(0).standard_normal((8, 20_000)).astype(np.float32) * 3
    settings = [
        Sampling(temperature=0.8, top_p=top_p, top_k=top_k, seed=seed)
        for seed, (top_p, top_k) in enumerate([(1.0, 0), (0.9, 0), (1.0, 40), (0.9, 40)] * 2)
    ]
    on_device, on_host = ([Sampler(each) for each in settings] for _ in range(2))
    for _ in range(5):
        expected = [each.sample(row) for each, row in zip(on_host, logits, strict=True)]
        draws = [each.draw() for each in on_device]
        assert draw_tokens(torch.from_numpy(logits), draws).tolist() == expected
