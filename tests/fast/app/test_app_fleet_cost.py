"""The simulation of a fleet answers as queueing theory does where that has an answer."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.fleet_cost import Load, Machine, bench_fleet_cost, learn, serve
from benchmarks.tables import tables_of
from personalpeft.formatting import to_json

MACHINE = Machine(10.0, 40.0, 4, (60.0,), 5.0, 5.0, 374.0, 2278.0)
LOAD = Load(users=1000, active=40, session_minutes=60, reply_tokens=20, hours_between_failures=1e9)


def test_one_user_is_answered_at_the_speed_of_one_row() -> None:
    served = serve(MACHINE, LOAD, 1)
    assert served.wait_p95 == 0
    assert abs(served.reply_p95 - 20 / 10) < 1e-6


def test_a_full_machine_makes_users_wait() -> None:
    # It makes 2 replies a second at most, and 1,000 users ask for 16.
    assert serve(MACHINE, LOAD, 1000).wait_p95 > 60
    assert serve(MACHINE, LOAD, 20).wait_p95 < 1


def test_learns_wait_for_no_machine_where_there_are_enough_of_them() -> None:
    assert LOAD.learns_a_day == 960
    learned = learn(MACHINE, LOAD, 20)
    assert (learned.promoted_p95, learned.lost) == (60.0, 0)
    # One machine does 1,440 a day, so two thirds are busy; most learns wait (M/D/1).
    assert 60 < learn(MACHINE, LOAD, 1).promoted_p95 < 600


def test_machines_that_die_cost_learns_and_more_machines() -> None:
    mortal = replace(LOAD, hours_between_failures=0.5)
    assert learn(MACHINE, mortal, 2).lost > 0
    assert learn(MACHINE, mortal, 2).promoted_p95 > learn(MACHINE, LOAD, 2).promoted_p95


def test_the_result_has_a_table_and_the_least_machines_that_do() -> None:
    load = replace(LOAD, active=400)
    found = bench_fleet_cost(MACHINE, load)
    assert found["wait_p95_seconds"] <= LOAD.max_wait_seconds
    assert found["learn_p95_minutes"] <= LOAD.max_learn_minutes
    assert found["serving_machines"] == -(-load.active // found["users_a_machine"])
    assert serve(MACHINE, LOAD, found["users_a_machine"] + 1).wait_p95 > LOAD.max_wait_seconds
    table = tables_of(to_json(found))["fleet"]
    assert ("GPUs of MinT, for larger bases", "144 + 288") in table.rows
