"""Whatever happens to clocks, power, processes and people: each lesson is learned exactly once, where it should be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from daemon_makers import World, at

from personalpeft import ServingFailed, User
from personalpeft.learning import pipeline
from personalpeft.learning.gate.gate import Judgement
from personalpeft.learning.outcomes import text_reason
from personalpeft.types import Verdict
from personalpeft_app.daemon.journal import Outcome
from personalpeft_app.daemon.policy import Blocker


class Killed(BaseException):
    """The process is no more."""


def enough_lessons(world: World) -> None:
    world.say(9)
    world.goes_on(hours=24)


def fewer_at_the_time_of_day(world: World) -> None:
    world.say(5)
    world.goes_on(hours=14)
    assert world.learns() == 0
    world.goes_on(hours=24)


def summer_time_begins_over_the_time_of_day(world: World) -> None:
    world.wall = at("2026-03-28 20:00")
    world.say(5)
    world.goes_on(hours=36, every=10)


def summer_time_ends_and_the_time_of_day_comes_twice(world: World) -> None:
    world.wall = at("2026-10-24 20:00")
    world.say(5)
    world.goes_on(hours=26, every=10)


def more_is_said_between_the_two_times_of_day(world: World) -> None:
    world.wall = at("2026-10-24 23:50")
    world.say(5)
    world.goes_on(hours=3)
    assert world.learns() == 1
    world.say(2)
    # It is 02:30 for the second time, and then morning.
    world.goes_on(hours=8, every=10)
    assert world.pending() == 2


def a_clock_is_set_forward_a_day(world: World) -> None:
    world.say(9)
    world.jump(days=1)
    world.round()
    world.jump(days=1)
    world.goes_on(hours=30)


def a_clock_is_set_forward_a_year(world: World) -> None:
    world.say(5)
    world.jump(days=365)
    world.goes_on(hours=30)


def a_clock_is_set_back_half_an_hour_after_the_learn(world: World) -> None:
    world.wall = at("2026-01-14 20:00")
    world.say(5)
    world.goes_on(hours=7)
    assert world.learns() == 1
    world.jump(minutes=-50)
    world.goes_on(hours=20, every=10)


def a_clock_is_set_back_a_day_after_the_learn(world: World) -> None:
    world.say(9)
    world.goes_on(hours=1)
    world.jump(days=-1)
    world.goes_on(hours=60)


def a_clock_is_set_back_a_year_before_the_learn(world: World) -> None:
    world.say(5)
    world.jump(days=-365)
    world.goes_on(hours=30)


def a_clock_begins_in_1970_and_is_put_right(world: World) -> None:
    right, world.wall = world.wall, at("1970-01-02 00:10")
    world.say(9)
    world.goes_on(hours=1)
    world.wall = right
    world.goes_on(hours=30)


def the_laptop_sleeps_over_the_time_of_day(world: World) -> None:
    world.say(5)
    world.goes_on(hours=8)
    world.jump(hours=12)
    world.goes_on(hours=2)


def the_laptop_sleeps_for_a_week(world: World) -> None:
    world.say(9)
    world.jump(days=7)
    world.goes_on(hours=30)


def the_daemon_dies_after_every_round(world: World) -> None:
    world.say(9)
    for _ in range(20):
        world.goes_on(hours=2, every=60)
        world.dies()


def the_daemon_starts_after_everything_was_said(world: World) -> None:
    world.say(5)
    world.jump(days=3)
    world.goes_on(hours=1)


def on_battery_until_the_plug_is_in(world: World) -> None:
    world.sees(on_ac_power=False)
    world.say(9)
    world.goes_on(hours=30)
    assert world.learns() == 0
    assert any(each.blocked_by is Blocker.POWER for each in world.round().upcoming)
    world.sees(on_ac_power=True)
    world.goes_on(hours=1)


def the_plug_is_pulled_in_the_middle(world: World) -> None:
    world.say(9)
    world.pass_(hours=1)
    world.pace = 1.0

    def pull() -> None:
        if world.is_learning:
            world.sees(on_ac_power=False)

    world.while_learning = pull
    world.round()
    assert world.learns() == 0
    assert world.told[-1].outcome is Outcome.STOPPED
    world.goes_on(hours=5)
    world.while_learning = lambda: None
    world.sees(on_ac_power=True)
    world.goes_on(hours=5)


def too_hot_until_it_is_cooler(world: World) -> None:
    world.sees(temperature=95.0)
    world.say(9)
    world.goes_on(hours=3)
    assert world.learns() == 0
    world.sees(temperature=60.0)
    world.goes_on(hours=3)


def hot_in_the_middle_and_cool_again(world: World) -> None:
    world.say(9)
    world.pass_(hours=1)
    looks = 0
    world.pace = 1.0

    def warm() -> None:
        nonlocal looks
        if world.is_learning:
            looks += 1
            world.sees(temperature=95.0 if looks in (1, 2) else 60.0)

    world.while_learning = warm
    world.round()
    assert looks > 2
    world.goes_on(hours=3)


def others_need_the_machine(world: World) -> None:
    world.sees(other_cpu_load=0.9)
    world.say(9)
    world.goes_on(hours=3)
    assert world.learns() == 0
    world.sees(other_cpu_load=0.1)
    world.goes_on(hours=3)


def a_person_is_still_talking(world: World) -> None:
    world.say(9)
    for _ in range(5):
        world.pass_(minutes=4)
        world.say(1)
        assert world.round().action is None
    assert world.learns() == 0
    world.goes_on(hours=1)


def a_person_asks_while_it_learns(world: World) -> None:
    world.say(9)
    world.pass_(hours=1)
    asked = False
    world.pace = 0.5

    def ask() -> None:
        nonlocal asked
        if world.is_learning and not asked:
            asked = True
            with world.opened() as runtime:
                runtime.user("ada").chat("quick, a question", temperature=0)

    world.while_learning = ask
    world.round()
    assert asked
    world.goes_on(hours=3)


def the_budget_of_a_day_is_too_small(world: World) -> None:
    world.set(budget=0.5)
    world.say(9)
    world.pass_(hours=1)
    world.pace = 1.0
    world.round()
    assert world.learns() == 0
    assert any(each.blocked_by is Blocker.BUDGET for each in world.round().upcoming)
    for _ in range(30):
        world.goes_on(hours=24, every=240)
        if world.learns():
            break
    world.goes_on(hours=48, every=240)


def no_budget_at_all(world: World) -> None:
    world.set(budget=0)
    world.say(9)
    world.goes_on(hours=48)


def nothing_was_said(world: World) -> None:
    world.say(0)
    world.goes_on(hours=48)


def too_few_for_a_first_learn(world: World) -> None:
    world.say(3)
    world.goes_on(hours=48)
    assert not world.told


def it_was_refused_before(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pipeline,
            "judge",
            lambda evidence, margins, **more: Judgement(
                Verdict.REFUSED, (text_reason("it is worse"),)
            ),
        )
        world.say(9)
        world.goes_on(hours=72)


def the_learn_failed_and_something_new_came(world: World) -> None:
    tries = 0

    def fail(self: User, **asked: object) -> None:
        nonlocal tries
        tries += 1
        raise ServingFailed("No memory was left.", hint="Close something.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(User, "learn", fail)
        world.say(9)
        world.goes_on(hours=48)
        world.dies()
        world.goes_on(hours=48)
    assert tries == 1
    assert world.learns() == 0
    world.say(1)
    world.goes_on(hours=48)


def the_journal_is_lost_after_the_learn(world: World) -> None:
    world.say(9)
    world.goes_on(hours=1)
    world.dies()
    world.forget_journal()
    world.goes_on(hours=48)


def the_journal_is_damaged_before_the_learn(world: World) -> None:
    world.say(9)
    world.goes_on(hours=0.5)
    world.dies()
    world.forget_journal('{"format": 1, "begun": [[')
    world.goes_on(hours=48)


def somebody_learns_by_hand_meanwhile(world: World) -> None:
    world.say(9)
    with world.opened() as runtime, runtime._services.store.leases.acquire("learn-ada"):
        world.goes_on(hours=1)
    assert world.learns() == 0
    with world.opened() as runtime:
        runtime.user("ada").learn()
    world.goes_on(hours=48)


def the_person_travels_west(world: World) -> None:
    world.say(5)
    world.goes_on(hours=16)
    assert world.learns() == 1
    world.set(zone="America/Los_Angeles")
    world.goes_on(hours=48)


def the_settings_are_broken_in_between(world: World) -> None:
    world.say(5)
    world.goes_on(hours=1)
    (world.home / "config.toml").write_text("[daemon]\nsignal = 3\n")
    world.goes_on(hours=30)
    faults = [line for line in world.told if line.kind == "settings"]
    assert len(faults) == 1
    assert "signals" in faults[0].message


def killed_when(stage: str) -> Callable[[World], None]:
    def story(world: World) -> None:
        world.say(9)
        world.pass_(hours=1)
        learn = User.learn

        def doomed(self: User, **asked: object) -> object:
            def progress(now: str, done: float) -> None:
                if now.startswith(stage) and (stage != "Learning" or done > 0.5):
                    raise Killed

            return learn(self, progress=progress, **asked)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(User, "learn", doomed)
            with pytest.raises(Killed):
                world.round()
        assert world.learns() == 0
        world.goes_on(hours=48)
        assert any(line.resumed for line in world.told)

    return story


# What is said, and how often a learn comes to its end.
STORIES: dict[str, tuple[Callable[[World], None], int]] = {
    story.__name__: (story, learns)
    for story, learns in (
        (enough_lessons, 1),
        (fewer_at_the_time_of_day, 1),
        (summer_time_begins_over_the_time_of_day, 1),
        (summer_time_ends_and_the_time_of_day_comes_twice, 1),
        (more_is_said_between_the_two_times_of_day, 1),
        (a_clock_is_set_forward_a_day, 1),
        (a_clock_is_set_forward_a_year, 1),
        (a_clock_is_set_back_half_an_hour_after_the_learn, 1),
        (a_clock_is_set_back_a_day_after_the_learn, 1),
        (a_clock_is_set_back_a_year_before_the_learn, 1),
        (a_clock_begins_in_1970_and_is_put_right, 1),
        (the_laptop_sleeps_over_the_time_of_day, 1),
        (the_laptop_sleeps_for_a_week, 1),
        (the_daemon_dies_after_every_round, 1),
        (the_daemon_starts_after_everything_was_said, 1),
        (on_battery_until_the_plug_is_in, 1),
        (the_plug_is_pulled_in_the_middle, 1),
        (too_hot_until_it_is_cooler, 1),
        (hot_in_the_middle_and_cool_again, 1),
        (others_need_the_machine, 1),
        (a_person_is_still_talking, 1),
        (a_person_asks_while_it_learns, 1),
        (the_budget_of_a_day_is_too_small, 1),
        (no_budget_at_all, 0),
        (nothing_was_said, 0),
        (too_few_for_a_first_learn, 0),
        (it_was_refused_before, 1),
        (the_learn_failed_and_something_new_came, 1),
        (the_journal_is_lost_after_the_learn, 1),
        (the_journal_is_damaged_before_the_learn, 1),
        (somebody_learns_by_hand_meanwhile, 1),
        (the_person_travels_west, 1),
        (the_settings_are_broken_in_between, 1),
    )
} | {
    f"killed_when_{stage.lower()}": (killed_when(stage), 1)
    for stage in ("Reading", "Learning", "Judging")
}


@pytest.mark.parametrize("name", STORIES)
def test_each_lesson_is_learned_exactly_once(world: World, name: str) -> None:
    story, learns = STORIES[name]
    story(world)
    assert world.learns() == learns
    # And of the reasons that remain none leads to another learn in a day of quiet.
    before = len(world.reports())
    world.dies()
    if name != "more_is_said_between_the_two_times_of_day":
        world.goes_on(hours=26, every=120)
        assert len(world.reports()) == before


def test_what_a_head_that_somebody_moved_put_off_is_learned_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    enough_lessons(world)
    world.say(9)
    train, moved = pipeline.train, list[str]()

    def go_back(*given: object, **more: object) -> object:
        trained = train(*given, **more)  # type: ignore[arg-type]
        if not moved:
            with world.opened() as other:
                moved.append(str(other.user("ada").rollback("style", None).before))
        return trained

    monkeypatch.setattr(pipeline, "train", go_back)
    world.goes_on(hours=24)
    assert len(moved) == 1
    assert any(report.moved for report in world.reports())
    world.goes_on(hours=48)
    assert world.pending() == 0
