"""In every scenario of clocks, power, processes and users each signal is learned exactly once."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_makers import World, at

from personalpeft import HomeError, ServingFailed, User, file_system
from personalpeft.learning.gate import gate
from personalpeft.learning.gate.gate import Judgement
from personalpeft.learning.outcomes import text_reason
from personalpeft.learning.train import loop
from personalpeft.types import Verdict
from personalpeft_app.daemon.journal import Outcome
from personalpeft_app.daemon.policy import Blocker


class Killed(BaseException):
    """The simulated end of the process."""


def enough_lessons(world: World) -> None:
    world.correct(9)
    world.run_for(hours=3)


def too_few_signals_before_the_time_of_day(world: World) -> None:
    world.correct(5)
    world.run_for(hours=14)
    assert world.learn_count() == 0
    world.run_for(hours=24)


def summer_time_skips_the_time_of_day(world: World) -> None:
    world.wall = at("2026-03-28 20:00")
    world.correct(5)
    world.run_for(hours=36, every=10)


def summer_time_ends_and_the_time_of_day_occurs_twice(world: World) -> None:
    world.wall = at("2026-10-24 20:00")
    world.correct(5)
    world.run_for(hours=26, every=10)


def new_signals_between_the_two_times_of_day(world: World) -> None:
    world.wall = at("2026-10-24 23:50")
    world.correct(5)
    world.run_for(hours=3)
    assert world.learn_count() == 1
    world.correct(2)
    # It is 02:30 for the second time, then the day goes on.
    world.run_for(hours=8, every=10)
    assert world.pending() == 2


def a_clock_is_set_forward_a_day(world: World) -> None:
    world.correct(9)
    world.shift_clock(days=1)
    world.run_once()
    world.shift_clock(days=1)
    world.run_for(hours=30)


def a_clock_is_set_forward_a_year(world: World) -> None:
    world.correct(5)
    world.shift_clock(days=365)
    world.run_for(hours=30)


def a_clock_is_set_back_half_an_hour_after_the_learn(world: World) -> None:
    world.wall = at("2026-01-14 20:00")
    world.correct(5)
    world.run_for(hours=7)
    assert world.learn_count() == 1
    world.shift_clock(minutes=-50)
    world.run_for(hours=20, every=10)


def a_clock_is_set_back_a_day_after_the_learn(world: World) -> None:
    world.correct(9)
    world.run_for(hours=1)
    world.shift_clock(days=-1)
    world.run_for(hours=60, every=120)


def a_clock_is_set_back_a_year_before_the_learn(world: World) -> None:
    world.correct(5)
    world.shift_clock(days=-365)
    world.run_for(hours=30)


def a_clock_starts_in_1970_and_is_corrected(world: World) -> None:
    right, world.wall = world.wall, at("1970-01-02 00:10")
    world.correct(9)
    world.run_for(hours=1)
    world.wall = right
    world.run_for(hours=30)


def the_laptop_sleeps_over_the_time_of_day(world: World) -> None:
    world.correct(5)
    world.run_for(hours=8)
    world.shift_clock(hours=12)
    world.run_for(hours=2)


def the_laptop_sleeps_for_a_week(world: World) -> None:
    world.correct(9)
    world.shift_clock(days=7)
    world.run_for(hours=30)


def the_daemon_dies_after_every_run(world: World) -> None:
    world.correct(9)
    for _ in range(8):
        world.run_for(hours=2, every=60)
        world.kill_daemon()


def the_daemon_starts_after_all_signals(world: World) -> None:
    world.correct(5)
    world.shift_clock(days=3)
    world.run_for(hours=1)


def on_battery_until_plugged_in(world: World) -> None:
    world.set_sensors(on_ac_power=False)
    world.correct(9)
    world.run_for(hours=30, every=120)
    assert world.learn_count() == 0
    assert any(each.blocked_by is Blocker.POWER for each in world.run_once().upcoming)
    world.set_sensors(on_ac_power=True)
    world.run_for(hours=1)


def unplugged_during_the_learn(world: World) -> None:
    world.correct(9)
    world.advance(hours=1)
    world.pace = 1.0

    def pull() -> None:
        if world.is_learning:
            world.set_sensors(on_ac_power=False)

    world.while_learning = pull
    world.run_once()
    assert world.learn_count() == 0
    assert world.log[-1].outcome is Outcome.STOPPED
    world.run_for(hours=5)
    world.while_learning = lambda: None
    world.set_sensors(on_ac_power=True)
    world.run_for(hours=5)


def too_hot_until_it_cools(world: World) -> None:
    world.set_sensors(temperature=95.0)
    world.correct(9)
    world.run_for(hours=3)
    assert world.learn_count() == 0
    world.set_sensors(temperature=60.0)
    world.run_for(hours=3)


def hot_during_the_learn_and_cool_again(world: World) -> None:
    world.correct(9)
    world.advance(hours=1)
    readings = 0
    world.pace = 1.0

    def warm() -> None:
        nonlocal readings
        if world.is_learning:
            readings += 1
            world.set_sensors(temperature=95.0 if readings in (1, 2) else 60.0)

    world.while_learning = warm
    world.run_once()
    assert readings > 2
    world.run_for(hours=3)


def other_programs_need_the_machine(world: World) -> None:
    world.set_sensors(other_cpu_load=0.9)
    world.correct(9)
    world.run_for(hours=3)
    assert world.learn_count() == 0
    world.set_sensors(other_cpu_load=0.1)
    world.run_for(hours=3)


def a_conversation_is_still_active(world: World) -> None:
    world.correct(9)
    for _ in range(5):
        world.advance(minutes=4)
        world.correct(1)
        assert world.run_once().action is None
    assert world.learn_count() == 0
    world.run_for(hours=1)


def a_request_during_the_learn(world: World) -> None:
    world.correct(9)
    world.advance(hours=1)
    requested = False
    world.pace = 0.5

    def ask() -> None:
        nonlocal requested
        if world.is_learning and not requested:
            requested = True
            with world.open_runtime() as runtime:
                runtime.user("ada").chat("quick, a question", temperature=0)

    world.while_learning = ask
    world.run_once()
    assert requested
    world.run_for(hours=3)


def the_daily_budget_is_too_small(world: World) -> None:
    world.set(budget=0.5)
    world.correct(9)
    world.advance(hours=1)
    world.pace = 1.0
    world.run_once()
    assert world.learn_count() == 0
    assert any(each.blocked_by is Blocker.BUDGET for each in world.run_once().upcoming)
    for _ in range(30):
        world.run_for(hours=24, every=240)
        if world.learn_count():
            break
    world.run_for(hours=48, every=240)


def no_budget_at_all(world: World) -> None:
    world.set(budget=0)
    world.correct(9)
    world.run_for(hours=48)


def no_signals(world: World) -> None:
    world.correct(0)
    world.run_for(hours=48)


def too_few_signals_for_a_first_learn(world: World) -> None:
    world.correct(3)
    world.run_for(hours=48)
    assert not world.log


def an_earlier_candidate_was_refused(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gate,
            "judge",
            lambda evidence, margins, **more: Judgement(
                Verdict.REFUSED, (text_reason("it is worse"),)
            ),
        )
        world.correct(9)
        world.run_for(hours=72, every=120)


def the_learn_failed_and_a_new_signal_came(world: World) -> None:
    tries = 0

    def fail(self: User, **options: object) -> None:
        nonlocal tries
        tries += 1
        raise ServingFailed("No memory was left.", hint="Close something.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(User, "learn", fail)
        world.correct(9)
        world.run_for(hours=48, every=120)
        world.kill_daemon()
        world.run_for(hours=48, every=120)
    assert tries == 1
    assert world.learn_count() == 0
    world.correct(1)
    world.run_for(hours=48, every=120)


def the_journal_is_lost_after_the_learn(world: World) -> None:
    world.correct(9)
    world.run_for(hours=1)
    world.kill_daemon()
    world.replace_journal()
    world.run_for(hours=48, every=120)


def the_journal_is_damaged_before_the_learn(world: World) -> None:
    world.correct(9)
    world.run_for(hours=0.5)
    world.kill_daemon()
    world.replace_journal('{"started": [[')
    world.run_for(hours=48)


def another_process_learns_meanwhile(world: World) -> None:
    world.correct(9)
    with world.open_runtime() as runtime, runtime._services.store.leases.acquire("learn-ada"):
        world.run_for(hours=1)
    assert world.learn_count() == 0
    with world.open_runtime() as runtime:
        runtime.user("ada").learn()
    world.run_for(hours=48, every=120)


def the_time_zone_moves_west(world: World) -> None:
    world.correct(5)
    world.run_for(hours=16)
    assert world.learn_count() == 1
    world.set(zone="America/Los_Angeles")
    world.run_for(hours=48)


def the_settings_are_broken_for_a_while(world: World) -> None:
    world.correct(5)
    world.run_for(hours=1)
    (world.home / "config.toml").write_text("[daemon]\nsignal = 3\n")
    world.run_for(hours=30)
    faults = [line for line in world.log if line.kind == "settings"]
    assert len(faults) == 1
    assert "signals" in faults[0].message


def the_disk_is_full_before_the_learn(world: World) -> None:
    world.correct(9)
    world.run_once()

    def fail(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    world.advance(hours=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_system, "replace_file", fail)
        for _ in range(10):
            world.advance(minutes=1)
            with pytest.raises(HomeError):
                world.run_once()
    world.advance(minutes=1)
    world.run_once()


def the_disk_fills_during_the_learn(world: World) -> None:
    tries = 0

    def fail(self: User, **options: object) -> None:
        nonlocal tries
        tries += 1
        raise HomeError("No space is left on the disk.", hint="Free some.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(User, "learn", fail)
        world.correct(9)
        world.run_for(hours=3, every=1)
    assert 2 <= tries <= 3
    world.run_for(hours=2)


def killed_when(stage: str) -> Callable[[World], None]:
    def scenario(world: World) -> None:
        world.correct(9)
        world.advance(hours=1)
        learn = User.learn

        def doomed(self: User, **options: object) -> object:
            def progress(now: str, done: float) -> None:
                if now.startswith(stage) and (stage != "Learning" or done > 0.5):
                    raise Killed

            return learn(self, progress=progress, **options)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(User, "learn", doomed)
            with pytest.raises(Killed):
                world.run_once()
        assert world.learn_count() == 0
        world.run_for(hours=48, every=120)
        assert any(line.resumed for line in world.log)

    return scenario


# Each scenario and its number of completed learns.
SCENARIOS: dict[str, tuple[Callable[[World], None], int]] = {
    scenario.__name__: (scenario, learns)
    for scenario, learns in (
        (enough_lessons, 1),
        (too_few_signals_before_the_time_of_day, 1),
        (summer_time_skips_the_time_of_day, 1),
        (summer_time_ends_and_the_time_of_day_occurs_twice, 1),
        (new_signals_between_the_two_times_of_day, 1),
        (a_clock_is_set_forward_a_day, 1),
        (a_clock_is_set_forward_a_year, 1),
        (a_clock_is_set_back_half_an_hour_after_the_learn, 1),
        (a_clock_is_set_back_a_day_after_the_learn, 1),
        (a_clock_is_set_back_a_year_before_the_learn, 1),
        (a_clock_starts_in_1970_and_is_corrected, 1),
        (the_laptop_sleeps_over_the_time_of_day, 1),
        (the_laptop_sleeps_for_a_week, 1),
        (the_daemon_dies_after_every_run, 1),
        (the_daemon_starts_after_all_signals, 1),
        (on_battery_until_plugged_in, 1),
        (unplugged_during_the_learn, 1),
        (too_hot_until_it_cools, 1),
        (hot_during_the_learn_and_cool_again, 1),
        (other_programs_need_the_machine, 1),
        (a_conversation_is_still_active, 1),
        (a_request_during_the_learn, 1),
        (the_daily_budget_is_too_small, 1),
        (no_budget_at_all, 0),
        (no_signals, 0),
        (too_few_signals_for_a_first_learn, 0),
        (an_earlier_candidate_was_refused, 1),
        (the_learn_failed_and_a_new_signal_came, 1),
        (the_journal_is_lost_after_the_learn, 1),
        (the_journal_is_damaged_before_the_learn, 1),
        (another_process_learns_meanwhile, 1),
        (the_time_zone_moves_west, 1),
        (the_settings_are_broken_for_a_while, 1),
        (the_disk_is_full_before_the_learn, 1),
        (the_disk_fills_during_the_learn, 1),
    )
} | {
    f"killed_when_{stage.lower()}": (killed_when(stage), 1)
    for stage in ("Reading", "Learning", "Judging")
}


# One of each kind is enough for make test: the hour, the clock, the machine, kills and failures.
USUAL = {
    "enough_lessons",
    "summer_time_ends_and_the_time_of_day_occurs_twice",
    "a_clock_is_set_back_a_day_after_the_learn",
    "the_daemon_dies_after_every_run",
    "on_battery_until_plugged_in",
    "a_request_during_the_learn",
    "the_daily_budget_is_too_small",
    "an_earlier_candidate_was_refused",
    "the_learn_failed_and_a_new_signal_came",
    "the_journal_is_lost_after_the_learn",
    "another_process_learns_meanwhile",
    "the_disk_is_full_before_the_learn",
    "the_disk_fills_during_the_learn",
    "killed_when_learning",
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in USUAL else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in SCENARIOS
    ],
)
def test_each_signal_is_learned_exactly_once(world: World, name: str) -> None:
    scenario, learns = SCENARIOS[name]
    scenario(world)
    assert world.learn_count() == learns
    # None of the remaining reasons leads to another learn in a quiet day.
    before = len(world.reports())
    world.kill_daemon()
    if name != "new_signals_between_the_two_times_of_day":
        world.run_for(hours=26, every=120)
        assert len(world.reports()) == before


@pytest.mark.exhaustive
def test_a_learn_whose_head_was_moved_is_repeated_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    enough_lessons(world)
    world.correct(9)
    train, moved = loop.train, list[str]()

    def move_head(*args: object, **options: object) -> object:
        trained = train(*args, **options)  # type: ignore[arg-type]
        if not moved:
            with world.open_runtime() as other:
                moved.append(str(other.user("ada").rollback("style", None).before))
        return trained

    monkeypatch.setattr(loop, "train", move_head)
    world.run_for(hours=6)
    assert len(moved) == 1
    assert any(report.moved for report in world.reports())
    world.run_for(hours=48, every=120)
    assert world.pending() == 0


def test_a_user_erased_between_decision_and_learn_stops_no_other(world: World) -> None:
    world.correct(9)
    world.correct(9, user="bo")

    def erase_ada() -> None:
        # Called after the users were read, and before a learn starts.
        world.while_learning = lambda: None
        with world.open_runtime() as runtime:
            runtime.forget_user("ada")

    world.advance(hours=1)
    world.while_learning = erase_ada
    world.run_once()
    assert world.learn_count("bo") == 1
    with world.open_runtime() as runtime:
        assert [each.id for each in runtime.users()] == ["bo"]
