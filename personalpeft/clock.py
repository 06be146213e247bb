"""Time and randomness, as one value that is passed in. The only place in the library that asks the system for either."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True)
class Clock:
    """``now`` gives aware datetimes in UTC, ``timer`` seconds that never go back, ``entropy(n)`` n random bytes."""

    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    timer: Callable[[], float] = time.monotonic
    entropy: Callable[[int], bytes] = os.urandom


SYSTEM = Clock()
