"""What a backend promises of a reply's bits: its tokens and their log-probs."""

from __future__ import annotations

from enum import StrEnum


class BatchInvariance(StrEnum):
    """When the same prompt, stack, settings and seed give the same bits, on one machine and one installation."""

    HOLDS = "holds"
    """Always: whatever is cached, whoever shares the batch, in whatever parts the prompt was read, in any process."""
    ALONE = "alone"
    """As long as one reply is written at a time, whatever is cached and in any process."""
    NONE = "none"
    """Never for certain: replies to the same prompt may differ by rounding."""


_SENTENCES = {
    BatchInvariance.HOLDS: "the same request gets the same reply to the bit, in any batch",
    BatchInvariance.ALONE: "the same request gets the same reply to the bit when it is served alone; in a batch it may differ by rounding",
    BatchInvariance.NONE: "the same request may get replies that differ by rounding",
}


def describe(invariance: BatchInvariance) -> str:
    """Return a promise as half a sentence."""
    return _SENTENCES[invariance]
