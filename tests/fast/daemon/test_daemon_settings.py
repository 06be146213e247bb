"""Settings are read from the home, invalid ones are named, and the service files run the daemon."""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import fields
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from personalpeft import HomeError, InvalidInput
from personalpeft_app.daemon import units
from personalpeft_app.daemon.settings import Settings, read_settings

ROOT = Path(__file__).parents[3]


def write(home: Path, text: str) -> Path:
    (home / "config.toml").write_text(text)
    return home


def test_a_home_without_settings_has_the_defaults(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == read_settings(tmp_path / "nowhere") == Settings()


def test_settings_take_effect(tmp_path: Path) -> None:
    home = write(
        tmp_path,
        '[daemon]\nmin_signals = 3\nload = 1\nlearn_at = ""\nrequire_ac_power = false\nzone = "Asia/Tokyo"\n',
    )
    settings = read_settings(home)
    assert (
        settings.min_signals,
        settings.load,
        settings.learn_at,
        settings.require_ac_power,
        settings.zone,
    ) == (
        3,
        1,
        "",
        False,
        "Asia/Tokyo",
    )
    assert settings.backup_keep == Settings().backup_keep


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="Windows has no TZ")
@pytest.mark.parametrize(
    ("name", "hours"),
    [("UTC0", {0}), ("EST5", {-5}), ("CET-1CEST,M3.5.0,M10.5.0/3", {1, 2}), ("Asia/Tokyo", {9})],
)
def test_the_zone_of_the_system_is_read_in_all_forms_of_posix(
    monkeypatch: pytest.MonkeyPatch, name: str, hours: set[int]
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", name)
        time.tzset()
        offset = datetime.now(Settings().time_zone()).utcoffset()
    time.tzset()
    assert offset is not None
    assert offset / timedelta(hours=1) in hours


def test_former_names_of_settings_are_accepted_for_one_release(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = (
        '[daemon]\nsignals = 3\nat = "04:00"\nmorning = ""\nmains = false\ncopies = 2\nevery = 9\n'
    )
    settings = read_settings(write(tmp_path, old))
    assert settings == Settings(
        min_signals=3,
        learn_at="04:00",
        report_at="",
        require_ac_power=False,
        backup_keep=2,
        poll_seconds=9,
    )
    assert len(caplog.records) == 6


@pytest.mark.parametrize(
    "line",
    [
        "min_signals = 0",
        "min_signals = 2.5",
        "min_signals = true",
        "load = nan",
        "budget = -1",
        "require_ac_power = 1",
        "learn_at = 3",
        'learn_at = "25:00"',
        'report_at = "7"',
        'zone = "Middle/Earth"',
        'zone = "../../etc/passwd"',
    ],
)
def test_an_invalid_setting_is_named_with_a_hint(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_settings(write(tmp_path, f"[daemon]\n{line}\n"))
    assert line.split()[0] in caught.value.message
    assert caught.value.hint


def test_a_misspelt_setting_suggests_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_settings(write(tmp_path, "[daemon]\nmin_signal = 3\n"))
    assert "min_signals" in caught.value.hint


@pytest.mark.parametrize("text", ["[daemon", "daemon = 3\n"])
def test_settings_that_are_no_table_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidInput):
        read_settings(write(tmp_path, text))


def test_unreadable_settings_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(HomeError):
        read_settings(tmp_path)


def test_the_documented_defaults_are_the_settings_as_toml(tmp_path: Path) -> None:
    page = (ROOT / "docs/reference/configuration.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", page.split("## The engine")[0], re.MULTILINE)
    assert [key for key, _ in rows] == [field.name for field in fields(Settings)]
    text = "\n".join(f"{key} = {default}" for key, default in rows)
    assert read_settings(write(tmp_path, f"[daemon]\n{text}\n")) == Settings()


WORDS = [
    "/opt/my python/bin/python",
    "-m",
    "personalpeft_app",
    "--home",
    '/data/50%/a"b$c\\d',
    "daemon",
    "run",
]


def test_a_systemd_unit_runs_the_same_arguments() -> None:
    unit = units.systemd(WORDS, {"PERSONALPEFT_CACHE": "/a cache"})
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line)] == WORDS
    assert 'Environment="PERSONALPEFT_CACHE=/a cache"' in unit
    assert "[Install]" in unit


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "personalpeft_app",
        "--home",
        "/data/50%/my home",
        "daemon",
        "run",
    ]
    unit = tmp_path / "personalpeft.service"
    unit.write_text(units.systemd(words, {"PERSONALPEFT_CACHE": "/a cache"}))
    result = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(unit)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, str(unit.name) in result.stderr) == (0, False), result.stderr


def test_a_launchd_agent_runs_the_same_arguments() -> None:
    agent = plistlib.loads(units.launchd(WORDS, {"PERSONALPEFT_CACHE": "/a <cache>"}).encode())
    assert agent["ProgramArguments"] == WORDS
    assert agent["EnvironmentVariables"] == {"PERSONALPEFT_CACHE": "/a <cache>"}
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
