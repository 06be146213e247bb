"""Pick the next token from logits, and report log-probs: the parts that all backends share.

Invariants: a sampler has its own random stream, so other rows of a batch do not change its draws.
Weights of tokens are whole numbers. So float64 adds them exactly, and no draw depends on the order
in which a host or a device adds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from personalpeft.types import Sampling

Logits: TypeAlias = npt.NDArray[np.float32]
Indices: TypeAlias = npt.NDArray[np.intp]

MAX_WEIGHT = 2.0**30
"""The weight of the likeliest token. Of the others it is rounded: below half of one it is zero."""

# Below this the exponents overflow. The draw is greedy in effect long before.
_MIN_TEMPERATURE = 1e-4
# A logit this many temperatures below the largest has no weight: exp(-22) * MAX_WEIGHT < 1/2.
_NO_WEIGHT = np.float32(22)
# Of more tokens, the weights of those with equal high bits are added up first. No group after the one
# that the sum ends in is sorted.
_SORTED = 2048
# Logits of a column, of which only the largest is compared with those of others at first.
_COLUMN = 64


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-prob of a token (nats, at temperature 1), and the likeliest tokens with theirs."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Draw(NamedTuple):
    """One draw, for a device that samples as ``Sampler.sample`` does.

    ``number`` is uniform in [0, 1). A ``top_k`` of 0 keeps all tokens.
    """

    temperature: float
    top_p: float
    top_k: int
    number: float


class Sampler:
    """Picks the tokens of one sequence, with draws of PCG64."""

    def __init__(self, sampling: Sampling) -> None:
        self.is_greedy = sampling.temperature <= 0
        self._temperature = np.float32(max(sampling.temperature, _MIN_TEMPERATURE))
        self._top_p, self._top_k = sampling.top_p, sampling.top_k
        self._generator = np.random.Generator(np.random.PCG64(sampling.seed))

    def sample(self, logits: Logits) -> int:
        """Return the next token, from ``[vocabulary]`` logits.

        It is the likeliest token or a draw (nucleus sampling, Holtzman et al. 2019, section 3.1).
        The draw is from the smallest set of tokens with a probability of at least ``top_p``. With
        ``top_k`` these are probabilities among that many of the likeliest tokens.
        """
        if self.is_greedy:
            return int(logits.argmax())
        return _pick_token(logits, self.draw())

    def draw(self) -> Draw:
        """Return the next draw of a sequence that is not greedy, instead of sampling here."""
        return Draw(
            float(self._temperature), self._top_p, self._top_k, float(self._generator.random())
        )


def log_softmax(logits: Logits) -> Logits:
    """Return log-probs (nats, at temperature 1) over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), np.float32)


def top_logprobs(logprobs: Logits, count: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Return the likeliest tokens of each row of ``[n, vocabulary]``; nothing for a count of 0.

    Of equals the lower number comes first.
    """
    if not count:
        return ()
    return tuple(
        tuple((int(token), float(row[token])) for token in _smallest(-row, min(count, len(row))))
        for row in logprobs
    )


def token_logprobs(logits: Logits, token: int, top: int) -> TokenLogprobs:
    """Return the log-prob of a token and of the ``top`` likeliest, from ``[vocabulary]`` logits.

    Of equals the lower number comes first.
    """
    logprobs = log_softmax(logits)
    (likeliest,) = top_logprobs(logprobs[np.newaxis], top) or ((),)
    return TokenLogprobs(float(logprobs[token]), likeliest)


def _pick_token(logits: Logits, draw: Draw) -> int:
    """Return the token of a draw.

    Tokens are in the order of the vocabulary, with ``top_p`` below 1 likeliest first. Of equally
    likely ones the lower number comes first.
    """
    largest = logits.max()
    if not np.isfinite(largest):
        # The model failed. The other rows of the batch go on.
        return int(logits.argmax())
    drops, temperature = largest - logits, np.float32(draw.temperature)
    tokens = (
        np.sort(_smallest(drops, draw.top_k))
        if 0 < draw.top_k < len(drops)
        else np.flatnonzero(drops < _NO_WEIGHT * temperature)
    )
    drops = drops[tokens]
    weights = np.rint(np.exp(drops / -temperature) * np.float32(MAX_WEIGHT))
    if draw.top_p < 1:
        return int(tokens[_draw_from_nucleus(drops, weights, draw)])
    cumulative = np.cumsum(weights, dtype=np.float64)
    return int(tokens[cumulative.searchsorted(draw.number * cumulative[-1], side="right")])


def _draw_from_nucleus(drops: Logits, weights: Logits, draw: Draw) -> int:
    """Return the index of a draw from the smallest set with ``top_p`` of the weight."""
    total = float(weights.sum(dtype=np.float64))
    # All below this threshold have together at most half of the weight that is left out. So the
    # set is among the others.
    threshold = (1 - draw.top_p) * total / (2 * len(weights))
    near = np.flatnonzero(weights >= threshold)
    # As integers, numbers without a sign are in the same order. Zero is added, since -0.0 has one.
    ranks = (drops[near] + np.float32(0)).view(np.uint32)
    high, low = (ranks >> 16).astype(np.uint16), ranks.astype(np.uint16)
    if len(near) > _SORTED:
        sums = np.cumsum(np.bincount(high, weights[near]))
        first = np.flatnonzero(high <= sums.searchsorted(draw.top_p * total))
        near, high, low = near[first], high[first], low[first]
    # NumPy sorts 16 bits by radix, a few times as fast as 32.
    order = np.argsort(low, kind="stable")
    order = order[np.argsort(high[order], kind="stable")]
    cumulative = np.cumsum(weights[near[order]], dtype=np.float64)
    nucleus = cumulative[cumulative.searchsorted(draw.top_p * total)]
    return int(near[order[cumulative.searchsorted(math.floor(draw.number * nucleus) + 1)]])


def _smallest(values: Logits, count: int) -> Indices:
    """Return the indices of the smallest values, ascending. Of equals the lower ones come first."""
    columns = len(values) // _COLUMN
    some = values
    if columns >= count:
        # The count-th smallest of some values is not below that of all.
        some = values[: columns * _COLUMN].reshape(_COLUMN, columns).min(axis=0)
    indices = np.flatnonzero(values <= np.partition(some, count - 1)[count - 1])
    return indices[np.argsort(values[indices], kind="stable")[:count]]
