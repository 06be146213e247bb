"""The daemon's settings: the table ``[daemon]`` of ``config.toml`` in the home."""

from __future__ import annotations

import logging
import re
import tomllib
from dataclasses import dataclass, fields
from datetime import time, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from personalpeft.errors import HomeError, InvalidInput, suggest_nearest

log = logging.getLogger(__name__)

FILE = "config.toml"
TABLE = "daemon"

_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")
_LOWEST = {
    "min_signals": 1,
    "load": 0,
    "temperature": 1,
    "idle": 0,
    "budget": 0,
    "backup_keep": 1,
    "poll_seconds": 1,
}


# Former names of settings, which are read for one release.
_RENAMED = {
    "signals": "min_signals",
    "at": "learn_at",
    "morning": "report_at",
    "mains": "require_ac_power",
    "copies": "backup_keep",
    "every": "poll_seconds",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The daemon's settings; docs/daemon.md explains each.

    Attributes:
        min_signals: New lessons of a user that are enough to learn at any time.
        learn_at: Time of day, "03:00", at which fewer are enough; "" for never.
        report_at: Time of day of the daily report; "" for never.
        zone: Time zone, "Europe/Berlin"; "" for the system's.
        require_ac_power: Whether a learn waits for mains power.
        load: Share (0 to 1) of all processors that other programs may use.
        temperature: Degrees Celsius above which a learn waits.
        idle: Minutes without a reply before a learn starts.
        budget: Minutes of learning a day.
        backup: Folder of backups; "" for none.
        backup_keep: How many backups are kept.
        poll_seconds: Seconds between two looks at the home.

    Raises:
        InvalidInput: A value is out of range.
    """

    min_signals: int = 8
    learn_at: str = "03:00"
    report_at: str = "07:00"
    zone: str = ""
    require_ac_power: bool = True
    load: float = 0.5
    temperature: float = 85.0
    idle: float = 5.0
    budget: float = 60.0
    backup: str = "backups"
    backup_keep: int = 7
    poll_seconds: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name), field.default)
        for name in ("learn_at", "report_at"):
            if getattr(self, name) and not _TIME.fullmatch(getattr(self, name)):
                raise _invalid(
                    name, getattr(self, name), 'Give a time of day as "03:00", or "" for never.'
                )
        self.time_zone()

    def time_zone(self) -> tzinfo:
        """Return the zone of times of day; the system's current one if none is set."""
        if not self.zone:
            import tzlocal

            return tzlocal.reload_localzone()
        try:
            return ZoneInfo(self.zone)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise _invalid(
                "zone", self.zone, 'Give a name as "Europe/Berlin", or "" for the system\'s.'
            ) from error


def time_of_day(text: str) -> time | None:
    """Return a setting's time of day, None for never."""
    return time.fromisoformat(text) if text else None


def read_settings(home: Path) -> Settings:
    """Return the settings of a home, the defaults without a file or table.

    Raises:
        InvalidInput: The file or a value is invalid; the message names the key.
        HomeError: The file cannot be read.
    """
    try:
        text = (home / FILE).read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return Settings()
    except (OSError, UnicodeDecodeError) as error:
        raise HomeError(
            f"{FILE} in the home cannot be read.", hint="It is text in UTF-8 that we may read."
        ) from error
    try:
        table = tomllib.loads(text).get(TABLE, {})
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(
            f"{FILE} in the home is not TOML: {error}.", hint="Mend that line."
        ) from error
    if not isinstance(table, dict):
        raise InvalidInput(f"{TABLE} in {FILE} is no table.", hint=f"Begin it with [{TABLE}].")
    known = [field.name for field in fields(Settings)]
    for old, new in _RENAMED.items():
        if old in table:
            log.warning("%s: %s is now called %s; the old name goes next release", FILE, old, new)
            table.setdefault(new, table.pop(old))
    for key in table:
        if key not in known:
            raise InvalidInput(
                f"{FILE}: [{TABLE}] has no setting {key[:80]!a}.",
                hint=suggest_nearest(key, known, what="setting"),
            )
    return Settings(**table)


def _check(name: str, value: Any, default: Any) -> None:
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise _invalid(name, value, "Give true or false.")
    elif isinstance(default, str):
        if not isinstance(value, str):
            raise _invalid(name, value, "Give a text in quotes.")
    else:
        whole = isinstance(default, int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise _invalid(name, value, f"Give a {'whole ' if whole else ''}number.")
        # Not a number is not less than anything either.
        if not _LOWEST[name] <= value < 1e9:
            raise _invalid(name, value, f"Give a number from {_LOWEST[name]} on.")


def _invalid(name: str, value: Any, hint: str) -> InvalidInput:
    return InvalidInput(f"{FILE}: {name} in [{TABLE}] cannot be {ascii(value)[:80]}.", hint=hint)
