"""A simulated host for the daemon: a home, sensors and clocks that a scenario controls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import personalpeft
from personalpeft import PersonalPeftError, Runtime
from personalpeft.clock import Clock
from personalpeft.learning.activity_summary import ActivitySummary
from personalpeft.learning.report import LearnReport, from_json
from personalpeft_app.daemon import TASK, journal
from personalpeft_app.daemon.journal import LogEntry
from personalpeft_app.daemon.machine import MachineReading
from personalpeft_app.daemon.policy import Decision
from personalpeft_app.daemon.worker import Worker

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str) -> datetime:
    """Return the UTC time of a local time in Berlin; the first of two at the end of summer time."""
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).astimezone(UTC)


@dataclass
class World:
    """A home, a daemon on it, and the clocks and sensors that the daemon reads.

    ``wall`` is the system's clock, which a scenario may set. ``seconds`` is monotonic. Each reading
    of the timer advances both by ``pace`` seconds.
    """

    home: Path
    wall: datetime = field(default_factory=lambda: at("2026-01-14 12:00"))
    seconds: float = 0.0
    pace: float = 0.0
    reading: MachineReading = field(
        default_factory=lambda: MachineReading(
            on_ac_power=True, other_cpu_load=0.0, temperature=40.0
        )
    )
    log: list[LogEntry] = field(default_factory=list)
    while_learning: Callable[[], None] = lambda: None
    stopping: bool = False
    _worker: Worker | None = None
    _runtime: Runtime | None = None
    _drawn: int = 0
    _learning: bool = False

    def __post_init__(self) -> None:
        self.set()

    def set(self, **settings: object) -> None:
        """Write the daemon's settings of this home."""
        table = {
            "zone": "Europe/Berlin",
            "learn_at": "02:30",
            "backup": "",
            "report_at": "",
            **settings,
        }
        booleans = {True: "true", False: "false"}
        lines = [
            f"{key} = {booleans.get(value, repr(value)) if isinstance(value, bool) else repr(value)}"
            for key, value in table.items()
        ]
        self.home.mkdir(mode=0o700, exist_ok=True)
        (self.home / "config.toml").write_text("[daemon]\n" + "\n".join(lines).replace("'", '"'))

    # Time

    def now(self) -> datetime:
        self.wall += timedelta(microseconds=10)
        return self.wall

    def timer(self) -> float:
        self.seconds += self.pace
        self.wall += timedelta(seconds=self.pace)
        return self.seconds

    def entropy(self, count: int) -> bytes:
        self._drawn += 1
        return hashlib.sha256(f"{self._drawn}".encode()).digest()[:count]

    @property
    def clock(self) -> Clock:
        return Clock(self.now, self.timer, self.entropy)

    def advance(self, **span: float) -> None:
        """Advance all clocks."""
        self.wall += timedelta(**span)
        self.seconds += timedelta(**span).total_seconds()

    def shift_clock(self, **span: float) -> None:
        """Shift the system's clock only, as setting it or suspending the machine does."""
        self.wall += timedelta(**span)

    # Users

    @contextmanager
    def open_runtime(self) -> Iterator[Runtime]:
        with personalpeft.open(self.home, base="fake", backend="fake", clock=self.clock) as runtime:
            yield runtime

    def correct(self, count: int, user: str = "ada") -> None:
        """Ask and correct ``count`` times."""
        with self.open_runtime() as runtime:
            handle = runtime.user(user)
            for _ in range(count):
                self._drawn += 1
                handle.feedback(
                    handle.chat(f"question {self._drawn}", temperature=0),
                    edit=f"Ahoy! Answer {self._drawn}. Arrr!",
                )

    # The daemon

    def run_once(self) -> Decision:
        """Run the daemon once; start it first if it does not run."""
        if self._worker is None:
            self._runtime = personalpeft.open(
                self.home, base="fake", backend="fake", clock=self.clock
            )
            self._worker = Worker(
                self._runtime,
                self.open_runtime,
                tell=self.log.append,
                stopping=lambda: self.stopping,
                clock=self.clock,
                sensors=self._sense,
            )
        try:
            return self._worker.run_once()
        except PersonalPeftError:  # ``daemon run`` reports it and lives on.
            raise
        except BaseException:
            self.kill_daemon()
            raise

    def kill_daemon(self) -> None:
        """Kill the daemon's process with its state in memory."""
        if self._runtime is not None:
            self._runtime.close()
        self._worker = self._runtime = None

    def run_for(self, *, hours: float, every: float = 30) -> None:
        """Run the daemon every ``every`` minutes for ``hours`` hours."""
        for _ in range(round(hours * 60 / every)):
            self.advance(minutes=every)
            self.run_once()

    def _sense(self) -> MachineReading:
        self.while_learning()
        return self.reading

    def set_sensors(self, **what: object) -> None:
        """Change the readings of the sensors."""
        self.reading = replace(self.reading, **what)  # type: ignore[arg-type]

    @property
    def is_learning(self) -> bool:
        return self._worker is not None and bool(self._worker.journal.started)

    def replace_journal(self, text: str | None = None) -> None:
        """Delete the journal, or overwrite it with ``text``."""
        note = self.home / "notes" / f"{TASK}.json"
        if text is None:
            note.unlink()
        else:
            note.write_text(text)

    # Results

    def reports(self, user: str = "ada") -> list[LearnReport]:
        with personalpeft.open(self.home, base="fake", backend="fake") as runtime:
            reports = [from_json(each) for each in runtime.user(user).reports()]
        return [report for report in reports if report.event == "learn"]

    def learn_count(self, user: str = "ada") -> int:
        """Return how many learns ended with a revision."""
        return sum(report.revision is not None for report in self.reports(user))

    def daily_report(self) -> list[ActivitySummary]:
        """Return the daemon's last report, as read now."""
        with personalpeft.open(self.home, base="fake", backend="fake", clock=self.clock) as runtime:
            period = journal.from_text(runtime.maintenance.read_note(TASK)).last_report
            if period is None:
                return []
            return list(runtime.activity_summaries(period.since, period.until))

    def pending(self, user: str = "ada") -> int:
        with personalpeft.open(self.home, base="fake", backend="fake") as runtime:
            return len(runtime.user(user).pending().triggers)

    def close(self) -> None:
        self.kill_daemon()
