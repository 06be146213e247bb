"""How many examples hypothesis draws, and which cases of a test make test leaves out.

A test gets as many examples as it asks for, or ten times as many with
``--hypothesis-profile exhaustive``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

USUAL = 100
EXHAUSTIVE = 10 * USUAL


def register() -> None:
    """Register the two profiles, and load the usual one."""
    # No deadline: an example's duration depends on the other programs of the machine. The usual
    # examples are the same in each run, so a stranger's first run fails only where ours does.
    settings.register_profile("usual", deadline=None, max_examples=USUAL, derandomize=True)
    settings.register_profile("exhaustive", deadline=None, max_examples=EXHAUSTIVE)
    settings.load_profile("usual")


def scale(count: int) -> int:
    """Return ``count`` in the usual profile, and ten times as many in the exhaustive one."""
    return count * settings().max_examples // USUAL


def examples(count: int, **more: Any) -> settings:
    """Return settings that draw as many examples as ``scale`` returns."""
    return settings(max_examples=scale(count), **more)


def all_cases(cases: Iterable[Any], usual: Collection[Any]) -> list[Any]:
    """Return all cases of a test, of which make test runs the usual ones.

    A case is a value, or a tuple of values.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in usual else pytest.mark.exhaustive,
        )
        for case in cases
    ]
