"""What is decided, of frozen values alone: for all histories that anybody can think of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pytest
from daemon_makers import BERLIN, at
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from personalpeft_app.daemon.daily_report import ReportWindow
from personalpeft_app.daemon.journal import Journal, from_text
from personalpeft_app.daemon.policy import (
    QUIET,
    Backlog,
    Blocker,
    History,
    HostState,
    LearnUser,
    Task,
    TaskKind,
    last_occurrence,
    next_occurrence,
    plan,
    priority,
)
from personalpeft_app.daemon.settings import Settings

SETTINGS = Settings(zone="Europe/Berlin", learn_at="02:30")
NOON = at("2026-01-14 12:00")


@dataclass
class Home:
    """A ledger reduced to what is decided by, a clock that can be set, and a machine."""

    now: datetime = NOON
    reading: dict[str, object] = field(
        default_factory=lambda: {"on_ac_power": True, "other_cpu_load": 0.0, "temperature": 40.0}
    )
    served: datetime | None = None
    lessons: dict[str, list[datetime]] = field(default_factory=lambda: {"ada": [], "bo": []})
    learned: dict[str, datetime] = field(default_factory=dict)
    said: int = 0
    learns: int = 0
    considered: int = 0
    journal: Journal = field(default_factory=Journal)

    def say(self, user: str, count: int) -> None:
        self.said += count
        self.served = self.now
        self.lessons[user] += [self.now] * count

    def moment(self) -> HostState:
        return HostState(self.now, BERLIN, served=self.served, **self.reading)  # type: ignore[arg-type]

    def people(self) -> list[Backlog]:
        return [
            Backlog(
                user,
                len(said),
                min(said, default=None),
                learned=self.learned.get(user),
                seconds=30.0,
            )
            for user, said in self.lessons.items()
        ]

    def spent(self) -> float:
        return self.journal.spent.get(f"{self.now.astimezone(BERLIN):%Y-%m-%d}", 0.0)

    def round(self) -> None:
        for _ in range(20):
            decision = plan(
                SETTINGS, self.moment(), self.people(), History(self.spent(), self.journal.tasks)
            )
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
    st.tuples(st.just("say"), st.sampled_from(["ada", "bo"]), st.integers(1, 12)),
    st.tuples(st.just("pass"), st.integers(1, 60 * 30)),
    st.tuples(st.just("jump"), SPANS),
    st.tuples(st.just("on_ac_power"), st.booleans()),
    st.tuples(st.just("other_cpu_load"), st.floats(0, 1)),
    st.tuples(st.just("temperature"), st.floats(20, 110)),
    st.tuples(st.just("restart")),
    st.tuples(st.just("round")),
)


@examples(60)
@given(st.lists(EVENTS, max_size=40))
def test_no_history_learns_twice_for_one_reason_or_forgets_one(
    events: list[tuple[object, ...]],
) -> None:
    home = Home(now=at("2026-10-24 23:00"))
    for event in events:
        match event:
            case ("say", str(user), int(count)):
                home.say(user, count)
            case ("pass", int(minutes)):
                home.now += timedelta(minutes=minutes)
            case ("jump", timedelta() as span):
                home.now += span
            case ("restart",):
                home.journal = from_text(home.journal.as_text())
            case ("round",):
                home.round()
            case (str(name), value):
                home.reading[name] = value
    home.reading = {"on_ac_power": True, "other_cpu_load": 0.0, "temperature": None}
    # Two quiet days by a clock that goes right: whatever was said is learned, each once.
    for _ in range(2 * 24):
        home.now += timedelta(minutes=60)
        home.round()
    assert home.considered == home.said
    learns = home.learns
    for _ in range(24):
        home.now += timedelta(hours=2)
        home.round()
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
def test_a_time_of_day_comes_once_a_day_everywhere(
    day: datetime, within: timedelta, when: time, zone: str
) -> None:
    there, now = ZoneInfo(zone), day + within
    last, following = last_occurrence(when, now, there), next_occurrence(when, now, there)
    assert last <= now < following
    assert timedelta(hours=20) < following - last < timedelta(hours=28)
    # It is the same for as long as the next has not come: nothing is due again in between.
    assert last_occurrence(when, following - timedelta(microseconds=1), there) == last
    assert last_occurrence(when, following, there) == following


def test_where_an_hour_comes_twice_the_first_counts_and_where_it_does_not_come_the_one_after() -> (
    None
):
    autumn = last_occurrence(time(2, 30), at("2026-10-25 12:00"), BERLIN)
    assert autumn == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    spring = last_occurrence(time(2, 30), at("2026-03-29 12:00"), BERLIN)
    assert spring == datetime(2026, 3, 29, 1, 30, tzinfo=UTC)


def acts(
    people: list[Backlog], how_set: Settings = SETTINGS, past: History | None = None, **how: object
) -> LearnUser | Task | None:
    moment = replace(HostState(NOON, BERLIN), **how)  # type: ignore[arg-type]
    done = past or History()
    return plan(how_set, moment, people, done).action


def test_whoever_gains_most_a_second_learns_first_and_nobody_waits_for_ever() -> None:
    quick = Backlog("quick", 9, NOON, seconds=10.0)
    slow = Backlog("slow", 9, NOON, seconds=100.0)
    much = Backlog("much", 30, NOON, seconds=30.0)
    begun = Backlog("begun", 0, unfinished=True)
    for people in ([quick, slow, much], [much, slow, quick]):
        act = acts(people)
        assert isinstance(act, LearnUser)
        assert act.user == "much"
    act = acts([much, begun])
    assert isinstance(act, LearnUser)
    assert (act.user, act.seconds) == ("begun", 3600.0)
    moment = HostState(NOON + timedelta(days=30), BERLIN)
    assert priority(moment, slow) > priority(moment, replace(much, since=moment.now))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"on_ac_power": False}, Blocker.POWER),
        ({"temperature": 99.0}, Blocker.TEMPERATURE),
        ({"other_cpu_load": 0.9}, Blocker.LOAD),
        ({"served": NOON - timedelta(minutes=1)}, Blocker.SERVING),
        ({"served": NOON + timedelta(minutes=1)}, Blocker.SERVING),
    ],
)
def test_what_hinders_a_learn_is_said_and_no_sensor_hinders_none(
    how: dict[str, object], why: Blocker
) -> None:
    people = [Backlog("ada", 9, NOON)]
    assert isinstance(acts(people), LearnUser)
    moment = replace(HostState(NOON, BERLIN), **how)  # type: ignore[arg-type]
    done = dict.fromkeys(TaskKind, "")
    for _ in TaskKind:
        act = plan(SETTINGS, moment, people, History(tasks=done)).action
        if act is None:
            break
        assert isinstance(act, Task)
        done[act.kind] = act.key
    decision = plan(SETTINGS, moment, people, History(tasks=done))
    assert decision.action is None
    (said,) = [each for each in decision.upcoming if each.action == "ada learns"]
    assert said.blocked_by is why


def test_chores_wait_while_somebody_is_answered_and_are_done_once_for_each_moment() -> None:
    assert acts([], served=NOON - timedelta(seconds=1)) is None
    assert acts([], served=NOON - QUIET) is not None
    done: dict[TaskKind, str] = {}
    while isinstance(act := acts([], past=History(tasks=done)), Task):
        assert act.kind not in done
        done[act.kind] = act.key
    assert set(done) == set(TaskKind)
    later = [
        acts([], past=History(tasks=done), now=NOON + timedelta(minutes=minutes))
        for minutes in (1, 59, 61)
    ]
    assert [isinstance(act, Task) for act in later] == [False, False, True]
    assert isinstance(later[2], Task)
    assert later[2].kind is TaskKind.PROBATION


def test_what_is_switched_off_is_not_done() -> None:
    without = Settings(zone="Europe/Berlin", backup="", report_at="", learn_at="")
    done: dict[TaskKind, str] = {}
    while isinstance(act := acts([], without, History(tasks=done)), Task):
        done[act.kind] = act.key
    assert set(done) == {TaskKind.PROBATION, TaskKind.COLLECT, TaskKind.CLEAN}
    assert not isinstance(acts([Backlog("ada", 7, NOON - timedelta(days=9))], without), LearnUser)


KEYS = st.lists(st.text(max_size=20), max_size=300).map(tuple)
STEPS = st.one_of(
    st.tuples(st.just("start"), st.text(max_size=9), KEYS),
    st.tuples(st.just("futile"), st.text(max_size=9), KEYS),
    st.tuples(st.just("finish"), st.text(max_size=9)),
    st.tuples(st.just("add_time"), st.dates().map(str), st.floats(0, 1e6)),
    st.tuples(
        st.just("record_report"),
        st.datetimes(timezones=st.just(UTC)).map(lambda at: ReportWindow(at, at)),
    ),
    st.tuples(st.just("record_task"), st.sampled_from(TaskKind), st.text(max_size=30)),
)


@given(st.lists(STEPS, max_size=30))
def test_a_journal_comes_back_as_it_was(steps: list[tuple[object, ...]]) -> None:
    journal = Journal()
    for name, *rest in steps:
        journal = getattr(journal, str(name))(*rest)
        journal = journal.log(NOON, str(name), "x" * 500)
    assert from_text(journal.as_text()) == journal


def test_a_journal_is_bounded_however_long_it_is_kept() -> None:
    journal = Journal()
    for number in range(300):
        user, keys = f"user-{number}", tuple(f"s_{number:013}{each:013}" for each in range(2500))
        journal = journal.start(user, keys).futile(user, keys).add_time(str(number), 1.0)
        journal = journal.log(NOON, "learn", "y" * 1000, user=user)
    assert len(journal.as_text()) < 4 << 20
    assert from_text(journal.as_text()) == journal


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"format": 2}', '{"format": 1, "begun": 3}', "null", "\x00"]
)
def test_a_journal_that_cannot_be_read_is_an_empty_one(text: str | None) -> None:
    assert from_text(text) == Journal()


def test_a_learn_that_is_cut_off_is_counted_for_as_long_as_nothing_new_came() -> None:
    journal = Journal().start("ada", ("a",)).start("ada", ("a",))
    assert journal.started["ada"].times == 2
    assert journal.start("bo", ("x",)).started["ada"].times == 2
    assert journal.start("ada", ("a", "b")).started["ada"].times == 1
    assert journal.finish("ada").start("ada", ("a",)).started["ada"].times == 1
