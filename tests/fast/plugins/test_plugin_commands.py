"""Commands of plugins are found by name, imported when run, and fail with a message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from runtime_makers import python_environment

COMMAND = """
import click

@click.command("weather")
@click.argument("place")
def weather(place):
    \"\"\"Say the weather.\"\"\"
    click.echo(f"rain in {place}")

number = 3
"""
METADATA = "Metadata-Version: 2.1\nName: weather\nVersion: 1\nSummary: Says the weather.\n"
ENTRY_POINTS = """\
[personalpeft.commands]
weather = weather_plugin:weather
broken = no_such_module:command
number = weather_plugin:number
ask = weather_plugin:weather
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with an installed plugin."""
    (tmp_path / "weather_plugin.py").write_text(COMMAND, "utf-8")
    info = tmp_path / "weather-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA, "utf-8")
    (info / "entry_points.txt").write_text(ENTRY_POINTS, "utf-8")
    return tmp_path


def run(
    site: Path, *arguments: str, plugins: str | None = None
) -> subprocess.CompletedProcess[str]:
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from personalpeft_app.cli import cli\n"
        "try:\n    cli.main(sys.argv[1:])\n"
        "finally:\n    print('imported', 'weather_plugin' in sys.modules, file=sys.stderr)\n"
    )
    variables = python_environment(site)
    if plugins is not None:
        variables["PERSONALPEFT_PLUGINS"] = plugins
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env=variables,
        check=False,
    )


def test_a_command_is_run_by_its_name(site: Path) -> None:
    done = run(site, "weather", "Oslo")
    assert (done.returncode, done.stdout) == (0, "rain in Oslo\n"), done.stderr


def test_help_names_the_commands_of_plugins_and_imports_none(site: Path) -> None:
    done = run(site, "--help")
    assert done.returncode == 0
    assert "weather  Says the weather." in done.stdout
    assert "imported False" in done.stderr


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("broken", 13, "no_such_module"),
        ("number", 13, "no click.Command"),
        ("nothing", 2, "No such command"),
    ],
)
def test_a_command_that_cannot_be_run_is_an_error_with_a_hint(
    site: Path, name: str, code: int, words: str
) -> None:
    done = run(site, name)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plugin_replaces_no_command_of_the_program(site: Path) -> None:
    done = run(site, "ask", "--help")
    assert "imported False" in done.stderr


def test_the_variable_disables_commands_too(site: Path) -> None:
    done = run(site, "weather", "Oslo", plugins="t2t")
    assert done.returncode == 2
    assert "weather" not in run(site, "--help", plugins="t2t").stdout
