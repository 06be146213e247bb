"""The library needs no extra; a face without its extra names it, in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from app_makers import Place

# Runs the command line where the packages of all extras cannot be found.
_WITHOUT_EXTRAS = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from personalpeft_app.cli import main
main()
"""
_PACKAGES = {
    "llamacpp": ["llama_cpp"],
    "serve": ["flask", "waitress", "prometheus_client"],
    "tui": ["textual", "markdown_it"],
    "daemon": ["apscheduler", "tzlocal"],
}


def run(place: Place, *args: str) -> subprocess.CompletedProcess[str]:
    packages = [each for some in _PACKAGES.values() for each in some]
    program = _WITHOUT_EXTRAS.format(packages=packages)
    return subprocess.run(
        [sys.executable, "-c", program, *args],
        env={**os.environ, **place.environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_line_and_the_library_work_without_any_extra(place: Place) -> None:
    asked = run(place, "ask", "Hello there", "--backend", "fake")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip()
    for args in (["--help"], ["stack"], ["models"], ["serve", "--help"], ["daemon", "--help"]):
        shown = run(place, *args)
        assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize(
    ("extra", "args"),
    [
        ("llamacpp", ["ask", "Hello", "--backend", "llamacpp", "--base", "tiny-random"]),
        ("serve", ["serve", "--port", "0", "--backend", "fake"]),
        ("tui", ["tui", "--backend", "fake"]),
        ("daemon", ["daemon", "run", "--backend", "fake"]),
    ],
)
def test_a_face_without_its_extra_names_it(place: Place, extra: str, args: list[str]) -> None:
    ended = run(place, *args)
    assert ended.returncode == 10, ended.stderr
    assert f"personalpeft[{extra}]" in ended.stderr
    assert "Traceback" not in ended.stderr
    error, hint = ended.stderr.strip().splitlines()[-2:]
    assert error.startswith("error:")
    assert hint.startswith("hint:")
