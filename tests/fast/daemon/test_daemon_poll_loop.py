"""The poll loop wakes regularly, also after the system's clock is set back, and stops on request."""

from __future__ import annotations

import os
import threading
import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import psutil
import pytest
from apscheduler.schedulers import base as scheduling
from apscheduler.triggers import interval

from personalpeft_app.daemon import poll_loop
from personalpeft_app.daemon.machine import Machine
from personalpeft_app.daemon.poll_loop import run_every


def until(happened: threading.Event) -> None:
    assert happened.wait(20)


def test_a_clock_set_back_delays_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    back = timedelta()

    class Wall(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + back

    for module in (scheduling, interval, poll_loop):
        monkeypatch.setattr(module, "datetime", Wall)
    stopping, rounds, third = threading.Event(), [], threading.Event()

    def work() -> None:
        nonlocal back
        rounds.append(time.monotonic())
        back = timedelta(minutes=-30)
        if len(rounds) == 3:
            third.set()

    thread = threading.Thread(
        target=run_every, args=(0.2, work, stopping), kwargs={"look": 0.05}, daemon=True
    )
    thread.start()
    came = third.wait(20)
    stopping.set()
    thread.join(20)
    assert came
    assert not thread.is_alive()


def test_runs_do_not_overlap_and_stopping_waits_for_the_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stopping, begun, running, most = threading.Event(), threading.Event(), 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        begun.set()
        time.sleep(0.3)
        running -= 1

    thread = threading.Thread(
        target=run_every, args=(0.05, work, stopping), kwargs={"look": 0.02}, daemon=True
    )
    thread.start()
    until(begun)
    time.sleep(0.5)
    stopping.set()
    thread.join(20)
    assert (most, running, caplog.text) == (1, 0, "")


def test_sensors_report_what_the_machine_has() -> None:
    reading = Machine().read()
    assert reading.on_ac_power in (None, True, False)
    assert reading.other_cpu_load is None or 0 <= reading.other_cpu_load <= 1
    assert reading.temperature is None or reading.temperature > 0


MOUSE = {"type": "Battery", "scope": "Device", "status": "Discharging", "online": "1"}
BATTERY = {"type": "Battery", "status": "Discharging", "present": "1"}
CHARGER = {"type": "Mains", "online": "1"}


@pytest.mark.parametrize(
    ("supplies", "on_ac_power"),
    [
        ({}, None),
        ({"hidpp_battery_0": MOUSE}, None),
        ({"hidpp_battery_0": MOUSE, "BAT0": BATTERY}, False),
        ({"BAT0": BATTERY, "ADP1": CHARGER | {"online": "0"}}, False),
        ({"BAT0": BATTERY | {"status": "Charging"}}, None),
        ({"BAT0": BATTERY, "ADP1": CHARGER}, True),
        ({"BAT0": BATTERY, "ucsi-source-psy-USBC000": CHARGER | {"type": "USB"}}, True),
    ],
)
def test_only_a_battery_of_the_machine_counts_as_battery_power(
    tmp_path: Path, supplies: dict[str, dict[str, str]], on_ac_power: bool | None
) -> None:
    for name, attributes in supplies.items():
        (tmp_path / name).mkdir()
        for attribute, value in attributes.items():
            (tmp_path / name / attribute).write_text(value + "\n")
    assert Machine(power_supplies=tmp_path).on_ac_power() is on_ac_power


def test_the_load_of_this_process_is_not_counted_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda: 50.0)
    of_one_processor = 50.0 * (os.cpu_count() or 1)
    monkeypatch.setattr(psutil.Process, "cpu_percent", lambda self: of_one_processor)
    assert Machine().other_cpu_load() == 0.0
