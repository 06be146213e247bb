"""Pick the next token from logits, and report log-probs: the parts that all backends share.

Invariant: a sampler has its own random stream, so other rows of a batch do not change its draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from personalpeft.types import Sampling

Logits: TypeAlias = npt.NDArray[np.float32]
Weights: TypeAlias = npt.NDArray[np.float32]
"""Probabilities up to a common factor."""
Sums: TypeAlias = npt.NDArray[np.float64]

# Below this the exponents overflow. The draw is greedy in effect long before.
_MIN_TEMPERATURE = 1e-4


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
        if 0 < self._top_k < len(logits):
            kept = _likeliest(logits, self._top_k)
            return int(kept[self._sample_from(logits[kept])])
        return self._sample_from(logits)

    def draw(self) -> Draw:
        """Return the next draw of a sequence that is not greedy, instead of sampling here."""
        return Draw(
            float(self._temperature), self._top_p, self._top_k, float(self._generator.random())
        )

    def _sample_from(self, logits: Logits) -> int:
        """Return the index of a draw from these logits."""
        weights = np.exp((logits - logits.max()) / self._temperature)
        if self._top_p >= 1:
            return self._draw(np.cumsum(weights, dtype=np.float64))
        tokens, cumulative = _nucleus(weights, self._top_p)
        return int(tokens[self._draw(cumulative)])

    def _draw(self, cumulative: Sums) -> int:
        drawn = self._generator.random() * cumulative[-1]
        return min(int(np.searchsorted(cumulative, drawn, side="right")), len(cumulative) - 1)


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
        tuple(
            (int(token), float(row[token])) for token in kept[np.argsort(-row[kept], kind="stable")]
        )
        for row in logprobs
        for kept in [_likeliest(row, min(count, len(row)))]
    )


def token_logprobs(logits: Logits, token: int, top: int) -> TokenLogprobs:
    """Return the log-prob of a token and of the likeliest tokens.

    Args:
        logits: ``[vocabulary]``.
        token: The token.
        top: How many of the likeliest to return. Of equals the lower number comes first.
    """
    logprobs = log_softmax(logits)
    (likeliest,) = top_logprobs(logprobs[np.newaxis], top) or ((),)
    return TokenLogprobs(float(logprobs[token]), likeliest)


def _likeliest(logits: Logits, count: int) -> npt.NDArray[np.intp]:
    """Return the likeliest tokens, ascending. Of equally likely ones the lower numbers are kept."""
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    tokens = np.flatnonzero(logits >= threshold)
    order = np.argsort(-logits[tokens], kind="stable")[:count]
    return np.sort(tokens[order])


def _nucleus(weights: Weights, top_p: float) -> tuple[npt.NDArray[np.intp], Sums]:
    """Return the smallest set of tokens with ``top_p`` of the weight, and its cumulative weights.

    Of equally likely tokens the lower number comes first.
    """
    count, total = len(weights), float(weights.sum(dtype=np.float64))
    # All tokens below this threshold have together at most half of the weight that is left out. So
    # the set is among the others. They are a few hundred; sorting the vocabulary would dominate.
    candidates = np.flatnonzero(weights >= (1 - top_p) * total / (2 * count))
    tokens, cumulative = _sort(weights, candidates)
    # Exceeds the rounding difference between two orders of summation.
    margin = 2 * count * np.finfo(np.float64).eps
    low, high = np.searchsorted(
        cumulative, [top_p * total * (1 - margin), top_p * total * (1 + margin)]
    )
    if low < high or high == len(tokens):
        # The last bits decide, and they depend on the order of all tokens.
        tokens, cumulative = _sort(weights, np.arange(count))
        high = np.searchsorted(cumulative, top_p * cumulative[-1])
    return tokens[: high + 1], cumulative[: high + 1]


def _sort(weights: Weights, tokens: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.intp], Sums]:
    """Return tokens, likeliest first, and the cumulative sums of their weights."""
    ordered = tokens[np.argsort(-weights[tokens], kind="stable")]
    return ordered, np.cumsum(weights[ordered], dtype=np.float64)
