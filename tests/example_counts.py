"""How many examples hypothesis draws.

A test gets as many as it asks for, or ten times as many with ``--hypothesis-profile exhaustive``.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings

USUAL = 100
EXHAUSTIVE = 10 * USUAL


def register() -> None:
    """Register the two profiles, and load the usual one."""
    # No deadline: an example's duration depends on the other programs of the machine.
    settings.register_profile("usual", deadline=None, max_examples=USUAL)
    settings.register_profile("exhaustive", deadline=None, max_examples=EXHAUSTIVE)
    settings.load_profile("usual")


def scale(count: int) -> int:
    """Return ``count`` in the usual profile, and ten times as many in the exhaustive one."""
    return count * settings().max_examples // USUAL


def examples(count: int, **more: Any) -> settings:
    """Return settings that draw as many examples as ``scale`` returns."""
    return settings(max_examples=scale(count), **more)
