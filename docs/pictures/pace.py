"""The time of the pictures: it moves by itself, so that they are the same each time they are made."""

from __future__ import annotations

import itertools
import random
from datetime import UTC, datetime, timedelta

from personalpeft.clock import Clock


def steady() -> Clock:
    """Begins on a Monday in March at nine, and moves twenty seconds each time somebody looks."""
    looks = itertools.count()
    return Clock(
        now=lambda: datetime(2026, 3, 2, 9, 0, tzinfo=UTC) + timedelta(seconds=20 * next(looks)),
        timer=lambda: 0.0,
        entropy=random.Random(7).randbytes,
    )
