"""Call a function at a fixed interval.

Invariants: one round at a time. After sleep or a clock set forward, one round makes up for all
missed ones. A clock set back delays a round by an interval at most: a watchdog sees that the next
round moved away.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

from personalpeft.errors import format_origin

log = logging.getLogger(__name__)

# Every learn outlasts the interval, and the scheduler would warn of each tick that it skips.
_log = logging.getLogger(f"{__name__}.scheduler")
_log.setLevel(logging.ERROR)


def run_every(
    seconds: float, work: Callable[[], None], stopping: threading.Event, *, look: float = 1.0
) -> None:
    """Call ``work`` at once and then at an interval, in another thread, until ``stopping`` is set.

    Return after the running round. ``look`` is the seconds between two looks of the watchdog.
    """

    def work_once() -> None:
        try:
            work()
        except Exception as bug:  # noqa: BLE001 - the scheduler would log the text
            log.error("a round failed: %s", format_origin(bug))

    # No round is too late. By default missed rounds become one, and one runs at a time.
    scheduler = BackgroundScheduler(
        job_defaults={"misfire_grace_time": None}, timezone=UTC, logger=_log
    )
    trigger = IntervalTrigger(seconds=seconds, timezone=UTC)
    job = scheduler.add_job(work_once, trigger, next_run_time=datetime.now(UTC))
    scheduler.start()
    try:
        while not stopping.wait(look):
            # Only a clock that was set back makes it further away.
            if job.next_run_time - datetime.now(UTC) > timedelta(seconds=seconds):
                job.modify(next_run_time=datetime.now(UTC))
    finally:
        # Else it would hand rounds to workers that are gone while it waits for the last one.
        scheduler.pause()
        scheduler.shutdown(wait=True)
