"""Wakes whoever works, again and again: an interval in UTC and nothing else, since what is due is no scheduler's to say.

Invariants: one round at a time; a round that was missed (the machine slept, a clock was set forward) is made up for once; a
clock that was set back keeps nobody waiting, since the watch goes by the clock that never goes back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

from personalpeft.errors import format_origin

log = logging.getLogger(__name__)

_ROUND = "round"

# A round that outlasts the interval, as every learn does, is no news: the scheduler would warn of each tick that it leaves out for it.
_log = logging.getLogger(f"{__name__}.scheduler")
_log.setLevel(logging.ERROR)


class PollLoop:
    """Calls ``work`` at once and then every so many seconds, in a thread of its own. ``timer`` never goes back."""

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
        """Until ``stopping`` is set; then returns when the round that runs has ended. ``look`` is how often, in seconds, it is
        seen to that the next round came.
        """
        # In the thread that waits for signals, so that one is answered at once.
        scheduler = BackgroundScheduler(
            jobstores={"default": MemoryJobStore()},
            executors={"default": ThreadPoolExecutor(1)},
            # No round is too late to be made, and those that were missed are one.
            job_defaults={"coalesce": True, "misfire_grace_time": None, "max_instances": 1},
            timezone=UTC,
            logger=_log,
        )
        trigger = IntervalTrigger(seconds=self._every, timezone=UTC)
        scheduler.add_job(self._round, trigger, id=_ROUND, next_run_time=datetime.now(UTC))
        scheduler.start()
        try:
            while not stopping.wait(look):
                if self._is_overdue():
                    scheduler.modify_job(_ROUND, next_run_time=datetime.now(UTC))
        finally:
            # First, or it would go on handing rounds to workers that are gone while the last one is waited for.
            scheduler.pause()
            scheduler.shutdown(wait=True)

    def _round(self) -> None:
        with self._guard:
            self._working = True
        try:
            self._work()
        except Exception as bug:  # noqa: BLE001 - the next round comes all the same; the scheduler would log the text.
            log.error("a round failed: %s", format_origin(bug))
        finally:
            with self._guard:
                self._working, self._last = False, self._timer()

    def _is_overdue(self) -> bool:
        """Whether the next round should have come by the clock that never goes back."""
        with self._guard:
            if self._working or self._timer() - self._last < 1.5 * self._every:
                return False
            self._last = self._timer()
            return True
