"""Acts on what is decided: one step after another, each remembered before the next, with the home looked at anew between two.

Invariants:

- Whoever calls holds the home's lease: there is one keeper a home.
- What is about to be learned is written down first, and what came of it is in the ledger or the journal before anything else
  begins. So a kill costs the step that ran: a learn goes on from what it saved, and a chore is done again.
- A learn gives way between two of its steps: it stops for good reason (the process is to end, the plug was pulled) and keeps
  what it did, and pauses while a person is being answered.
- Nothing that fails for one user or one chore ends the keeper.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from datetime import tzinfo
from typing import TypeAlias

from personalpeft import Busy, Cancelled, LearnReport, NothingToLearn, PersonalPeftError, Runtime
from personalpeft.clock import SYSTEM, Clock
from personalpeft.errors import format_origin
from personalpeft_app.daemon import daily_report, maintenance
from personalpeft_app.daemon.backlog import BacklogCache, backlog_of, backlogs
from personalpeft_app.daemon.journal import MOST_KILLS, TASK, Journal, LogEntry, from_text
from personalpeft_app.daemon.policy import (
    QUIET,
    Decision,
    History,
    HostState,
    LearnUser,
    Task,
    TaskKind,
    plan,
)
from personalpeft_app.daemon.probes import Machine, Probe
from personalpeft_app.daemon.settings import Settings, read_settings

log = logging.getLogger(__name__)

Opening: TypeAlias = Callable[[], AbstractContextManager[Runtime]]

# Seconds between two looks at the sensors while a learn runs, and between two notes of how long it has run.
_GLANCE = 5.0
_NOTE = 15.0


class Worker:
    """Looks after the home of an open runtime. ``learning`` opens another on the same home for a while of learning, so that no
    model stays in memory between; ``tell`` hears each thing that was done; ``stopping`` says that the process is to end.
    """

    def __init__(
        self,
        runtime: Runtime,
        learning: Opening,
        *,
        tell: Callable[[LogEntry], None] = lambda line: None,
        stopping: Callable[[], bool] = lambda: False,
        clock: Clock = SYSTEM,
        sensors: Callable[[], Probe] | None = None,
        zone: tzinfo | None = None,
    ) -> None:
        self._runtime = runtime
        self._learning = learning
        self._tell = tell
        self._stopping = stopping
        self._clock = clock
        self._sensors = sensors or Machine().read
        self._zone = zone
        self._known = BacklogCache()
        self._settings = Settings()
        self._settings_fault = ""
        # Who is just learning elsewhere is not asked again in the same round.
        self._elsewhere: set[str] = set()
        self.journal = from_text(runtime.maintenance.read_note(TASK))

    def run_once(self) -> Decision:
        """Does what is due, until nothing is or the process is to end; what comes next. Raises what the home itself raises, as
        ``HomeError`` on a full disk.
        """
        self._elsewhere.clear()
        self._read_settings()
        self._report_interrupted()
        with ExitStack() as open_while_learning:
            learning: Runtime | None = None
            while True:
                decision = self._decide()
                if decision.action is None or self._stopping():
                    return decision
                if isinstance(decision.action, Task):
                    self._do(decision.action)
                    continue
                if learning is None:
                    learning = open_while_learning.enter_context(self._learning())
                self._learn(learning, decision.action)

    def preview(self) -> Decision:
        """What is to be done now, and what comes next; does nothing, so that a home that is read-only will do. Raises
        ``InvalidInput`` for settings that cannot be.
        """
        self._settings = read_settings(self._runtime.settings.home)
        return self._decide()

    @property
    def spent(self) -> float:
        """The seconds of learning that today's budget has lost."""
        return self.journal.spent.get(self._day(), 0.0)

    def _decide(self) -> Decision:
        people = backlogs(self._known.read(self._runtime), self.journal.attempts)
        moment = self._host_state()
        past = History(self.spent, self.journal.tasks)
        return plan(
            self._settings,
            moment,
            [each for each in people if each.id not in self._elsewhere],
            past,
        )

    def _host_state(self) -> HostState:
        reading = self._sensors()
        return HostState(
            self._clock.now(),
            self._zone or self._settings.time_zone(),
            reading.on_ac_power,
            reading.other_cpu_load,
            reading.temperature,
            self._runtime.maintenance.last_activity(),
        )

    def _day(self) -> str:
        return f"{self._clock.now().astimezone(self._zone or self._settings.time_zone()):%Y-%m-%d}"

    def _read_settings(self) -> None:
        try:
            self._settings, self._settings_fault = read_settings(self._runtime.settings.home), ""
        except PersonalPeftError as error:
            # Those from before hold on, or the defaults; it is said once, not every minute.
            fault = f"{error.message} {error.hint}"
            if fault != self._settings_fault:
                self._settings_fault = fault
                self._log(self.journal, "settings", fault)

    def _report_interrupted(self) -> None:
        """Gives up what was cut off again and again with the process that did it."""
        for user, begun in self.journal.started.items():
            if begun.times >= MOST_KILLS:
                said = f"was cut off {begun.times} times; it is tried again when something new has come"
                journal = self.journal.futile(
                    user, (*self.journal.attempts.get(user, ()), *begun.keys)
                )
                self._log(journal.finish(user), "learn", said, user=user)

    def _learn(self, runtime: Runtime, learn: LearnUser) -> None:
        user, upkeep = learn.user, self._runtime.maintenance
        tried = self.journal.attempts.get(user, ())
        _, news = backlog_of(runtime.user(user, create=False).pending(), tried)
        keys = tuple(each.key for each in news)
        again = user in self.journal.started
        self._save_journal(self.journal.start(user, keys))
        began, day = self._clock.timer(), self._day()
        until_now, glance, looked, hot, unplugged = 0.0, self._clock.timer(), 0.0, False, False

        def check_host() -> None:
            nonlocal looked, hot, unplugged, until_now, glance
            at = self._clock.timer()
            if looked and at - looked < _GLANCE:
                return
            looked = at
            reading = self._sensors()
            hot = (
                reading.temperature is not None
                and reading.temperature >= self._settings.temperature
            )
            unplugged = self._settings.require_ac_power and reading.on_ac_power is False
            if at - glance >= _NOTE:
                # So that a kill does not give the time back that was used.
                self._save_journal(self.journal.add_time(day, at - began - until_now))
                until_now, glance = at - began, at

        def cancelled() -> bool:
            check_host()
            return self._stopping() or unplugged

        def paused() -> bool:
            check_host()
            served = upkeep.last_activity()
            return hot or (served is not None and abs(self._clock.now() - served) < QUIET)

        what = "" if not again else "it was cut off and goes on; "
        left: tuple[str, ...] = tried
        try:
            report = runtime.user(user, create=False).learn(
                seconds=learn.seconds, cancelled=cancelled, paused=paused
            )
            said = what + _summary(report)
            # Where time ran out, layers above were not even reached; that it goes on is in the ledger. Where somebody else moved a
            # head meanwhile, its lessons have not had their turn.
            unsettled = any(each.is_unfinished or each.moved for each in (report, *report.above))
            left = tried if unsettled else (*tried, *keys)
        except NothingToLearn as error:
            said, left = error.message, (*tried, *keys)
        except Cancelled:
            why = "the plug was pulled" if unplugged else "the daemon ends"
            said = f"{what}stopped between two steps, since {why}; it goes on later"
        except Busy as error:
            said = f"{error.message} It is asked again in a while."
            self._elsewhere.add(user)
        except PersonalPeftError as error:
            said, left = f"failed: {error.message} {error.hint}", (*tried, *keys)
        except Exception as error:  # noqa: BLE001 - the next round goes on
            log.error("a learn failed: %s", format_origin(error))
            said, left = f"failed: {type(error).__name__}; the log has the details", (*tried, *keys)
        seconds = self._clock.timer() - began
        self._known.forget(user)
        journal = self.journal.add_time(day, seconds - until_now).finish(user)
        if left != tried:
            # Only what is still pending after it: what the ledger tells need not be remembered beside it.
            still = {each.key for each in self._runtime.user(user, create=False).pending().news}
            left = tuple(key for key in left if key in still)
        self._log(
            journal.futile(user, left),
            "learn",
            f"{learn.reason}: {said}",
            user=user,
            seconds=seconds,
        )

    def _do(self, chore: Task) -> None:
        began, now = self._clock.timer(), self._clock.now()
        period = daily_report.next_window(self.journal.last_report, now)
        try:
            said = maintenance.run_task(chore.kind, self._runtime, self._settings, now, period)
            reported = bool(said) and chore.kind is TaskKind.REPORT
        except PersonalPeftError as error:
            said, reported = f"failed: {error.message} {error.hint}", False
        except Exception as error:  # noqa: BLE001 - the next round goes on
            log.error("a chore failed: %s", format_origin(error))
            said, reported = f"failed: {type(error).__name__}; the log has the details", False
        journal = self.journal.record_task(chore.kind, chore.key)
        if reported:
            journal = journal.record_report(period)
        if said:
            self._log(journal, chore.kind, said, seconds=self._clock.timer() - began)
        else:
            self._save_journal(journal)

    def _log(
        self, journal: Journal, what: str, said: str, *, user: str = "", seconds: float = 0.0
    ) -> None:
        self._save_journal(journal.log(self._clock.now(), what, said, user=user, seconds=seconds))
        self._tell(self.journal.entries[-1])

    def _save_journal(self, journal: Journal) -> None:
        # First in memory: where the disk is full, this process still knows what it did.
        self.journal = journal
        self._runtime.maintenance.write_note(TASK, journal.as_text())


def _summary(report: LearnReport) -> str:
    """What came of a learn, without a word of what was learned."""
    parts = []
    for each in (report, *report.above):
        what = each.error or str(each.verdict)
        parts.append(
            f"{each.layer}: {what}{f' ({each.revision})' if each.revision else ''}, {each.reason}"
        )
    return "; ".join(parts)
