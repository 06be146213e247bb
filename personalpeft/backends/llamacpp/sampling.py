"""Which token comes next, from one row of logits; as ``torch/sampling.py``, in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from personalpeft.backends.llamacpp.library import Logits
from personalpeft.backends.writing import Known
from personalpeft.types import Sampling

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
            return _drawn(chances, self.generator)
        order = np.argsort(-chances, kind="stable")
        summed = np.cumsum(chances[order])
        # The likeliest token is always in, whatever top_p.
        within = int(np.searchsorted(summed, self.sampling.top_p * summed[-1], side="left")) + 1
        return int(order[_drawn(chances[order[:within]], self.generator)])


def _drawn(chances: npt.NDArray[np.float64], generator: np.random.Generator) -> int:
    """An index, each as likely as its chance."""
    summed = np.cumsum(chances)
    return min(int(np.searchsorted(summed, generator.random() * summed[-1], side="right")), len(summed) - 1)


def log_softmax(logits: Logits) -> Logits:
    """Log-probs (nats, at temperature 1) over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), np.float32)


def known_of(logits: Logits, token: int, top: int) -> Known:
    """What is known of one token, from ``[vocabulary]`` logits; of equally likely ones that with the lower number comes first."""
    logprobs = log_softmax(logits)
    order = np.argsort(-logprobs, kind="stable")[:top] if top else ()
    return Known(float(logprobs[token]), tuple((int(each), float(logprobs[each])) for each in order))
