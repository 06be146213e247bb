"""What can be set of the daemon: the table ``[daemon]`` of ``config.toml`` in the home, each key with a default."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from datetime import time, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from personalpeft.errors import HomeError, InvalidInput, suggest_nearest

FILE = "config.toml"
TABLE = "daemon"

_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")
_LOWEST = {
    "signals": 1,
    "load": 0,
    "temperature": 1,
    "idle": 0,
    "budget": 0,
    "copies": 1,
    "every": 1,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """See docs/daemon.md for each. ``idle`` and ``budget`` are minutes, ``every`` seconds, ``temperature`` degrees Celsius,
    ``load`` a share (0 to 1) of all processors; ``at`` and ``morning`` are times of day as "03:00", "" for never; ``zone`` is
    a name as "Europe/Berlin", "" for the system's. Raises ``InvalidInput`` for a value that cannot be.
    """

    signals: int = 8
    at: str = "03:00"
    morning: str = "07:00"
    zone: str = ""
    mains: bool = True
    load: float = 0.5
    temperature: float = 85.0
    idle: float = 5.0
    budget: float = 60.0
    backup: str = "backups"
    copies: int = 7
    every: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name), field.default)
        for name in ("at", "morning"):
            if getattr(self, name) and not _TIME.fullmatch(getattr(self, name)):
                raise _invalid(
                    name, getattr(self, name), 'Give a time of day as "03:00", or "" for never.'
                )
        self.time_zone()

    def time_zone(self) -> tzinfo:
        """The zone of times of day: the system's, as it is now, where none was named."""
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
    """The time of day that a setting says; None: never."""
    return time.fromisoformat(text) if text else None


def read(home: Path) -> Settings:
    """The settings of a home; the defaults where it has no such file or table. Raises ``InvalidInput`` naming the key,
    ``HomeError``.
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
