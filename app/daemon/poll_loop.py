"""Call a function at a fixed interval.

Invariants: one round at a time. After sleep or a clock set forward, one round makes up for all
missed ones. A clock set back delays nothing, since a watchdog uses the monotonic clock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

from personalpeft.errors import format_origin

log = logging.getLogger(__name__)

_ROUND = "round"

# Every learn outlasts the interval, and the scheduler would warn of each tick that it skips.
_log = logging.getLogger(f"{__name__}.scheduler")
_log.setLevel(logging.ERROR)


class PollLoop:
    """Calls ``work`` at once and then every ``every`` seconds, in another thread.

    ``timer`` must be monotonic.
    """

    def __init__(
        self, work: Callable[[], None], every: float, *, timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._work = work
        self._every = every
        self._timer = timer
        self._guard = threading.Lock()
        self._working = False
        self._last = timer()

    def run(self, stopping: threading.Event, *, look: float = 1.0) -> None:
        """Run until ``stopping`` is set, and return after the running round.

        ``look`` is the seconds between two looks of the watchdog.
        """
        # No round is too late. By default missed rounds become one, and one runs at a time.
        scheduler = BackgroundScheduler(
            job_defaults={"misfire_grace_time": None}, timezone=UTC, logger=_log
        )
        trigger = IntervalTrigger(seconds=self._every, timezone=UTC)
        scheduler.add_job(self._round, trigger, id=_ROUND, next_run_time=datetime.now(UTC))
        scheduler.start()
        try:
            while not stopping.wait(look):
                if self._is_overdue():
                    scheduler.modify_job(_ROUND, next_run_time=datetime.now(UTC))
        finally:
            # Else it would hand rounds to workers that are gone while it waits for the last one.
            scheduler.pause()
            scheduler.shutdown(wait=True)

    def _round(self) -> None:
        with self._guard:
            self._working = True
        try:
            self._work()
        except Exception as bug:  # noqa: BLE001 - the scheduler would log the text
            log.error("a round failed: %s", format_origin(bug))
        finally:
            with self._guard:
                self._working, self._last = False, self._timer()

    def _is_overdue(self) -> bool:
        """Return whether the next round is late by the monotonic clock."""
        with self._guard:
            if self._working or self._timer() - self._last < 1.5 * self._every:
                return False
            self._last = self._timer()
            return True
