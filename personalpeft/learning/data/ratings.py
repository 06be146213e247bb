"""What a thumb or a reward says of a reply. Pure."""

from __future__ import annotations

from personalpeft.types import Signal, SignalKind

CLEAR = 0.5
"""A reward that is smaller, either way, says neither that a reply is wanted nor that it is not."""


def liking_of(signal: Signal) -> float:
    """How much a reply was liked, below 0 how much it was not; 0 for what says nothing of that."""
    if signal.kind not in (SignalKind.RATING, SignalKind.REWARD):
        return 0.0
    value: float = signal.payload["value"]
    return 0.0 if is_unclear(signal) else value


def is_unclear(signal: Signal) -> bool:
    """Whether it is a reward that says nothing of its reply."""
    return signal.kind is SignalKind.REWARD and abs(signal.payload["value"]) < CLEAR
