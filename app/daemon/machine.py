"""Read the sensors of the machine: mains power, heat, and the load of other programs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# The chips that measure a processor, not a disk, a battery or a radio.
_CPU_CHIPS = (
    "coretemp",
    "k10temp",
    "zenpower",
    "cpu_thermal",
    "cpu-thermal",
    "soc_thermal",
    "acpitz",
)
# Linux: a folder for each charger and battery, those of a wireless mouse included.
_POWER_SUPPLIES = Path("/sys/class/power_supply")
_MIN_INTERVAL = 1.0
_FIRST_INTERVAL = 0.3


@dataclass(frozen=True, slots=True)
class MachineReading:
    """One reading; see ``policy.HostState``."""

    on_ac_power: bool | None = None
    other_cpu_load: float | None = None
    temperature: float | None = None


class Machine:
    """The sensors of this machine. A missing one reads None, and its check is skipped."""

    def __init__(
        self, timer: Callable[[], float] = time.monotonic, power_supplies: Path = _POWER_SUPPLIES
    ) -> None:
        self._timer = timer
        self._power_supplies = power_supplies
        self._own = psutil.Process()
        self._load: float | None = None
        self._measured_at = 0.0

    def read(self) -> MachineReading:
        """Read all sensors. The first reading takes a moment, to measure the load."""
        return MachineReading(self.on_ac_power(), self.other_cpu_load(), self.temperature())

    def on_ac_power(self) -> bool | None:
        """Return whether the machine runs on mains power; None without a known battery."""
        # Drivers raise errors of any kind.
        with suppress(Exception):
            if self._power_supplies.is_dir():
                return _read_power_supplies(self._power_supplies)
            battery = psutil.sensors_battery()
            return None if battery is None else battery.power_plugged
        return None

    def temperature(self) -> float | None:
        """Return the temperature of the hottest processor, in degrees Celsius."""
        with suppress(Exception):
            chips = psutil.sensors_temperatures()
            return max(
                (
                    each.current
                    for name in _CPU_CHIPS
                    for each in chips.get(name, ())
                    if each.current
                ),
                default=None,
            )
        return None

    def other_cpu_load(self) -> float:
        """Return the share (0 to 1) of all processors that other processes used.

        It is measured since the last reading, a second ago or more.
        """
        if self._load is not None and self._timer() - self._measured_at < _MIN_INTERVAL:
            return self._load
        if self._load is None:
            psutil.cpu_percent()
            self._own.cpu_percent()
            time.sleep(_FIRST_INTERVAL)
        share = psutil.cpu_percent() - self._own.cpu_percent() / (os.cpu_count() or 1)
        self._load, self._measured_at = min(1.0, max(0.0, share / 100)), self._timer()
        return self._load


def _read_power_supplies(folder: Path) -> bool | None:
    """Read Linux's power supplies. psutil takes the battery of a mouse for the machine's."""
    discharging = False
    for supply in folder.iterdir():
        kind, scope, online, status = (
            _read_attribute(supply / name) for name in ("type", "scope", "online", "status")
        )
        if scope == "Device":
            continue
        is_battery = kind in ("Battery", "UPS")
        if not is_battery and online not in ("", "0"):
            return True
        discharging |= is_battery and status == "Discharging"
    return False if discharging else None


def _read_attribute(file: Path) -> str:
    # A supply may be unplugged meanwhile, and drivers raise errors of any kind.
    with suppress(OSError):
        return file.read_text("utf-8").strip()
    return ""


def lower_priority() -> None:
    """Give all other processes on this machine precedence from now on."""
    with suppress(Exception):
        lowest = getattr(psutil, "BELOW_NORMAL_PRIORITY_CLASS", 10)
        psutil.Process().nice(lowest)
