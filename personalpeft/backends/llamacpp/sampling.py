"""Which token comes next, from one row of logits; as ``torch/sampling.py``, in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from personalpeft.backends.llamacpp.binding import Logits
from personalpeft.backends.sequence_output import Known
from personalpeft.types import Sampling

Chances: TypeAlias = npt.NDArray[np.float64]
"""How likely each is, to a common factor."""

# Colder than this, the numbers overflow; the draw is as good as greedy long before.
_COLDEST = 1e-4


@dataclass(frozen=True, slots=True)
class Picker:
    """How one row picks. The generator's state is its own, so what else is in the batch changes nothing."""

    sampling: Sampling
    generator: np.random.Generator

    @staticmethod
    def of(sampling: Sampling) -> Picker:
        return Picker(sampling, np.random.Generator(np.random.PCG64(sampling.seed)))

    def pick(self, logits: Logits) -> int:
        """The next token, from ``[vocabulary]`` logits: the likeliest, or a draw from the smallest set of tokens that holds
        ``top_p`` (Holtzman et al. 2019, section 3.1).
        """
        if self.sampling.temperature <= 0:
            return int(logits.argmax())
        scaled = logits.astype(np.float64) / max(self.sampling.temperature, _COLDEST)
        chances = np.exp(scaled - scaled.max())
        if self.sampling.top_p >= 1:
            return _drawn(np.cumsum(chances), self.generator)
        tokens, summed = _likeliest(chances, self.sampling.top_p)
        return int(tokens[_drawn(summed, self.generator)])


def _likeliest(chances: Chances, top_p: float) -> tuple[npt.NDArray[np.intp], Chances]:
    """The smallest set of tokens that holds ``top_p`` of all chances, at least one, likeliest first; and the sums of their chances.
    Of equally likely ones that with the lower number comes first.
    """
    count, total = len(chances), float(chances.sum())
    # All that are less likely than this hold together at most half of what is left out, so the set is among the others: a few
    # hundred in a language model's ten thousands, whose putting in order would take longer than all else here.
    tokens, summed = _ordered(chances, np.flatnonzero(chances >= (1 - top_p) * total / (2 * count)))
    # More than two sums of so many numbers in different orders can be apart by their rounding.
    apart = 2 * count * np.finfo(np.float64).eps
    least, most = np.searchsorted(
        summed, [top_p * total * (1 - apart), top_p * total * (1 + apart)]
    )
    if least < most or most == len(tokens):
        # The last bits decide, and what they are depends on the order of all.
        tokens, summed = _ordered(chances, np.arange(count))
        most = np.searchsorted(summed, top_p * summed[-1])
    return tokens[: most + 1], summed[: most + 1]


def _ordered(
    chances: Chances, tokens: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], Chances]:
    """Some tokens (by their numbers), likeliest first; and the sums of their chances."""
    ordered = tokens[np.argsort(-chances[tokens], kind="stable")]
    return ordered, np.cumsum(chances[ordered])


def _drawn(summed: Chances, generator: np.random.Generator) -> int:
    """A place among sums of chances, each as likely as what it adds."""
    return min(
        int(np.searchsorted(summed, generator.random() * summed[-1], side="right")), len(summed) - 1
    )


def log_softmax(logits: Logits) -> Logits:
    """Log-probs (nats, at temperature 1) over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), np.float32)


def known_of(logits: Logits, token: int, top: int) -> Known:
    """What is known of one token, from ``[vocabulary]`` logits; of equally likely ones that with the lower number comes first."""
    logprobs = log_softmax(logits)
    order = np.argsort(-logprobs, kind="stable")[:top] if top else ()
    return Known(
        float(logprobs[token]), tuple((int(each), float(logprobs[each])) for each in order)
    )
