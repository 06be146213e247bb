"""The daemon's settings: the table ``[daemon]`` of ``config.toml`` in the home."""

from __future__ import annotations

import logging
import re
import tomllib
from dataclasses import fields
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Annotated
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from personalpeft.errors import HomeError, InvalidInput, suggest_nearest

log = logging.getLogger(__name__)

FILE = "config.toml"
TABLE = "daemon"

# Former names of settings, which are read for one release.
_RENAMED = {
    "signals": "min_signals",
    "at": "learn_at",
    "morning": "report_at",
    "mains": "require_ac_power",
    "copies": "backup_keep",
    "every": "poll_seconds",
}


def _check_time(text: str) -> str:
    if text and not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", text):
        raise ValueError('It must be a time of day, as "03:00", or "" for never')
    return text


def _check_zone(name: str) -> str:
    if name:
        try:
            ZoneInfo(name)
        except (KeyError, ValueError, OSError) as error:
            raise ValueError(
                'It must be a time zone, as "Europe/Berlin", or "" for the system\'s'
            ) from error
    return name


_TimeOfDay = Annotated[str, AfterValidator(_check_time)]
_Zone = Annotated[str, AfterValidator(_check_zone)]
_NotNegative = Annotated[float, Field(ge=0, lt=1e9)]
_Count = Annotated[int, Field(ge=1, lt=10**9)]
_AtLeastOne = Annotated[float, Field(ge=1, lt=1e9)]


_RULES = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True, config=_RULES)
class Settings:
    """The daemon's settings.

    Attributes:
        min_signals: New lessons of a user that are enough to learn at any time.
        learn_at: Time of day, "03:00", at which fewer are enough; "" for never.
        report_at: Time of day of the daily report; "" for never.
        zone: Time zone, "Europe/Berlin"; "" for the system's.
        require_ac_power: Whether a learn waits for mains power.
        load: Share (0 to 1) of all processors that other programs may use.
        temperature: Degrees Celsius above which a learn waits.
        idle: Minutes without a reply before a learn starts; ten seconds at least.
        budget: Minutes of learning a day, for all users together.
        backup: Folder of backups, relative to the home; "" for none.
        backup_keep: How many backups are kept.
        poll_seconds: Seconds between two looks at the home; read at the start.
    """

    min_signals: _Count = 8
    learn_at: _TimeOfDay = "03:00"
    report_at: _TimeOfDay = "07:00"
    zone: _Zone = ""
    require_ac_power: bool = True
    load: _NotNegative = 0.5
    temperature: _AtLeastOne = 85.0
    idle: _NotNegative = 5.0
    budget: _NotNegative = 60.0
    backup: str = "backups"
    backup_keep: _Count = 7
    poll_seconds: _AtLeastOne = 60.0

    def time_zone(self) -> tzinfo:
        """Return the zone of times of day; the system's current one if none is set."""
        if self.zone:
            return ZoneInfo(self.zone)
        import tzlocal

        try:
            return tzlocal.reload_localzone()
        except Exception:  # noqa: BLE001 - it refuses a TZ of POSIX, as CET-1CEST,M3.5.0,M10.5.0
            return datetime.now().astimezone().tzinfo or UTC


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
        hint = "It must be text in UTF-8 that this user may read."
        raise HomeError(f"{FILE} in the home cannot be read.", hint=hint) from error
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"{FILE} is not TOML: {error}.", hint="Correct that line.") from error
    unknown = sorted(tables.keys() - {TABLE})
    if unknown:
        raise InvalidInput(
            f"{FILE}: {unknown[0][:80]!a} is not a table of this file.",
            hint=f"It has one table, [{TABLE}]. Options of learning and of the gate belong in a card.",
        )
    table = tables.get(TABLE, {})
    if not isinstance(table, dict):
        raise InvalidInput(f"{TABLE} in {FILE} must be a table.", hint=f"Begin it with [{TABLE}].")
    for old, new in _RENAMED.items():
        if old in table:
            log.warning("%s: %s is now called %s; the old name goes next release", FILE, old, new)
            table.setdefault(new, table.pop(old))
    try:
        return Settings(**table)
    except ValidationError as error:
        fault = error.errors()[0]
        key = str(fault["loc"][0])
        hint = f"{fault['msg'].removeprefix('Value error, ')}; got {ascii(fault['input'])[:80]}."
        if fault["type"] == "unexpected_keyword_argument":
            hint = suggest_nearest(key, [each.name for each in fields(Settings)], what="setting")
        message = f"{FILE}: {key[:80]!a} in [{TABLE}] is not a valid setting."
        raise InvalidInput(message, hint=hint) from error
