"""What the machine says of itself, as far as it does: mains power, heat, and how busy others keep it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

# The chips that say how hot a processor is; disks, batteries and radios run hot for reasons of their own.
_PROCESSORS = (
    "coretemp",
    "k10temp",
    "zenpower",
    "cpu_thermal",
    "cpu-thermal",
    "soc_thermal",
    "acpitz",
)
_SHORTEST = 1.0
_LOOK = 0.3


@dataclass(frozen=True, slots=True)
class Probe:
    """See ``deciding.Moment``."""

    on_ac_power: bool | None = None
    other_cpu_load: float | None = None
    temperature: float | None = None


class Machine:
    """Reads the sensors of this machine. What it cannot tell is None, which hinders nothing."""

    def __init__(self, timer: Callable[[], float] = time.monotonic) -> None:
        self._timer = timer
        self._before: tuple[float, float] | None = None
        self._others: float | None = None

    def read(self) -> Probe:
        """All of it. The first time this takes a moment, since how busy a machine is shows over a while."""
        return Probe(self.on_ac_power(), self.other_cpu_load(), self.temperature())

    def on_ac_power(self) -> bool | None:
        """Whether it runs on mains power; None where there is no battery, or nothing is known of one."""
        import psutil

        # Drivers fail in ways of their own, and none of them is our affair.
        with suppress(Exception):
            battery = psutil.sensors_battery()
            return None if battery is None else battery.power_plugged
        return None

    def temperature(self) -> float | None:
        """The hottest processor, in degrees Celsius."""
        import psutil

        with suppress(Exception):
            chips = psutil.sensors_temperatures()
            return max(
                (
                    each.current
                    for name in _PROCESSORS
                    for each in chips.get(name, ())
                    if each.current
                ),
                default=None,
            )
        return None

    def other_cpu_load(self) -> float | None:
        """The share (0 to 1) of all processors that others than this process used since the last time, a second ago or more:
        what a learn itself takes is no reason not to learn.
        """
        at, busy = self._timer(), self._busy()
        if self._before is None:
            self._before = at, busy
            time.sleep(_LOOK)
            at, busy = self._timer(), self._busy()
        elif at - self._before[0] < _SHORTEST and self._others is not None:
            return self._others
        spent = (at - self._before[0]) * (os.cpu_count() or 1)
        self._others = min(1.0, max(0.0, (busy - self._before[1]) / spent)) if spent > 0 else None
        self._before = at, busy
        return self._others

    def _busy(self) -> float:
        """Seconds that processors have worked for others, since some moment."""
        import psutil

        times, own = psutil.cpu_times(), psutil.Process().cpu_times()
        return float(
            times.user + times.system + getattr(times, "nice", 0.0) - own.user - own.system
        )


def lower_priority() -> None:
    """Lets all others on this machine go first from now on."""
    import psutil

    with suppress(Exception):
        lowest = getattr(psutil, "BELOW_NORMAL_PRIORITY_CLASS", 10)
        psutil.Process().nice(lowest)
