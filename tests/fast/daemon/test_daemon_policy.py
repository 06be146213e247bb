"""The policy decides from frozen values alone; its properties hold for all histories."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pytest
from daemon_makers import BERLIN, at
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.learning.status import Pending, TrainingTrigger, TriggerKind
from personalpeft_app.daemon.journal import (
    FailedTask,
    Journal,
    ReportWindow,
    TaskKind,
    from_text,
)
from personalpeft_app.daemon.policy import (
    QUIET,
    Blocker,
    HostState,
    LearnUser,
    Task,
    last_occurrence,
    next_occurrence,
    plan,
    priority,
)
from personalpeft_app.daemon.settings import Settings


def waiting(
    user: str,
    lessons: int,
    since: datetime | None = None,
    *,
    unfinished: bool = False,
    learned: datetime | None = None,
    seconds: float | None = None,
) -> Pending:
    """Return what waits to be learned of a user with so many lessons, the oldest ``since``."""
    kinds = [TriggerKind.LESSON] * lessons + [TriggerKind.UNFINISHED] * unfinished
    triggers = tuple(TrainingTrigger(str(n), kind, "style", since) for n, kind in enumerate(kinds))
    return Pending(user, triggers, {}, learned, seconds)


SETTINGS = Settings(zone="Europe/Berlin", learn_at="02:30")
NOON = at("2026-01-14 12:00")


@dataclass
class SimulatedHost:
    """A backlog for each user, a clock that can be set, and sensors."""

    now: datetime = NOON
    reading: dict[str, object] = field(
        default_factory=lambda: {"on_ac_power": True, "other_cpu_load": 0.0, "temperature": 40.0}
    )
    served: datetime | None = None
    lessons: dict[str, list[datetime]] = field(default_factory=lambda: {"ada": [], "bo": []})
    learned: dict[str, datetime] = field(default_factory=dict)
    signals: int = 0
    learns: int = 0
    considered: int = 0
    journal: Journal = field(default_factory=Journal)

    def correct(self, user: str, count: int) -> None:
        self.signals += count
        self.served = self.now
        self.lessons[user] += [self.now] * count

    def host(self) -> HostState:
        return HostState(self.now, BERLIN, served=self.served, **self.reading)  # type: ignore[arg-type]

    def backlogs(self) -> list[Pending]:
        return [
            waiting(
                user,
                len(times),
                min(times, default=None),
                learned=self.learned.get(user),
                seconds=30.0,
            )
            for user, times in self.lessons.items()
        ]

    def spent(self) -> float:
        return self.journal.spent_on(self.now, BERLIN)

    def run_once(self) -> None:
        for _ in range(20):
            decision = plan(SETTINGS, self.host(), self.backlogs(), self.journal)
            if decision.action is None:
                return
            if isinstance(decision.action, Task):
                self.journal = self.journal.record_task(decision.action.kind, decision.action.key)
                continue
            self.learn(decision.action)
        pytest.fail("it does not come to an end")

    def learn(self, learn: LearnUser) -> None:
        assert self.reading["on_ac_power"] is not False
        assert self.served is None or abs(self.now - self.served) >= timedelta(
            minutes=SETTINGS.idle
        )
        assert self.spent() < SETTINGS.budget * 60
        assert self.lessons[learn.user], "there is no reason"
        self.learns += 1
        self.considered += len(self.lessons[learn.user])
        self.lessons[learn.user] = []
        self.learned[learn.user] = self.now
        self.journal = self.journal.add_time(f"{self.now.astimezone(BERLIN):%Y-%m-%d}", 30.0)


SPANS = st.integers(-60 * 24 * 400, 60 * 24 * 400).map(lambda minutes: timedelta(minutes=minutes))
EVENTS = st.one_of(
    st.tuples(st.just("correct"), st.sampled_from(["ada", "bo"]), st.integers(1, 12)),
    st.tuples(st.just("pass"), st.integers(1, 60 * 30)),
    st.tuples(st.just("jump"), SPANS),
    st.tuples(st.just("on_ac_power"), st.booleans()),
    st.tuples(st.just("other_cpu_load"), st.floats(0, 1)),
    st.tuples(st.just("temperature"), st.floats(20, 110)),
    st.tuples(st.just("restart")),
    st.tuples(st.just("round")),
)


@examples(30)
@given(st.lists(EVENTS, max_size=40))
def test_every_signal_is_learned_exactly_once_in_any_history(
    events: list[tuple[object, ...]],
) -> None:
    home = SimulatedHost(now=at("2026-10-24 23:00"))
    for event in events:
        match event:
            case ("correct", str(user), int(count)):
                home.correct(user, count)
            case ("pass", int(minutes)):
                home.now += timedelta(minutes=minutes)
            case ("jump", timedelta() as span):
                home.now += span
            case ("restart",):
                home.journal = from_text(home.journal.as_text())
            case ("round",):
                home.run_once()
            case (str(name), value):
                home.reading[name] = value
    home.reading = {"on_ac_power": True, "other_cpu_load": 0.0, "temperature": None}
    # Two quiet days with a correct clock: every signal is learned, each once.
    for _ in range(2 * 24):
        home.now += timedelta(minutes=60)
        home.run_once()
    assert home.considered == home.signals
    learns = home.learns
    for _ in range(24):
        home.now += timedelta(hours=2)
        home.run_once()
    assert home.learns == learns


@given(
    st.integers(366, 120 * 365).map(
        lambda days: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=days)
    ),
    st.integers(0, 24 * 60).map(lambda minutes: timedelta(minutes=minutes)),
    st.times().map(lambda moment: moment.replace(second=0, microsecond=0)),
    st.sampled_from(
        [
            "Europe/Berlin",
            "America/New_York",
            "Australia/Lord_Howe",
            "Asia/Kathmandu",
            "Africa/Casablanca",
            "UTC",
        ]
    ),
)
def test_a_time_of_day_occurs_once_a_day_in_any_zone(
    day: datetime, within: timedelta, when: time, zone: str
) -> None:
    there, now = ZoneInfo(zone), day + within
    last, following = last_occurrence(when, now, there), next_occurrence(when, now, there)
    assert last <= now < following
    assert timedelta(hours=20) < following - last < timedelta(hours=28)
    # It stays the last occurrence until the next one: nothing is due again in between.
    assert last_occurrence(when, following - timedelta(microseconds=1), there) == last
    assert last_occurrence(when, following, there) == following


def test_a_repeated_hour_counts_once_and_a_skipped_hour_is_delayed() -> None:
    autumn = last_occurrence(time(2, 30), at("2026-10-25 12:00"), BERLIN)
    assert autumn == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    spring = last_occurrence(time(2, 30), at("2026-03-29 12:00"), BERLIN)
    assert spring == datetime(2026, 3, 29, 1, 30, tzinfo=UTC)


def next_action(
    backlogs: list[Pending],
    settings: Settings = SETTINGS,
    past: Journal | None = None,
    **readings: object,
) -> LearnUser | Task | None:
    host = replace(HostState(NOON, BERLIN), **readings)  # type: ignore[arg-type]
    done = past or Journal()
    return plan(settings, host, backlogs, done).action


def test_the_user_with_the_most_gain_per_second_learns_first_and_waiting_raises_priority() -> None:
    quick = waiting("quick", 9, NOON, seconds=10.0)
    slow = waiting("slow", 9, NOON, seconds=100.0)
    much = waiting("much", 30, NOON, seconds=30.0)
    begun = waiting("begun", 0, unfinished=True)
    for backlogs in ([quick, slow, much], [much, slow, quick]):
        act = next_action(backlogs)
        assert isinstance(act, LearnUser)
        assert act.user == "much"
    act = next_action([much, begun])
    assert isinstance(act, LearnUser)
    assert (act.user, act.seconds) == ("begun", 3600.0)
    host = HostState(NOON + timedelta(days=30), BERLIN)
    assert priority(host, slow) > priority(host, waiting("much", 30, host.now, seconds=30.0))


@pytest.mark.parametrize(
    ("readings", "blocker"),
    [
        ({"on_ac_power": False}, Blocker.POWER),
        ({"temperature": 99.0}, Blocker.TEMPERATURE),
        ({"other_cpu_load": 0.9}, Blocker.LOAD),
        ({"served": NOON - timedelta(minutes=1)}, Blocker.SERVING),
        ({"served": NOON + timedelta(minutes=1)}, Blocker.SERVING),
    ],
)
def test_a_blocked_learn_names_its_reason_and_missing_sensors_block_nothing(
    readings: dict[str, object], blocker: Blocker
) -> None:
    backlogs = [waiting("ada", 9, NOON)]
    assert isinstance(next_action(backlogs), LearnUser)
    host = replace(HostState(NOON, BERLIN), **readings)  # type: ignore[arg-type]
    done = dict.fromkeys(TaskKind, "")
    for _ in TaskKind:
        act = plan(SETTINGS, host, backlogs, Journal(tasks=done)).action
        if act is None:
            break
        assert isinstance(act, Task)
        done[act.kind] = act.key
    decision = plan(SETTINGS, host, backlogs, Journal(tasks=done))
    assert decision.action is None
    (entry,) = [each for each in decision.upcoming if each.action == "ada learns"]
    assert entry.blocked_by is blocker


def test_maintenance_waits_for_requests_and_runs_once_per_period() -> None:
    assert next_action([], served=NOON - timedelta(seconds=1)) is None
    assert next_action([], served=NOON - QUIET) is not None
    done: dict[TaskKind, str] = {}
    while isinstance(act := next_action([], past=Journal(tasks=done)), Task):
        assert act.kind not in done
        done[act.kind] = act.key
    assert set(done) == set(TaskKind)
    later = [
        next_action([], past=Journal(tasks=done), now=NOON + timedelta(minutes=minutes))
        for minutes in (1, 59, 61)
    ]
    assert [isinstance(act, Task) for act in later] == [False, False, True]
    assert isinstance(later[2], Task)
    assert later[2].kind is TaskKind.PROBATION


def test_due_work_that_waits_is_listed_with_its_cause() -> None:
    served = NOON - timedelta(seconds=1)
    decision = plan(SETTINGS, replace(HostState(NOON, BERLIN), served=served), [], Journal())
    assert decision.action is None
    assert [each.action for each in decision.upcoming] == list(TaskKind)
    for each in decision.upcoming:
        assert (each.at, each.blocked_by) == (served + QUIET, Blocker.SERVING)
    # A task behind a learn or another task is due too, at a time that is not known.
    for backlogs in ([], [waiting("ada", 9, NOON)]):
        upcoming = plan(SETTINGS, HostState(NOON, BERLIN), backlogs, Journal()).upcoming
        assert [each.at for each in upcoming if each.action == TaskKind.BACKUP] == [None]


def test_disabled_tasks_do_not_run() -> None:
    without = Settings(zone="Europe/Berlin", backup="", report_at="", learn_at="")
    done: dict[TaskKind, str] = {}
    while isinstance(act := next_action([], without, Journal(tasks=done)), Task):
        done[act.kind] = act.key
    assert set(done) == {TaskKind.PROBATION, TaskKind.COLLECT}
    assert not isinstance(
        next_action([waiting("ada", 7, NOON - timedelta(days=9))], without), LearnUser
    )


KEYS = st.lists(st.text(max_size=20), max_size=300).map(tuple)
STEPS = st.one_of(
    st.tuples(st.just("start"), st.text(max_size=9), KEYS),
    st.tuples(st.just("futile"), st.text(max_size=9), KEYS),
    st.tuples(st.just("finish"), st.text(max_size=9)),
    st.tuples(st.just("add_time"), st.dates().map(str), st.floats(0, 1e6)),
    st.tuples(st.just("record_task"), st.sampled_from(TaskKind), st.text(max_size=30)),
)


WINDOWS = st.datetimes(timezones=st.just(UTC)).map(lambda at: ReportWindow(at, at))
FAILED = st.builds(FailedTask, st.text(max_size=9), st.just(NOON), st.text(max_size=30))


@given(st.lists(STEPS, max_size=30), WINDOWS, st.dictionaries(st.sampled_from(TaskKind), FAILED))
def test_a_journal_round_trips(
    steps: list[tuple[object, ...]], window: ReportWindow, failed: dict[TaskKind, FailedTask]
) -> None:
    journal = Journal(failed=failed, last_report=window)
    for name, *rest in steps:
        journal = getattr(journal, str(name))(*rest)
        journal = journal.log(NOON, str(name), "x" * 500)
    assert from_text(journal.as_text()) == journal


def test_the_journal_stays_bounded() -> None:
    journal = Journal()
    for number in range(300):
        user, keys = f"user-{number}", tuple(f"s_{number:013}{each:013}" for each in range(2500))
        journal = journal.start(user, keys).futile(user, keys).add_time(str(number), 1.0)
        journal = journal.log(NOON, "learn", "y" * 1000, user=user)
    assert len(journal.as_text()) < 4 << 20
    assert from_text(journal.as_text()) == journal


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"started": 3}', "null", "\x00"])
def test_an_unreadable_journal_is_an_empty_one(text: str | None) -> None:
    assert from_text(text) == Journal()


def test_an_interrupted_learn_is_counted_until_new_signals_arrive() -> None:
    journal = Journal().start("ada", ("a",)).start("ada", ("a",))
    assert journal.started["ada"].times == 2
    assert journal.start("bo", ("x",)).started["ada"].times == 2
    assert journal.start("ada", ("a", "b")).started["ada"].times == 1
    assert journal.finish("ada").start("ada", ("a",)).started["ada"].times == 1
