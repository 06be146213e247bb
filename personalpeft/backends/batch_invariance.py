"""What a backend promises about the bits of a reply: its tokens and their log-probs."""

from __future__ import annotations

from enum import StrEnum


class BatchInvariance(StrEnum):
    """When the same prompt, stack, settings and seed give the same bits on one installation."""

    HOLDS = "holds"
    """Always: with any cache, batch and division of the prompt, and in any process."""
    NONE = "none"
    """Not guaranteed: replies to the same prompt may differ by rounding."""


_DESCRIPTIONS = {
    BatchInvariance.HOLDS: "the same request gets the same reply to the bit, in any batch",
    BatchInvariance.NONE: "the same request may get replies that differ by rounding",
}


def describe(invariance: BatchInvariance) -> str:
    """Return a promise as half a sentence."""
    return _DESCRIPTIONS[invariance]
