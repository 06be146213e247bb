"""Time and randomness as one value. Only this module of the library asks the system for either."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True)
class Clock:
    """Sources of time and randomness.

    - ``now``: returns an aware datetime in UTC.
    - ``timer``: returns seconds that never decrease.
    - ``entropy``: returns that many random bytes.
    """

    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    timer: Callable[[], float] = time.monotonic
    entropy: Callable[[int], bytes] = os.urandom


SYSTEM = Clock()
