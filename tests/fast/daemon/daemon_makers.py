"""A world for the daemon: a home, a machine and its clocks, all of which a story can turn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import personalpeft
from personalpeft import Runtime
from personalpeft.clock import Clock
from personalpeft.learning.activity_summary import ActivitySummary
from personalpeft.learning.report import LearnReport, from_json
from personalpeft_app.daemon import journal
from personalpeft_app.daemon.daily_report import summarize_users
from personalpeft_app.daemon.journal import TASK, LogEntry
from personalpeft_app.daemon.policy import Decision
from personalpeft_app.daemon.probes import Probe
from personalpeft_app.daemon.worker import Worker

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str) -> datetime:
    """A moment in UTC by what a clock in Berlin shows then, the first of two."""
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).astimezone(UTC)


@dataclass
class World:
    """``wall`` is what the system's clock shows, which a story may set; ``seconds`` only ever grow. ``pace`` is how many of
    them pass each time that somebody looks.
    """

    home: Path
    wall: datetime = field(default_factory=lambda: at("2026-01-14 12:00"))
    seconds: float = 0.0
    pace: float = 0.0
    reading: Probe = field(
        default_factory=lambda: Probe(on_ac_power=True, other_cpu_load=0.0, temperature=40.0)
    )
    told: list[LogEntry] = field(default_factory=list)
    while_learning: Callable[[], None] = lambda: None
    stopping: bool = False
    _keeper: Worker | None = None
    _runtime: Runtime | None = None
    _drawn: int = 0
    _learning: bool = False

    def __post_init__(self) -> None:
        self.set()

    def set(self, **settings: object) -> None:
        """Writes the settings of this home."""
        table = {"zone": "Europe/Berlin", "at": "02:30", "backup": "", "morning": "", **settings}
        said = {True: "true", False: "false"}
        lines = [
            f"{key} = {said.get(value, repr(value)) if isinstance(value, bool) else repr(value)}"
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

    def pass_(self, **span: float) -> None:
        """Time passes for all clocks."""
        self.wall += timedelta(**span)
        self.seconds += timedelta(**span).total_seconds()

    def jump(self, **span: float) -> None:
        """The system's clock is set, or the machine was asleep."""
        self.wall += timedelta(**span)

    # People

    @contextmanager
    def opened(self) -> Iterator[Runtime]:
        with personalpeft.open(self.home, base="fake", backend="fake", clock=self.clock) as runtime:
            yield runtime

    def say(self, count: int, user: str = "ada") -> None:
        """Somebody asks and corrects so often."""
        with self.opened() as runtime:
            who = runtime.user(user)
            for _ in range(count):
                self._drawn += 1
                who.feedback(
                    who.chat(f"question {self._drawn}", temperature=0),
                    edit=f"Ahoy! Answer {self._drawn}. Arrr!",
                )

    # The daemon

    def round(self) -> Decision:
        """One round of the daemon, which is started where none runs."""
        if self._keeper is None:
            self._runtime = personalpeft.open(
                self.home, base="fake", backend="fake", clock=self.clock
            )
            self._keeper = Worker(
                self._runtime,
                self.opened,
                tell=self.told.append,
                stopping=lambda: self.stopping,
                clock=self.clock,
                sensors=self._sense,
            )
        try:
            return self._keeper.run_once()
        except BaseException:
            self.dies()
            raise

    def dies(self) -> None:
        """The daemon's process is gone; what it did not write down is, too."""
        if self._runtime is not None:
            self._runtime.close()
        self._keeper = self._runtime = None

    def goes_on(self, *, hours: float, every: float = 30) -> None:
        """So many hours pass, with a round of the daemon every so many minutes."""
        for _ in range(round(hours * 60 / every)):
            self.pass_(minutes=every)
            self.round()

    def _sense(self) -> Probe:
        self.while_learning()
        return self.reading

    def sees(self, **what: object) -> None:
        """The machine says something else from now on."""
        self.reading = replace(self.reading, **what)  # type: ignore[arg-type]

    @property
    def is_learning(self) -> bool:
        return self._keeper is not None and bool(self._keeper.journal.started)

    def forget_journal(self, text: str | None = None) -> None:
        """Loses the journal, or has it hold something else."""
        note = self.home / "notes" / f"{TASK}.json"
        if text is None:
            note.unlink()
        else:
            note.write_text(text)

    # What came of it

    def reports(self, user: str = "ada") -> list[LearnReport]:
        with personalpeft.open(self.home, base="fake", backend="fake") as runtime:
            told = [from_json(each) for each in runtime.user(user).reports()]
        return [report for report in told if report.event == "learn"]

    def learns(self, user: str = "ada") -> int:
        """How often a learn came to its end."""
        return sum(report.revision is not None for report in self.reports(user))

    def morning(self) -> list[ActivitySummary]:
        """What the daemon's last report says, as it is read now."""
        with personalpeft.open(self.home, base="fake", backend="fake", clock=self.clock) as runtime:
            period = journal.from_text(runtime.maintenance.read_note(TASK)).last_report
            return summarize_users(runtime, period) if period else []

    def pending(self, user: str = "ada") -> int:
        with personalpeft.open(self.home, base="fake", backend="fake") as runtime:
            return len(runtime.user(user).pending().news)

    def close(self) -> None:
        self.dies()
