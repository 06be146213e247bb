"""The value of thumbs and rewards. Pure."""

from __future__ import annotations

from personalpeft.types import (
    Signal,
    SignalKind,
)

MIN_CLEAR_REWARD = 0.5
"""A reward nearer to 0 does not say whether a reply is wanted."""


def rating_value(signal: Signal) -> float:
    """Return how much a reply was liked, negative if disliked, 0 if the signal does not say."""
    if signal.kind not in (SignalKind.RATING, SignalKind.REWARD) or is_ambiguous_reward(signal):
        return 0.0
    value: float = signal.payload["value"]
    return value


def is_ambiguous_reward(signal: Signal) -> bool:
    """Return whether a signal is a reward too near to 0."""
    return signal.kind is SignalKind.REWARD and abs(signal.payload["value"]) < MIN_CLEAR_REWARD
